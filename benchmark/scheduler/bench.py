"""CPU seconds that each schedule policy spends on priority calculation.

Whole closed-loop batches shaped like the paper's workloads (arXiv:2611.16661, table 1)
run through the real scheduler on virtual time, at the highest concurrency of the
paper's figure 6. Run it with ``make bench-scheduler``; ``--quick`` takes the policies
and the one setting that the goals are about.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sgl_router.policies import make_policy
from sglang_agent.records import InferenceStage, TrajectoryRecord
from sglang_agent.simulate import SimulationSettings, load_deployment, simulate
from sglang_agent.simulate.script import script_of
from sglang_agent.simulate.workers import WorkerPool
from sglang_agent.simulate.workloads import generate

POLICIES = [
    "fcfs",
    "lpm",
    "dfs-weight",
    "hrrn",
    "routing-key",
    "shortest-prefill-first",
    "routing-prefix",
]
QUICK_POLICIES = ["fcfs", "lpm", "dfs-weight", "routing-prefix"]


class Case(NamedTuple):
    """A workload at its highest concurrency, and the goals as RP / other."""

    sample_concurrency: int
    ratio: float
    goals: dict[str, float]
    paper: dict[str, float]


CASES = {
    "swe": Case(
        289, 0.09, {"lpm": 0.25, "dfs-weight": 0.10}, {"lpm": 0.41, "dfs-weight": 0.18}
    ),
    "bfcl": Case(
        1950, 2.26, {"lpm": 1.0, "dfs-weight": 0.04}, {"lpm": 1.43, "dfs-weight": 0.063}
    ),
    "widesearch": Case(
        200, 0.10, {"lpm": 0.40, "dfs-weight": 0.15}, {"lpm": 0.64, "dfs-weight": 0.28}
    ),
}


class Run(NamedTuple):
    """One simulated batch."""

    workload: str
    policy: str
    refresh: bool
    seed: int


def main(arguments: list[str] | None = None) -> int:
    """Run, print a table and write JSON."""
    options = parse(arguments)
    policies = options.policies or (QUICK_POLICIES if options.quick else POLICIES)
    refreshes = [True] if options.quick else [True, False]
    seeds = range(1 if options.quick else options.seeds)
    results: list[dict[str, Any]] = []
    for refresh in refreshes:
        flag = "1" if refresh else "0"
        with WorkerPool(
            environment={"SGLANG_ENABLE_WAITING_PREFIX_REFRESH": flag}
        ) as pool:
            for run in runs(options.workloads, policies, refresh, seeds):
                results.append(measure(run, options.scale, pool))
                print(line(results[-1]), file=sys.stderr, flush=True)
                write(options.output, options, results)
    print(table(results))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES)
    parser.add_argument(
        "--scale",
        type=lambda text: float(Fraction(text)),
        default=1.0,
        help="share of each batch: first trajectories beyond 1.2 times the concurrency "
        "are left out, then each one is cut to a run of consecutive turns (default 1)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default 3)")
    parser.add_argument("--quick", action="store_true", help="few policies, one seed")
    parser.add_argument(
        "--output", type=Path, default=Path("build/bench-scheduler.json")
    )
    return parser.parse_args(arguments)


def runs(
    workloads: Sequence[str], policies: Sequence[str], refresh: bool, seeds: range
) -> Iterator[Run]:
    """Every combination; the policies of one batch follow each other."""
    for workload, seed, policy in itertools.product(workloads, seeds, policies):
        yield Run(workload, policy, refresh, seed)


def measure(run: Run, scale: float, pool: WorkerPool) -> dict[str, Any]:
    """Simulate one batch."""
    case = CASES[run.workload]
    trace = cut(generate(run.workload, seed=run.seed), case, scale, run.seed)
    settings = SimulationSettings(
        deployment=load_deployment("h20-tp4-ling-3.0-flash"),
        sample_concurrency=case.sample_concurrency,
        schedule_policy=run.policy,
        ratio=case.ratio,
        bypass_environment=True,
    )
    began = time.perf_counter()
    scripts = [script_of(record) for record in trace]
    result = simulate(scripts, settings, lambda names: make_policy("lbch", names), pool)
    (worker,) = result.workers
    inputs = sum(s.input_tokens for r in result.records for s in inferences(r))
    cached = sum(s.cached_tokens for r in result.records for s in inferences(r))
    return {
        **run._asdict(),
        "priority_cpu_s": worker.priority_cpu_s,
        "priority_calls": worker.priority_calls,
        "requests": worker.finished,
        "waiting_peak": worker.waiting_peak,
        "reuse": cached / inputs,
        "virtual_makespan_s": max(r.ended_s for r in result.records),
        "scheduler_cpu_s": worker.cpu_s,
        "wall_s": time.perf_counter() - began,
        "engine": worker.engine,
    }


def cut(
    trace: list[TrajectoryRecord], case: Case, scale: float, seed: int
) -> list[TrajectoryRecord]:
    """A share of the batch that keeps the queue as long as it was."""
    wanted = max(round(case.sample_concurrency * 1.2), round(len(trace) * scale))
    kept = trace[:wanted]
    share = min(1.0, scale * len(trace) / len(kept))
    rng = random.Random(seed)
    return [shorten(record, share, rng) for record in kept]


def shorten(
    record: TrajectoryRecord, share: float, rng: random.Random
) -> TrajectoryRecord:
    """A run of consecutive turns from a random point of the trajectory's life."""
    turns = len(inferences(record))
    count = max(1, round(turns * share))
    first = rng.randint(1, turns - count + 1)
    stages = [s for s in record.stages if first <= s.turn < first + count]
    return msgspec.structs.replace(record, stages=stages)


