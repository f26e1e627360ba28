"""``report``: what a batch did with its time."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "report"
HELP = "Report on a run: a table here, JSON, pictures and timelines in files."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_path", metavar="RUN", type=Path, help="run folder or trace"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where to write report.json, report.txt, timeline.html, perfetto.json.gz and "
        "plots/ (default: the run folder; nothing is written for a lone trace file)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report and write its files; raises UsageError for a bad trace."""
    import msgspec

    from sglang_agent.report import build_report, render_text
    from sglang_agent.report.files import read_report, write_report
    from sglang_agent.trace import BadLine, read_trace

    bad: list[BadLine] = []
    records = read_trace(args.run_path, bad)
    known = read_report(args.run_path) if args.run_path.is_dir() else None
    left_out = [f"line left out: {line}" for line in bad]
    report = build_report(records, (known or {}).get("run", {}), left_out)
    folder = args.output or (args.run_path if args.run_path.is_dir() else None)
    if folder is not None:
        write_report(report, records, folder)
    print(msgspec.json.encode(report).decode() if args.json else render_text(report))
    return 0
