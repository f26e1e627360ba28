"""The program: ``python -m sglang_agent COMMAND``.

Exit codes: 0 done, 1 failed samples, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from sglang_agent import commands
from sglang_agent.errors import UsageError


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line; ``--help`` has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sglang_agent",
        description="Run batches of LLM-agent tasks in the shortest wall time.",
        epilog="Exit codes: 0 done, 1 failed samples, 2 usage, 130 interrupted.",
    )
    choices = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands.load():
        child = choices.add_parser(
            command.NAME, help=command.HELP, description=command.HELP
        )
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  (the program's voice)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
