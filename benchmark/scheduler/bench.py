"""CPU seconds that each schedule policy spends on priority calculation.

Closed-loop batches shaped like the paper's workloads (arXiv:2611.16661, table 1) run
through the real scheduler on virtual time, at the highest concurrency of the paper's
figure 6. ``make bench-scheduler`` runs every policy over whole batches, which takes
hours; ``--scale`` takes a slice of the same concurrency and fewer turns. A run that the
output file has is not repeated, so the command can be stopped and started, and several
commands may fill one file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from report import CASES, POLICIES, Case, Run, load, summary

from sgl_router.policies import make_policy
from sglang_agent.machine import in_words
from sglang_agent.records import InferenceStage, TrajectoryRecord
from sglang_agent.simulate import SimulationSettings, load_deployment, simulate
from sglang_agent.simulate.cost_model import Deployment
from sglang_agent.simulate.script import script_of
from sglang_agent.simulate.workers import WorkerPool
from sglang_agent.simulate.workloads import generate


class Cell(NamedTuple):
    """One simulated batch: its key in the results."""

    workload: str
    scale: float
    policy: str
    refresh: bool
    seed: int


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, then print the summary."""
    options = parse(arguments)
    runs = load(options.output) if options.output.exists() else []
    known = {Cell(r.workload, r.scale, r.policy, r.refresh, r.seed) for r in runs}
    missing = [cell for cell in cells(options) if cell not in known]
    print(f"{len(missing)} runs missing", file=sys.stderr)
    with ExitStack() as cleanup:
        # SGLang is imported once for each setting of an environment variable.
        pools = {
            refresh: cleanup.enter_context(pool_of(refresh))
            for refresh in {cell.refresh for cell in missing}
        }
        for cell in missing:
            runs.append(measure(cell, pools[cell.refresh]))
            print(line(runs[-1]), file=sys.stderr, flush=True)
            write(options.output, runs)
    print("\n".join(summary(runs)))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument(
        "--scale",
        type=lambda text: float(Fraction(text)),
        default=1.0,
        help="share of each batch: first trajectories beyond 1.2 times the concurrency "
        "are left out, then each one is cut to a run of consecutive turns (default 1)",
    )
    parser.add_argument(
        "--refresh",
        nargs="+",
        choices=["on", "off"],
        default=["on", "off"],
        help="the waiting-prefix refresh (default: both)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default 3)")
    parser.add_argument(
        "--output", type=Path, default=Path("build/bench-scheduler.json")
    )
    return parser.parse_args(arguments)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Every combination; the policies of one batch follow each other."""
    for seed, workload, refresh, policy in itertools.product(
        range(options.seeds), options.workloads, options.refresh, options.policies
    ):
        yield Cell(workload, options.scale, policy, refresh == "on", seed)


def pool_of(refresh: bool) -> WorkerPool:
    """Workers with the waiting-prefix refresh on or off."""
    flag = "1" if refresh else "0"
    return WorkerPool(environment={"SGLANG_ENABLE_WAITING_PREFIX_REFRESH": flag})


def measure(cell: Cell, pool: WorkerPool) -> Run:
    """Simulate one batch."""
    case = CASES[cell.workload]
    trace = cut(generate(cell.workload, seed=cell.seed), case, cell.scale, cell.seed)
    settings = SimulationSettings(
        deployment=deployment(),
        sample_concurrency=case.sample_concurrency,
        schedule_policy=cell.policy,
        ratio=case.ratio,
        bypass_environment=True,
    )
    scripts = [script_of(record) for record in trace]
    result = simulate(scripts, settings, lambda names: make_policy("lbch", names), pool)
    (worker,) = result.workers
    answers = [stage for record in result.records for stage in inferences(record)]
    return Run(
        **cell._asdict(),
        trajectories=len(trace),
        requests=worker.finished,
        passes=worker.priority_calls,
        priority_cpu_s=worker.priority_cpu_s,
        scheduler_cpu_s=worker.cpu_s,
        peak_memory_bytes=worker.peak_memory_bytes,
        waiting_peak=worker.waiting_peak,
        reuse=sum(stage.cached_tokens for stage in answers)
        / sum(stage.input_tokens for stage in answers),
        virtual_makespan_s=max(record.ended_s for record in result.records),
        engine=worker.engine,
        date=time.strftime("%Y-%m-%d"),
        machine=in_words(),
    )


def deployment() -> Deployment:
    """The published deployment; what ordering the queue takes is measured, not charged."""
    published = load_deployment("h20-tp4-ling-3.0-flash")
    passes = msgspec.structs.replace(
        published.passes, waiting_token_s=0.0, lookup_token_s=0.0, walked_token_s=0.0
    )
    return msgspec.structs.replace(published, passes=passes)


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


def inferences(record: TrajectoryRecord) -> Sequence[InferenceStage]:
    """The inference stages of a trajectory."""
    return [s for s in record.stages if isinstance(s, InferenceStage)]


def line(run: Run) -> str:
    """Progress, one run a line."""
    return (
        f"{run.workload:11} {run.policy:23} refresh {run.refresh!s:5} "
        f"seed {run.seed}: priority {run.priority_cpu_s:8.3f} s in "
        f"{run.passes} passes, reuse {run.reuse:.3f}, "
        f"virtual {run.virtual_makespan_s / 60:.1f} min, CPU {run.scheduler_cpu_s:.0f} s"
    )


def write(path: Path, runs: Iterable[Run]) -> None:
    """Keep what has been measured so far, whenever the program is stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"runs": [msgspec.to_builtins(run) for run in runs]}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
