"""CAAS against FCFS over many draws of the mcp_atlas trace, in seconds each.

The real admission gate and action scheduler on the virtual clock; an inference turn
takes a fixed time and a time per output token, whatever else runs, so no engine is
simulated. With one sample at a time that is what the whole simulation gives. For the
figures with the engine run ``reproduce.py --figures figure-12 --seed N``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from figures import Cell, mcp

from sglang_agent.actions import ActionScheduler
from sglang_agent.admission import AdmissionGate
from sglang_agent.clock import VirtualClock
from sglang_agent.simulate.script import TrajectoryScript, script_of
from sglang_agent.simulate.workloads import generate
from sglang_agent.trajectory import Trajectory

TURN_S, OUTPUT_TOKEN_S = 0.4, 0.0205


class Batch(NamedTuple):
    """Minutes: the makespan and when 95% were complete."""

    makespan: float
    t95: float

    @property
    def l5(self) -> float:
        """Equation 21."""
        return self.makespan - self.t95


def main(arguments: list[str] | None = None) -> int:
    """Print one row for each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    options = parser.parse_args(arguments)
    print("| seed | CE | FCFS, min | its L5 | CAAS | its L5 | 95% later by, min |")
    print("|---|---|---|---|---|---|---|")
    for seed in options.seeds:
        scripts = [script_of(record) for record in generate("mcp_atlas", seed=seed)]
        for row in rows(scripts):
            print(f"| {seed} | {row} |", flush=True)
    return 0


def rows(scripts: Sequence[TrajectoryScript]) -> Iterator[str]:
    """Both orders at both execution limits of figure 12."""
    for capacity in (3, 5):
        fcfs, caas = (run(scripts, mcp(capacity, 50, o)) for o in ("fcfs", "caas"))
        yield (
            f"{capacity} | {fcfs.makespan:.1f} | {fcfs.l5:.1f} | "
            f"{caas.makespan / fcfs.makespan - 1:+.1%} | {caas.l5 / fcfs.l5 - 1:+.0%} | "
            f"{caas.t95 - fcfs.t95:+.1f}"
        )


def run(scripts: Sequence[TrajectoryScript], cell: Cell) -> Batch:
    """One batch with the gates' settings of ``cell``."""
    clock = VirtualClock()
    ends = sorted(clock.run(_batch(scripts, cell, clock)))
    reached = -(-95 * len(ends) // 100)
    return Batch(ends[-1] / 60, ends[reached - 1] / 60)


async def _batch(
    scripts: Sequence[TrajectoryScript], cell: Cell, clock: VirtualClock
) -> list[float]:
    admission = AdmissionGate(cell.sample_concurrency, clock=clock)
    actions = ActionScheduler(
        cell.env_concurrency or len(scripts), cell.job_order, clock=clock
    )

    async def trajectory(script: TrajectoryScript) -> float:
        async with admission.admit(script.label):
            progress = Trajectory(script.label)
            for turn in script.turns:
                duration_s = TURN_S + OUTPUT_TOKEN_S * (turn.output.length + 1)
                await clock.sleep(duration_s)
                progress.complete_turn(duration_s)
                if turn.job is not None:
                    async with actions.slot(progress):
                        await clock.sleep(turn.job.duration_s)
        return clock.now()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(trajectory(script)) for script in scripts]
    return [task.result() for task in tasks]


if __name__ == "__main__":
    sys.exit(main())
