"""Which samples ended last, and what their time went to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Outcome,
    TrajectoryRecord,
)
from sglang_agent.report.model import TailSample
from sglang_agent.report.spans import percentile

TAIL_SHARE = 0.05
LEAST, MOST = 3, 20
# A trajectory is long from this many times the median number of turns on.
LONG = 1.5


def tail_samples(
    records: Sequence[TrajectoryRecord], origin_s: float
) -> list[TailSample]:
    """The last 5% to end (3 to 20 samples), latest first.

    ``origin_s`` is the first admission on the run's clock.
    """
    if not records:
        return []
    wanted = min(max(math.ceil(len(records) * TAIL_SHARE), LEAST), MOST)
    last = sorted(records, key=lambda record: record.ended_s, reverse=True)[:wanted]
    median = percentile(sorted(float(turns_of(record)) for record in records), 50)
    return [_describe(record, origin_s, median) for record in last]


def turns_of(record: TrajectoryRecord) -> int:
    """Number of inference turns."""
    return sum(isinstance(stage, InferenceStage) for stage in record.stages)


def opening_s(record: TrajectoryRecord) -> float:
    """From admission to the first stage: the environment is being opened.

    A sample that ended before its first stage spent all its time there.
    """
    if not record.stages:
        return record.ended_s - record.admitted_s
    first = record.stages[0]
    began = first.start_s if isinstance(first, InferenceStage) else first.queued_s
    return max(began - record.admitted_s, 0.0)


def _describe(record: TrajectoryRecord, origin_s: float, median: float) -> TailSample:
    inference, queue, service = _times(record)
    opening = opening_s(record)
    held = record.ended_s - record.admitted_s
    other = max(held - opening - inference - queue - service, 0.0)
    parts = {
        "waiting for admission": record.admitted_s - origin_s,
        "opening its environment": opening,
        "inference": inference,
        "waiting for an environment slot": queue,
        "environment jobs": service,
        "time between stages": other,
    }
    return TailSample(
        sample_id=record.sample_id,
        label=record.label,
        outcome=str(record.outcome),
        ended_s=record.ended_s - origin_s,
        turns=turns_of(record),
        admission_wait_s=record.admitted_s - record.submitted_s,
        opening_s=opening,
        inference_s=inference,
        queue_s=queue,
        service_s=service,
        other_s=other,
        last_stage=_last_stage(record),
        why=_why(record, parts, median),
        error=record.error,
    )


def _times(record: TrajectoryRecord) -> tuple[float, float, float]:
    inference = queue = service = 0.0
    for stage in record.stages:
        if isinstance(stage, InferenceStage):
            inference += stage.end_s - stage.start_s
        else:
            queue += stage.started_s - stage.queued_s
            service += stage.ended_s - stage.started_s
    return inference, queue, service


def _last_stage(record: TrajectoryRecord) -> str:
    if not record.stages:
        return "none"
    stage = record.stages[-1]
    if isinstance(stage, EnvironmentStage):
        return f"environment job of turn {stage.turn} ({stage.server or 'no server'})"
    return f"inference turn {stage.turn}"


def _why(record: TrajectoryRecord, parts: dict[str, float], median: float) -> str:
    """The largest part of its time, and whether it was long or did not end well."""
    largest = max(parts, key=lambda part: parts[part])
    end = record.ended_s - record.admitted_s + parts["waiting for admission"]
    share = 100 * parts[largest] / end if end > 0 else 0.0
    reasons = [f"{largest}: {share:.0f}% of its time"]
    turns = turns_of(record)
    if turns > LONG * median:
        reasons.insert(0, f"long: {turns} turns, median {median:g}")
    if record.outcome is not Outcome.COMPLETED:
        reasons.insert(0, f"ended as {record.outcome}")
    return "; ".join(reasons)
