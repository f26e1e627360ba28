"""Small batches and a small deployment for the simulation tests."""

from collections.abc import Callable

import msgspec

from sgl_router.policies import make_policy
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Outcome,
    Stage,
    TrajectoryRecord,
)
from sglang_agent.simulate import (
    Deployment,
    SimulationResult,
    SimulationSettings,
    simulate,
)
from sglang_agent.simulate.cost_model import PassCosts
from sglang_agent.simulate.script import script_of
from sglang_agent.simulate.workers import WorkerPool

SMALL = Deployment(
    name="small",
    description="for tests",
    passes=PassCosts(
        pass_s=0.004,
        prefill_token_s=5e-5,
        prefill_context_s=1e-10,
        decode_request_s=5e-5,
        decode_context_s=1.5e-8,
    ),
    kv_bytes_per_token=1.0,
    state_bytes_per_slot=5200.0,
    cache_bytes=1.44e6,
    cache_strategy="no_buffer",
    page_size=1,
    chunked_prefill_tokens=8192,
    context_length_tokens=60_000,
)


def varied(trajectory: int, turn: int) -> int:
    """Output lengths that do not all end at once."""
    return 20 + (trajectory * 7 + turn * 13) % 60


def make_trace(
    trajectories: int,
    turns: int,
    *,
    first: int = 8000,
    grow: int = 1000,
    shared: int = 500,
    output: Callable[[int, int], int] = varied,
    job_s: Callable[[int, int], float] = lambda i, k: 0.5 * (i % 3),
) -> list[TrajectoryRecord]:
    """Trajectories whose context grows by output and response, turn by turn."""
    return [
        _trajectory(i, turns, first, grow, shared, output, job_s)
        for i in range(trajectories)
    ]


def _trajectory(
    index: int,
    turns: int,
    first: int,
    grow: int,
    shared: int,
    output: Callable[[int, int], int],
    job_s: Callable[[int, int], float],
) -> TrajectoryRecord:
    stages: list[Stage] = []
    context = first
    for turn in range(1, turns + 1):
        length = output(index, turn)
        stages.append(InferenceStage(turn, context, length, 0, 0.0, None, 0.0))
        if turn < turns:
            stages.append(
                EnvironmentStage(turn, [], 0.0, 0.0, job_s(index, turn), None)
            )
        context += length + grow
    return TrajectoryRecord(
        label=f"t{index}",
        sample_id=f"s{index}",
        shared_tokens=shared,
        submitted_s=0.0,
        admitted_s=0.0,
        ended_s=0.0,
        outcome=Outcome.COMPLETED,
        stages=stages,
    )


def run(
    pool: WorkerPool,
    trace: list[TrajectoryRecord],
    deployment: Deployment = SMALL,
    **settings: object,
) -> SimulationResult:
    """Simulate with settings that suit the small deployment."""
    merged = {"sample_concurrency": 32, "ratio": 0.9, **settings}
    return simulate(
        [script_of(record) for record in trace],
        SimulationSettings(deployment=deployment, **merged),  # type: ignore[arg-type]
        lambda names: make_policy("lbch", names),
        pool,
    )


def log_of(result: SimulationResult) -> bytes:
    """Everything that happened, byte for byte."""
    return msgspec.json.encode(result.records)
