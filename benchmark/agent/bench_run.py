"""The whole runner on one core: turns a second, added latency, memory.

Uses the program itself (``python -m sglang_agent run``): HTTP to the stub worker in
another process, journal on disk, trace and report included.

    throughput   the server answers at once: how many turns a second get through, of
                 the batch, of the whole program with its report, and a CPU second
    latency      a paced load: by how much a turn and a job are longer than the stub's
                 own times. p50 and p99 in ms over all turns that begin after the
                 ramp-up, in which all samples of the batch's start come at once
    memory       resident bytes for each trajectory that waits for admission
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import io
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import workload

from sglang_agent.__main__ import main as program
from sglang_agent.environments import registry
from sglang_agent.environments.base import Environment
from sglang_agent.records import (
    EnvironmentStage,
    Operation,
    OperationResult,
    ToolDefinition,
    TrajectoryRecord,
)
from sglang_agent.trace import read_trace

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object"}},
}
# Mean times; with CS trajectories active they offer nearly 1,000 turns a second.
PACED_TURN_S, PACED_JOB_S = 2.0, 0.02
RAMP_UP_S = 3 * (PACED_TURN_S + PACED_JOB_S)


class BenchEnvironment:
    """One tool that takes a set time."""

    def __init__(self, kind: BenchKind, service_s: float) -> None:
        self._kind = kind
        self._service_s = service_s

    async def open(self) -> Sequence[ToolDefinition]:
        self._kind.opened()
        return [TOOL]

    def server_of(self, operations: Sequence[Operation]) -> str | None:
        return "bench"

    async def run(self, operations: Sequence[Operation]) -> Sequence[OperationResult]:
        await asyncio.sleep(self._service_s)
        return [OperationResult(o.id, "found") for o in operations]

    async def close(self) -> None:
        self._kind.closed()


class BenchKind:
    """Makes the environments, and notes the CPU time between first and last."""

    def __init__(self, service_s: float) -> None:
        self._service_s = service_s
        self.first_cpu_s = self.last_cpu_s = 0.0

    def create(self, config: Mapping[str, Any], sample_id: str) -> Environment:
        return BenchEnvironment(self, self._service_s)

    def opened(self) -> None:
        self.first_cpu_s = self.first_cpu_s or time.process_time()

    def closed(self) -> None:
        self.last_cpu_s = time.process_time()


def run(turn_s: float, job_s: float, trajectories: int) -> tuple[Path, float, float]:
    """Run the batch; returns its folder, the program's wall time, the batch's CPU."""
    folder = Path(tempfile.mkdtemp(prefix="bench-agent-"))
    tasks = folder / "tasks.jsonl"
    workload.write_tasks(tasks, trajectories)
    kind = BenchKind(job_s)
    registry.register("bench", kind)
    with workload.stub_server(turn_s) as url:
        start_s = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            code = program(
                [
                    "run",
                    str(tasks),
                    "--base-url",
                    url,
                    "--output",
                    str(folder / "run"),
                    "--sample-concurrency",
                    str(workload.SAMPLE_CONCURRENCY),
                    "--env-concurrency",
                    str(workload.ENV_CONCURRENCY),
                    "--plain",
                ]
            )
        wall_s = time.monotonic() - start_s
    if code != 0:
        raise SystemExit(f"the run ended with {code}")
    return folder / "run", wall_s, kind.last_cpu_s - kind.first_cpu_s


def throughput(trajectories: int) -> dict[str, Any]:
    folder, wall_s, cpu_s = run(0.0, 0.0, trajectories)
    report = json.loads((folder / "report.json").read_text())
    turns = trajectories * workload.TURNS
    return {
        "contender": f"sglang-agent {importlib.metadata.version('sglang-agent')}",
        "turns": turns,
        "makespan_s": report["makespan_s"],
        "turns_per_s": turns / report["makespan_s"],
        "turns_per_s_whole": turns / wall_s,
        "turns_per_cpu_s": turns / cpu_s,
        "stub_cpu_s": workload.children_cpu_s(),
    }


def latency(trajectories: int) -> dict[str, float]:
    folder, _, _ = run(PACED_TURN_S, PACED_JOB_S, trajectories)
    report = json.loads((folder / "report.json").read_text())
    added = [
        seconds * 1000.0 for record in read_trace(folder) for seconds in added_s(record)
    ]
    return {
        "turns_per_s": trajectories * workload.TURNS / report["makespan_s"],
        "added_p50_ms": workload.percentile(added, 0.50),
        "added_p99_ms": workload.percentile(added, 0.99),
    }


def added_s(record: TrajectoryRecord) -> list[float]:
    """Return, per turn after the ramp-up, the time that nobody asked for.

    That is all that is neither the stub's own nor the queue of jobs for a slot.
    """
    added, previous_end_s = [], record.admitted_s
    extra_s = 0.0
    for stage in record.stages:
        if isinstance(stage, EnvironmentStage):
            extra_s += stage.queued_s - previous_end_s
            extra_s += stage.ended_s - stage.started_s - PACED_JOB_S
            previous_end_s = stage.ended_s
        else:
            extra_s += stage.start_s - previous_end_s
            asked_s = workload.service_s(f"{record.label}.{stage.turn}", PACED_TURN_S)
            extra_s += stage.end_s - stage.start_s - asked_s
            previous_end_s = stage.end_s
            if stage.start_s > RAMP_UP_S:
                added.append(extra_s)
            extra_s = 0.0
    return added


def memory(trajectories: int) -> dict[str, float]:
    """Admit one sample that takes long, and look at what the waiting ones take."""
    from sglang_agent import ActionScheduler, AdmissionGate, RealClock
    from sglang_agent.backoff import Backoff
    from sglang_agent.batch import run_batch
    from sglang_agent.config import ContentSettings, RunSettings
    from sglang_agent.inference.chat import ChatClient
    from sglang_agent.inference.http import HttpSettings, HttpTransport
    from sglang_agent.jobs import JobRunner
    from sglang_agent.launch import plan_task
    from sglang_agent.sample import Services
    from sglang_agent.state import BatchState
    from sglang_agent.tasks import load

    folder = Path(tempfile.mkdtemp(prefix="bench-agent-"))
    registry.register("bench", BenchKind(0.0))
    clock = RealClock()
    settings = RunSettings(
        tasks="",
        output="",
        base_url="http://127.0.0.1:1",
        content=ContentSettings(model="stub"),
        sample_concurrency=1,
        sample_concurrency_origin="given",
        env_concurrency=1,
        env_concurrency_origin="given",
    )

    async def measure(count: int) -> int:
        workload.write_tasks(folder / "tasks.jsonl", count)
        before = workload.resident_bytes()
        plans = [plan_task(t, settings) for t in load(folder / "tasks.jsonl")]
        admission = AdmissionGate(1, clock=clock)
        admission.paused = True
        transport = HttpTransport(HttpSettings(base_url=settings.base_url), clock)
        services = Services(
            inference=ChatClient(transport, "stub"),
            jobs=JobRunner(ActionScheduler(1, clock=clock), Backoff(1.0, 1.0)),
            state=BatchState(count, 0, clock),
            origin_s=0.0,
        )
        batch = asyncio.create_task(run_batch(plans, services, admission, _never))
        await asyncio.sleep(1.0)
        assert admission.statistics().waiting == count
        taken = workload.resident_bytes() - before
        batch.cancel()
        await asyncio.wait([batch])
        return taken

    asyncio.run(measure(100))  # imports and pools settle
    return {"bytes_per_waiting": asyncio.run(measure(trajectories)) / trajectories}


async def _never(plan: Any, record: Any) -> None:
    raise AssertionError("nothing may finish here")


QUESTIONS = {"throughput": throughput, "latency": latency, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--trajectories", type=int, default=workload.TRAJECTORIES)
    options = parser.parse_args()
    workload.pin(workload.CLIENT_CORE)
    print(json.dumps(QUESTIONS[options.question](options.trajectories)))


if __name__ == "__main__":
    main()
