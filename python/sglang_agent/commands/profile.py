"""``profile``: measure recorded trajectories for the cache planner."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

NAME = "profile"
HELP = "Measure recorded trajectories and write the workload profile."
SHOWN_BAD_LINES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        metavar="RUN_OR_TRACE",
        nargs="+",
        type=Path,
        help="run folder, trace, agentic-trace file (.json), or JSON lines with one "
        "request each (trajectory id and usage)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="profile to write (JSON)"
    )
    parser.add_argument(
        "--name", help="name of the workload (default: the first source's name)"
    )
    parser.add_argument(
        "--trajectory-field",
        metavar="FIELD",
        help="field of request lines that holds the trajectory id (default: the first "
        "there is of trajectory_id, trajectory, routing_key, session_id, "
        "conversation_id, sample_id, label)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the profile; raises UsageError when there is nothing to measure."""
    import msgspec

    from sglang_agent.profile import advice, build_profile
    from sglang_agent.profile_sources import read_sources

    source = read_sources(args.sources, args.trajectory_field)
    for line in source.bad[:SHOWN_BAD_LINES]:
        print(f"left out: {line}", file=sys.stderr)
    if len(source.bad) > SHOWN_BAD_LINES:
        more = len(source.bad) - SHOWN_BAD_LINES
        print(f"left out: {more} more lines", file=sys.stderr)
    profile = build_profile(
        args.name or args.sources[0].stem,
        source.trajectories,
        incomplete=source.incomplete,
        skipped_lines=len(source.bad),
    )
    content = msgspec.json.format(msgspec.json.encode(profile), indent=2)
    args.output.write_bytes(content + b"\n")
    print(
        f"{profile.trajectories} trajectories, final context "
        f"{profile.final_context_tokens.mean:,.0f} tokens on average, in {args.output}"
    )
    for text in advice(profile):
        print(text)
    return 0
