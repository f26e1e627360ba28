"""Compares two runs: was their work the same, and what did the times do?

Two runs did the same work when the same samples had, turn by turn, equal input and
output lengths, the same tools called, and environment jobs of equal duration. Then
any difference in makespan comes from how the work was placed and ordered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from sglang_agent.records import EnvironmentStage, InferenceStage, TrajectoryRecord
from sglang_agent.replay.conversations import JOB
from sglang_agent.report.model import Report

EXAMPLES = 10


class Tolerance(msgspec.Struct, frozen=True):
    """How far apart two durations may be and still count as equal.

    A timer fires late by some milliseconds, hence the absolute part, in seconds.
    """

    relative: float = 0.05
    absolute_s: float = 0.05

    def equal(self, a: float, b: float) -> bool:
        return abs(a - b) <= max(self.absolute_s, self.relative * max(abs(a), abs(b)))


class Difference(msgspec.Struct, frozen=True):
    """One place where the work of the two runs is not the same."""

    sample_id: str
    turn: int | None
    what: str
    a: str
    b: str


class Change(msgspec.Struct, frozen=True):
    """One figure of both reports; ``relative`` is (b - a) / a."""

    name: str
    a: float
    b: float
    relative: float | None


class Comparison(msgspec.Struct, frozen=True):
    """Result of :func:`compare`: counts by kind, the first examples, the figures."""

    same_work: bool
    samples: int
    turns: int
    differing: dict[str, int]
    examples: list[Difference]
    changes: list[Change]


# Figures compared, as (name, path in the report).
_FIGURES = (
    ("makespan s", ("makespan_s",)),
    ("t90 s", ("t90_s",)),
    ("t95 s", ("t95_s",)),
    ("L5 s", ("l5_s",)),
    ("L10 s", ("l10_s",)),
    ("mean inference in flight", ("inflight_inference", "mean")),
    ("mean jobs running", ("running_jobs", "mean")),
    ("mean jobs waiting", ("waiting_jobs", "mean")),
    ("mean job queue s", ("queue_s", "mean")),
    ("mean inference s", ("inference_s", "mean")),
    ("new prefill tokens", ("new_prefill_tokens",)),
    ("reuse", ("reuse",)),
    ("request imbalance β", ("beta",)),
    ("output imbalance γ", ("gamma",)),
)


def compare(
    a: Sequence[TrajectoryRecord],
    b: Sequence[TrajectoryRecord],
    reports: tuple[Report, Report],
    tolerance: Tolerance,
) -> Comparison:
    """Compare the work and the figures of two runs."""
    found = list(_differences(_keyed(a), _keyed(b), tolerance))
    differing = Counter(difference.what for difference in found)
    return Comparison(
        same_work=not found,
        samples=len({record.sample_id for record in [*a, *b]}),
        turns=reports[0].turns,
        differing=dict(sorted(differing.items())),
        examples=found[:EXAMPLES],
        changes=list(_changes(*reports)),
    )


def _keyed(
    records: Sequence[TrajectoryRecord],
) -> dict[tuple[str, int], TrajectoryRecord]:
    """By sample id and, should an id come more than once, its how-manieth."""
    seen: Counter[str] = Counter()
    keyed = {}
    for record in records:
        keyed[record.sample_id, seen[record.sample_id]] = record
        seen[record.sample_id] += 1
    return keyed


def _differences(
    a: dict[tuple[str, int], TrajectoryRecord],
    b: dict[tuple[str, int], TrajectoryRecord],
    tolerance: Tolerance,
) -> Iterator[Difference]:
    for key in sorted(a.keys() | b.keys()):
        if key in a and key in b:
            yield from _within(a[key], b[key], tolerance)
        else:
            there = {True: "there", False: "absent"}
            yield Difference(key[0], None, "sample", there[key in a], there[key in b])


def _within(
    a: TrajectoryRecord, b: TrajectoryRecord, tolerance: Tolerance
) -> Iterator[Difference]:
    name = a.sample_id
    if a.outcome != b.outcome:
        yield Difference(name, None, "outcome", str(a.outcome), str(b.outcome))
    if len(a.stages) != len(b.stages):
        counts = (str(len(a.stages)), str(len(b.stages)))
        yield Difference(name, None, "number of stages", *counts)
    for left, right in zip(a.stages, b.stages, strict=False):
        if isinstance(left, InferenceStage) and isinstance(right, InferenceStage):
            yield from _turns(name, left, right)
        elif isinstance(left, EnvironmentStage) and isinstance(right, EnvironmentStage):
            yield from _jobs(name, left, right, tolerance)
        else:
            kinds = (type(left).__name__, type(right).__name__)
            yield Difference(name, left.turn, "kind of stage", *kinds)
            return  # what follows is out of step


def _turns(name: str, a: InferenceStage, b: InferenceStage) -> Iterator[Difference]:
    for what, left, right in (
        ("input length", a.input_tokens, b.input_tokens),
        ("output length", a.output_tokens, b.output_tokens),
    ):
        if left != right:
            yield Difference(name, a.turn, what, str(left), str(right))


def _jobs(
    name: str, a: EnvironmentStage, b: EnvironmentStage, tolerance: Tolerance
) -> Iterator[Difference]:
    tools = [", ".join(call.name for call in job.operations) for job in (a, b)]
    # A replay takes a job's time and answer, and knows nothing of its tools.
    replayed = JOB in a.operations or JOB in b.operations
    if tools[0] != tools[1] and not replayed:
        yield Difference(name, a.turn, "tools", *tools)
    left, right = a.ended_s - a.started_s, b.ended_s - b.started_s
    if not tolerance.equal(left, right):
        shown = (f"{left:.3f} s", f"{right:.3f} s")
        yield Difference(name, a.turn, "environment duration", *shown)


def _changes(a: Report, b: Report) -> Iterator[Change]:
    for name, path in _FIGURES:
        left, right = _figure(a, path), _figure(b, path)
        if left is not None and right is not None:
            relative = (right - left) / left if left else None
            yield Change(name, left, right, relative)


def _figure(report: Report, path: tuple[str, ...]) -> float | None:
    value: object = report
    for name in path:
        value = getattr(value, name)
    return float(value) if isinstance(value, int | float) else None