def inferences(record: TrajectoryRecord) -> list[InferenceStage]:
    """The inference stages of a trajectory."""
    return [s for s in record.stages if isinstance(s, InferenceStage)]


def line(result: dict[str, Any]) -> str:
    """Progress, one run a line."""
    return (
        f"{result['workload']:11} {result['policy']:23} refresh {result['refresh']!s:5} "
        f"seed {result['seed']}: priority {result['priority_cpu_s']:8.3f} s in "
        f"{result['priority_calls']} calls, reuse {result['reuse']:.3f}, "
        f"virtual {result['virtual_makespan_s'] / 60:.1f} min, "
        f"CPU {result['scheduler_cpu_s']:.0f} s"
    )


def table(results: list[dict[str, Any]]) -> str:
    """Median and spread by policy, and routing-prefix against the goals."""
    lines = [
        "workload | refresh | policy | priority CPU s: median (min to max) | reuse"
    ]
    groups: dict[tuple[str, bool, str], list[dict[str, Any]]] = {}
    for result in results:
        key = (result["workload"], result["refresh"], result["policy"])
        groups.setdefault(key, []).append(result)
    for (workload, refresh, policy), group in groups.items():
        seconds = [result["priority_cpu_s"] for result in group]
        reuse = statistics.median(result["reuse"] for result in group)
        lines.append(
            f"{workload} | {'on' if refresh else 'off'} | {policy} | "
            f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to "
            f"{max(seconds):.3f}) | {reuse:.3f}"
        )
    lines += list(goals(groups))
    return "\n".join(lines)


def goals(
    groups: dict[tuple[str, bool, str], list[dict[str, Any]]],
) -> Iterator[str]:
    """Ratios of medians, with the goal and the paper's figure."""
    for workload, refresh in dict.fromkeys((w, r) for w, r, _ in groups):
        ours = groups.get((workload, refresh, "routing-prefix"))
        for other, goal in CASES[workload].goals.items():
            theirs = groups.get((workload, refresh, other))
            if ours is None or theirs is None:
                continue
            ratio = median(ours) / median(theirs)
            verdict = "met" if ratio <= goal else "NOT met"
            yield (
                f"{workload}, refresh {'on' if refresh else 'off'}: routing-prefix / "
                f"{other} = {ratio:.3f}, goal {goal} {verdict}, paper "
                f"{CASES[workload].paper[other]}"
            )


def median(group: list[dict[str, Any]]) -> float:
    """Median priority seconds of a group."""
    return statistics.median(result["priority_cpu_s"] for result in group)


def write(
    path: Path, options: argparse.Namespace, results: list[dict[str, Any]]
) -> None:
    """Keep what has been measured so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {platform.processor() or 'CPU'}",
        "scale": options.scale,
        "runs": results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
