"""Every stage of a batch, by kind."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_agent.records import EnvironmentStage, InferenceStage, TrajectoryRecord


def inferences(records: Iterable[TrajectoryRecord]) -> list[InferenceStage]:
    """All inference turns, trajectory by trajectory."""
    return [
        stage
        for record in records
        for stage in record.stages
        if isinstance(stage, InferenceStage)
    ]


def jobs(records: Iterable[TrajectoryRecord]) -> list[EnvironmentStage]:
    """All environment jobs: what a user says next passes no queue and is none."""
    return [
        stage
        for record in records
        for stage in record.stages
        if isinstance(stage, EnvironmentStage)
        and (stage.operations or stage.ended_s > stage.queued_s)
    ]
