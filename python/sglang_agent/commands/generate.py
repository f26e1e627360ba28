"""``generate``: a seeded trace with the shape of a published agent workload."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

NAME = "generate"
HELP = "Write a seeded trace with the shape of a published agent workload."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from sglang_agent.simulate.workloads import WORKLOADS

    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("-o", "--output", type=Path, required=True, help="trace file")
    parser.add_argument(
        "--scale",
        type=Fraction,
        default=Fraction(1),
        help="share of the trajectories, like 1/8 (default 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default 0")


def run(args: argparse.Namespace) -> int:
    """Write the trace; raises UsageError for a scale out of range."""
    from sglang_agent.simulate.workloads import generate
    from sglang_agent.trace import write_trace

    records = generate(args.workload, scale=float(args.scale), seed=args.seed)
    write_trace(args.output, records)
    turns = sum(stage.turn > 0 for record in records for stage in record.stages)
    print(f"{len(records)} trajectories, {turns} stages in {args.output}")
    return 0
