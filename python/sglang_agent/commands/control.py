"""``control``: look at a run that is going on, change its limits, pause it."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "control"
HELP = "show a running batch, change its limits, pause or resume it"

PAUSABLE = ("admission", "jobs", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument(
        "--sample-concurrency", type=int, metavar="CS", help="samples active at once"
    )
    parser.add_argument(
        "--env-concurrency", type=int, metavar="CE", help="environment jobs at once"
    )
    parser.add_argument(
        "--pause", choices=PAUSABLE, help="start nothing more; what runs goes on"
    )
    parser.add_argument("--resume", choices=PAUSABLE, help="end a pause")


def run(args: argparse.Namespace) -> int:
    """Print the run's status after the change as JSON."""
    import asyncio

    import orjson

    from sglang_agent.control import Wish, ask

    wish = Wish(args.sample_concurrency, args.env_concurrency)
    for what, paused in ((args.pause, True), (args.resume, False)):
        if what in ("admission", "all"):
            wish.admission_paused = paused
        if what in ("jobs", "all"):
            wish.jobs_paused = paused
    status = asyncio.run(ask(args.folder, wish))
    print(orjson.dumps(status, option=orjson.OPT_INDENT_2).decode())
    return 0
