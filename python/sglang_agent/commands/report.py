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
        "plots/ (default: the run folder; for a lone trace, or a run that has not ended, "
        "they are only printed)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report and write its files; raises UsageError for a bad trace."""
    import msgspec

    from sglang_agent.report import build_report, render_text
    from sglang_agent.report.files import write_report
    from sglang_agent.report.source import read_source

    source = read_source(args.run_path)
    report = build_report(source.records, source.run_info, source.warnings)
    folder = args.output or source.folder
    if folder is not None:
        write_report(report, source.records, folder)
    print(msgspec.json.encode(report).decode() if args.json else render_text(report))
    return 0
