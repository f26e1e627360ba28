"""``diff``: two runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_agent.diff import Comparison

NAME = "diff"
HELP = (
    "Compare two runs: was their work the same, and what changed? "
    "Exit code 1 when the work differs."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="run folder or trace")
    parser.add_argument("b", metavar="B", type=Path, help="run folder or trace")
    parser.add_argument(
        "--duration-tolerance",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="environment jobs count as equally long up to this relative difference "
        "(default 0.05)",
    )
    parser.add_argument(
        "--duration-slack-s",
        type=float,
        default=0.05,
        metavar="S",
        help="or up to so many seconds: timers of a busy machine are late (default 0.05)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; raises UsageError for a trace that cannot be read."""
    import msgspec

    from sglang_agent.diff import Tolerance, compare
    from sglang_agent.errors import UsageError
    from sglang_agent.report import build_report
    from sglang_agent.report.source import read_source

    if not 0 <= args.duration_tolerance < 1:
        raise UsageError(
            f"--duration-tolerance is {args.duration_tolerance}; must be from 0 to 1"
        )
    if not args.duration_slack_s >= 0:
        raise UsageError(
            f"--duration-slack-s is {args.duration_slack_s}; must be 0 or more"
        )
    sources = [read_source(path) for path in (args.a, args.b)]
    for bad in (line for source in sources for line in source.bad):
        raise UsageError(str(bad))  # what is missing would look like a difference
    a, b = (source.records for source in sources)
    comparison = compare(
        a,
        b,
        (build_report(a, {}), build_report(b, {})),
        Tolerance(args.duration_tolerance, args.duration_slack_s),
    )
    if args.json:
        print(msgspec.json.encode(comparison).decode())
    else:
        _show(comparison)
    return 0 if comparison.same_work else 1


def _show(comparison: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    print(verdict(comparison))
    for difference in comparison.examples:
        turn = "" if difference.turn is None else f" turn {difference.turn}"
        print(
            f"  {difference.sample_id}{turn}: {difference.what} "
            f"{difference.a} / {difference.b}"
        )
    table = Table()
    for heading in ("", "A", "B", "change"):
        table.add_column(heading, justify="left" if not heading else "right")
    for change in comparison.changes:
        relative = "" if change.relative is None else f"{change.relative:+.1%}"
        table.add_row(change.name, f"{change.a:.4g}", f"{change.b:.4g}", relative)
    Console(highlight=False).print(table)


def verdict(comparison: Comparison) -> str:
    """One line: the same work or not, and what kinds of difference there are."""
    if comparison.same_work:
        return (
            f"the same work: {comparison.samples} samples, {comparison.turns} turns with "
            "equal input and output lengths and environment durations; only times differ"
        )
    kinds = ", ".join(f"{what} {n}" for what, n in comparison.differing.items())
    return f"not the same work: {kinds}"
