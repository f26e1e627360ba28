"""Builders of records for the report's tests; times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Operation,
    Outcome,
    Stage,
    TrajectoryRecord,
)


def inference(turn: int, start: float, end: float, **facts: Any) -> InferenceStage:
    known = {"input_tokens": 100, "output_tokens": 11, "cached_tokens": 0}
    first = {"first_token_s": start + (end - start) / 2}
    return InferenceStage(
        turn=turn, start_s=start, end_s=end, **{**known, **first, **facts}
    )


def job(
    turn: int, queued: float, started: float, ended: float, **facts: Any
) -> EnvironmentStage:
    operations = [Operation("call-1", "read", {"secret": "s3cret"})]
    known = {"operations": operations, "server": "sqlite"}
    return EnvironmentStage(
        turn=turn,
        queued_s=queued,
        started_s=started,
        ended_s=ended,
        **{**known, **facts},
    )


def trajectory(
    name: str, stages: Sequence[Stage], ended: float, **facts: Any
) -> TrajectoryRecord:
    known = {"submitted_s": 0.0, "admitted_s": 0.0, "outcome": Outcome.COMPLETED}
    return TrajectoryRecord(
        label=f"label-{name}",
        sample_id=name,
        stages=list(stages),
        ended_s=ended,
        **{**known, **facts},
    )
