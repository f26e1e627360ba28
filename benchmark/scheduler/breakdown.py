"""Where priority calculation spends its CPU time: queries, refresh, the rest.

Runs one whole batch for each workload and policy, as ``bench.py`` does, in workers that
time every prefix query and every refresh inside ``SchedulePolicy.calc_priority``. A
policy that asks the cache once for each request cannot be cheaper than its queries, so
the share of the queries says how near it is to its floor. Timing costs about a
microsecond for each query; ``bench.py`` measures without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUTPUT = "BREAKDOWN_OUTPUT"
"""Environment variable: the file in which a worker leaves its sums."""


class Timer:
    """Calls of a function and their CPU seconds."""

    def __init__(self) -> None:
        self.calls = 0
        self.cpu_s = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.cpu_s += time.thread_time() - start
                self.calls += 1

        return timed


def run_worker() -> int:
    """Be a virtual worker that times its priority calculation."""
    from sglang import virtual_worker

    timers = {"queries": Timer(), "refresh": Timer()}

    class TimedSession(virtual_worker._Session):
        def _start(self, command: Any) -> Any:
            ready = super()._start(command)
            attach(timers)
            return ready

        def handle(self, command: Any) -> Any:
            reply = super().handle(command)
            sums = {name: [t.calls, t.cpu_s] for name, t in timers.items()}
            if type(command).__name__ == "Stop":
                Path(os.environ[OUTPUT]).write_text(json.dumps(sums))
            return reply

    virtual_worker._Session = TimedSession
    return virtual_worker.main(["--fork"])


def attach(timers: dict[str, Timer]) -> None:
    """Time what the policies ask; the names are those of their own module."""
    from sglang.srt.managers import schedule_policy

    for name in ("match_kv_cache", "prefix_hit"):
        function = getattr(schedule_policy, name)
        setattr(schedule_policy, name, timers["queries"].wrap(function))
    schedule_policy.touch_waiting_prefix = timers["refresh"].wrap(
        schedule_policy.touch_waiting_prefix
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells asked for, print a table, keep them."""
    from bench import Cell, measure
    from report import CASES, POLICIES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=CASES, required=True)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, required=True)
    parser.add_argument(
        "--output", type=Path, default=Path("build/scheduler-breakdown.json")
    )
    options = parser.parse_args(arguments)
    rows = [
        breakdown(Cell(workload, 1.0, policy, refresh=True, seed=0), measure)
        for workload in options.workloads
        for policy in options.policies
    ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return 0


def breakdown(cell: Any, measure: Callable[..., Any]) -> dict[str, Any]:
    """Run one batch; calls and CPU seconds by part."""
    from sglang_agent.simulate.workers import WorkerPool

    with tempfile.TemporaryDirectory() as folder:
        sums = Path(folder) / "sums.json"
        program, variables = [str(Path(__file__).resolve())], {OUTPUT: str(sums)}
        with WorkerPool(program=program, environment=variables) as pool:
            run = measure(cell, pool)
        return {
            "workload": cell.workload,
            "policy": cell.policy,
            "requests": run.requests,
            "priority_cpu_s": run.priority_cpu_s,
            **json.loads(sums.read_text()),
            "date": run.date,
            "machine": run.machine,
        }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| batch | policy | priority CPU s | queries | s | µs each | refreshed | s | "
        "the rest, s |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        (queries, asked_s), (touches, touched_s) = row["queries"], row["refresh"]
        total_s = row["priority_cpu_s"]
        lines.append(
            f"| {row['workload']} | {row['policy']} | {total_s:.2f} | {queries:,} | "
            f"{asked_s:.2f} | {asked_s / max(queries, 1) * 1e6:.0f} | {touches:,} | "
            f"{touched_s:.2f} | {total_s - asked_s - touched_s:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_worker() if "--fork" in sys.argv else main())
