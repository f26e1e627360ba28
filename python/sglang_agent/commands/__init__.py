"""The subcommands of ``python -m sglang_agent``, one module each.

A command module has ``NAME``, ``HELP``, ``add_arguments(parser)`` and
``run(args) -> int`` (the exit code), and imports what is slow inside ``run``. To add
one, write the module and add its name to :data:`MODULES`.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

MODULES: tuple[str, ...] = (
    "sglang_agent.commands.run",
    "sglang_agent.commands.control",
    "sglang_agent.commands.profile",
    "sglang_agent.commands.replay",
    "sglang_agent.commands.generate",
    "sglang_agent.commands.simulate",
    "sglang_agent.commands.calibrate",
    "sglang_agent.commands.report",
    "sglang_agent.commands.diff",
)


class Command(Protocol):
    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def load() -> list[Command]:
    """Import the command modules, in the order in which help lists them."""
    return [cast(Command, importlib.import_module(name)) for name in MODULES]
