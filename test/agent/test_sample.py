"""One sample's loop: budgets, back-off, failure classes, what is released."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from sglang_agent import VirtualClock
from sglang_agent.environments.base import EnvironmentFailure, RetryLater
from sglang_agent.jobs import JobLimits
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Operation,
    OperationResult,
    Outcome,
)
from sglang_agent.report import build_report

from .sample_support import Batch, World, ok


def test_a_busy_server_is_asked_again_with_the_slot_free_meanwhile() -> None:
    clock = VirtualClock()
    starts: list[float] = []

    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        starts.append(clock.now())
        if len(starts) == 1:
            raise RetryLater(2.0, "too many requests")
        await clock.sleep(0.5)
        return ok(operations)

    batch = Batch(World(run), clock, samples=2, ce=1)
    records = batch.execute()
    # The first job left the only slot to the second while it backed off.
    assert starts[:2] == [1.0, 1.0]
    assert starts[2] >= 3.0
    assert [len(r.stages) for r in records] == [3, 3]
    assert batch.world.opened == 2
    assert {r.outcome for r in records} == {Outcome.COMPLETED}


def test_retries_of_jobs_that_failed_together_spread() -> None:
    clock = VirtualClock()
    starts: list[float] = []

    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        starts.append(clock.now())
        if len(starts) <= 20:
            raise RetryLater(0.0, "busy")
        return ok(operations)

    Batch(World(run), clock, samples=20).execute()
    again = starts[20:]
    assert starts[:20] == [1.0] * 20
    assert len(again) == 20
    assert max(again) - min(again) >= 0.5
    assert len(set(again)) == 20


def test_a_server_that_stays_busy_is_an_environment_failure() -> None:
    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        raise RetryLater(1.0, "quota")

    (record,) = Batch(World(run), limits=JobLimits(max_retries=3)).execute()
    assert record.outcome is Outcome.ENVIRONMENT
    assert "still busy after 4 tries" in (record.error or "")


def test_a_tool_has_its_own_limit() -> None:
    clock = VirtualClock()

    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        await clock.sleep(4.0)
        return ok(operations)

    limits = JobLimits(operation_timeout_s=1.0, tool_timeouts_s={"look": 5.0})
    (record,) = Batch(World(run), clock, limits=limits).execute()
    stage = record.stages[1]
    assert isinstance(stage, EnvironmentStage)
    assert stage.ended_s - stage.started_s == 4.0
    assert stage.response is not None
    assert stage.response[0]["content"] == "seen"


def test_an_overrun_call_is_told_to_the_model_and_the_sample_goes_on() -> None:
    clock = VirtualClock()

    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        await clock.sleep(100.0)
        return ok(operations)

    limits = JobLimits(operation_timeout_s=1.0)
    (record,) = Batch(World(run), clock, limits=limits).execute()
    assert record.outcome is Outcome.COMPLETED
    stage = record.stages[1]
    assert isinstance(stage, EnvironmentStage)
    assert stage.response is not None
    assert "ran longer than 1 s" in stage.response[0]["content"]


def test_a_job_that_ignores_cancellation_ends_its_sample_and_frees_its_slot() -> None:
    clock = VirtualClock()

    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        for _ in range(50):
            with contextlib.suppress(asyncio.CancelledError):
                await clock.sleep(1.0)
        return ok(operations)

    limits = JobLimits(operation_timeout_s=1.0)
    batch = Batch(World(run), clock, samples=2, ce=1, limits=limits)
    records = batch.execute()
    assert [r.outcome for r in records] == [Outcome.ENVIRONMENT] * 2
    assert [r.ended_s for r in records] == [4.0, 7.0]  # 1 turn, 1 limit, 2 grace
    assert [lost.label for lost in batch.actions.abandoned] == ["s0", "s1"]


def test_no_inference_after_the_environment_died() -> None:
    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        raise EnvironmentFailure("box: gone; its last words: out of memory")

    batch = Batch(World(run), samples=3, tool_turns=5)
    records = batch.execute()
    assert len(batch.model.requests) == 3
    for record in records:
        assert record.outcome is Outcome.ENVIRONMENT
        assert record.error == "box: gone; its last words: out of memory"
        stage = record.stages[-1]
        assert isinstance(stage, EnvironmentStage)
        assert stage.error == record.error


@pytest.mark.parametrize(
    ("transport", "outcome", "turns"),
    [(True, Outcome.ENVIRONMENT, 5), (False, Outcome.COMPLETED, 9)],
)
def test_transport_errors_in_a_row_are_no_tool_errors(
    transport: bool, outcome: Outcome, turns: int
) -> None:
    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        return [
            OperationResult(o.id, "reset by peer", True, transport) for o in operations
        ]

    (record,) = Batch(World(run), tool_turns=8).execute()
    assert record.outcome is outcome
    done = [s for s in record.stages if isinstance(s, InferenceStage)]
    assert len(done) == turns


def test_one_stuck_sample_cannot_hold_the_batch() -> None:
    clock = VirtualClock()

    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        if len(batch.model.requests) == 50:
            await clock.sleep(1e6)
        return ok(operations)

    batch = Batch(World(run), clock, samples=100, cs=50, sample_timeout_s=10.0)
    records = batch.execute()
    assert clock.now() <= 15.0
    late = [r for r in records if r.outcome is Outcome.BUDGET]
    assert late
    for record in late:
        assert record.error is not None
        assert "sample limit of 10 s reached while in environment" in record.error


def test_a_retried_sample_gets_one_new_environment() -> None:
    tries = []

    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        tries.append(1)
        if len(tries) == 1:
            raise EnvironmentFailure("box: lost")
        return ok(operations)

    batch = Batch(World(run), samples=2, sample_retries=1)
    records = batch.execute()
    assert {r.outcome for r in records} == {Outcome.COMPLETED}
    assert (batch.world.opened, batch.world.closed) == (3, 3)
    assert sorted(r.attempts for r in records) == [1, 2]


def test_a_scorer_that_fails_gives_no_score() -> None:
    scores = iter([1.0, None, 0.5])

    def score() -> float:
        value = next(scores)
        if value is None:
            raise KeyError("no such answer")
        return value

    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        return ok(operations)

    records = Batch(World(run, score), samples=3).execute()
    failed = [r for r in records if r.outcome is Outcome.GRADING]
    assert [(r.score, r.error) for r in failed] == [
        (None, "KeyError: 'no such answer'")
    ]
    report = build_report(records, {})
    assert report.scores.mean == 0.75
    assert (report.scores.scored, report.scores.unscored) == (2, 1)


def test_an_error_of_our_own_is_a_class_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        raise ZeroDivisionError("bug")

    (record,) = Batch(World(run)).execute()
    assert record.outcome is Outcome.OURS
    assert record.error == "ZeroDivisionError: bug"
    assert "sample s0 failed in our own code" in caplog.text


@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.5])
def test_a_cancelled_batch_closes_every_environment(after_s: float) -> None:
    clock = VirtualClock()

    async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
        await clock.sleep(1.0)
        return ok(operations)

    async def cancel(task: asyncio.Task[None]) -> None:
        await clock.sleep(after_s)
        task.cancel()
        await asyncio.wait([task])

    batch = Batch(World(run), clock, samples=10, ce=3, cs=10)
    with pytest.raises(asyncio.CancelledError):
        batch.execute(cancel)
    assert batch.records == []
    assert (batch.world.opened, batch.world.closed) == (10, 10)
    assert batch.actions.statistics().running == 0
    assert batch.admission.statistics().running == 0
    assert batch.state.active == 0


def test_the_same_batch_twice_is_the_same_batch() -> None:
    def once() -> list[object]:
        clock = VirtualClock()

        async def run(operations: Sequence[Operation]) -> Sequence[OperationResult]:
            await clock.sleep(0.3)
            return ok(operations)

        return list(
            Batch(World(run), clock, samples=30, tool_turns=4, cs=7, ce=2).execute()
        )

    assert once() == once()
