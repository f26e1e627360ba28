"""The run as a Chrome trace, for Perfetto or chrome://tracing.

Every trajectory is a thread of the process of the worker group "samples", with its
inference turns, its time in the job queue and its environment jobs; counters show
how many of each there are at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sglang_agent.records import InferenceStage, TrajectoryRecord
from sglang_agent.report.spans import Span, counts

_MICROSECONDS = 1e6
_SAMPLES, _COUNTERS = 1, 2


def chrome_trace(records: Sequence[TrajectoryRecord]) -> dict[str, Any]:
    """The JSON object of the trace-event format; times in microseconds."""
    origin = min((record.admitted_s for record in records), default=0.0)
    events = [_name("process_name", _SAMPLES, 0, "samples")]
    ordered = sorted(records, key=lambda record: record.admitted_s)
    for thread, record in enumerate(ordered, start=1):
        events.append(_name("thread_name", _SAMPLES, thread, record.sample_id))
        events.extend(_trajectory(record, thread, origin))
    events.append(_name("process_name", _COUNTERS, 0, "at once"))
    events.extend(_counters(records, origin))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _trajectory(
    record: TrajectoryRecord, thread: int, origin: float
) -> Iterator[dict[str, Any]]:
    facts = {"outcome": str(record.outcome), "error": record.error}
    whole = (record.admitted_s - origin, record.ended_s - origin)
    yield _span("trajectory", "trajectory", thread, whole, facts)
    for stage in record.stages:
        if isinstance(stage, InferenceStage):
            span = (stage.start_s - origin, stage.end_s - origin)
            yield _span(f"turn {stage.turn}", "inference", thread, span, _turn(stage))
            continue
        server = stage.server or "environment"
        waited = (stage.queued_s - origin, stage.started_s - origin)
        ran = (stage.started_s - origin, stage.ended_s - origin)
        # Names of tools only: arguments and answers may hold secrets.
        tools = {"tools": [operation.name for operation in stage.operations]}
        yield _span(f"queue {server}", "queue", thread, waited, tools)
        yield _span(f"job {server}", "environment", thread, ran, tools)


def _turn(stage: InferenceStage) -> dict[str, Any]:
    return {
        "worker": stage.worker,
        "input_tokens": stage.input_tokens,
        "cached_tokens": stage.cached_tokens,
        "output_tokens": stage.output_tokens,
        "attempts": stage.attempts,
    }


def _counters(
    records: Iterable[TrajectoryRecord], origin: float
) -> Iterator[dict[str, Any]]:
    spans: dict[str, list[Span]] = {"inference": [], "jobs": [], "queued jobs": []}
    for record in records:
        for stage in record.stages:
            if isinstance(stage, InferenceStage):
                spans["inference"].append((stage.start_s, stage.end_s))
            else:
                spans["jobs"].append((stage.started_s, stage.ended_s))
                spans["queued jobs"].append((stage.queued_s, stage.started_s))
    for name, mine in spans.items():
        for instant, value in counts(mine):
            yield {
                "name": name,
                "ph": "C",
                "pid": _COUNTERS,
                "ts": (instant - origin) * _MICROSECONDS,
                "args": {name: value},
            }


def _span(
    name: str, category: str, thread: int, span: Span, facts: dict[str, Any]
) -> dict[str, Any]:
    start, end = span
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": _SAMPLES,
        "tid": thread,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": facts,
    }


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {
        "name": kind,
        "ph": "M",
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }
