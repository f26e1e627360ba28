"""One environment job: queue, run within its budget, back off without a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from sglang_agent.actions import ActionScheduler, Slot
from sglang_agent.backoff import Backoff
from sglang_agent.environments.base import (
    Environment,
    EnvironmentFailure,
    RetryLater,
)
from sglang_agent.errors import JobAbandoned, RunTimeout
from sglang_agent.records import Operation, OperationResult
from sglang_agent.state import Stage
from sglang_agent.trajectory import Trajectory

T = TypeVar("T")


class JobLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Budgets of a job in seconds; None is unbounded.

    ``operation_timeout_s`` is for one tool call, ``tool_timeouts_s`` overrides it by
    tool name; a job of several calls has the sum. ``max_retries`` bounds how often an
    environment may ask to come back later.
    """

    queue_timeout_s: float | None = None
    operation_timeout_s: float | None = None
    tool_timeouts_s: dict[str, float] = {}
    max_retries: int = 8

    def run_timeout_s(self, operations: Sequence[Operation]) -> float | None:
        """Return the budget of a job; None as soon as one call has none."""
        total_s = 0.0
        for operation in operations:
            limit_s = self.tool_timeouts_s.get(operation.name, self.operation_timeout_s)
            if limit_s is None:
                return None
            total_s += limit_s
        return total_s


class JobOutcome(msgspec.Struct, frozen=True):
    """What a job returned and when, on the scheduler's clock."""

    results: list[OperationResult]
    server: str | None
    queued_s: float
    started_s: float
    ended_s: float


class JobRunner:
    """Runs environment jobs through the scheduler; shared by all samples."""

    def __init__(self, actions: ActionScheduler, backoff: Backoff) -> None:
        self._actions = actions
        self._backoff = backoff
        self._lost: set[asyncio.Task[Any]] = set()

    async def run(
        self,
        trajectory: Trajectory,
        environment: Environment,
        operations: Sequence[Operation],
        limits: JobLimits,
        moved: Callable[[Stage], None],
    ) -> JobOutcome:
        """Run one job to its results.

        ``moved`` hears of each stage. A job that overran its budget and stopped when
        asked becomes results that say so. Raises
        :class:`~sglang_agent.environments.base.EnvironmentFailure`,
        :class:`~sglang_agent.errors.JobAbandoned` or
        :class:`~sglang_agent.errors.QueueTimeout`.
        """
        server = environment.server_of(operations)
        queued_s = self._actions.clock.now()
        for attempt in range(1, limits.max_retries + 2):
            moved(Stage.QUEUED)
            slot = self._actions.slot(
                trajectory, server=server, queue_timeout_s=limits.queue_timeout_s
            )
            try:
                async with slot:
                    moved(Stage.ENVIRONMENT)
                    results = await self._serve(slot, environment, operations, limits)
                    ended_s = self._actions.clock.now()
                return JobOutcome(
                    list(results), server, queued_s, slot.started_s, ended_s
                )
            except RetryLater as later:
                reason = later
                delay_s = self._backoff.delay_s(attempt, later.delay_s)
            moved(Stage.BACKOFF)
            await self._actions.clock.sleep(delay_s)
        raise EnvironmentFailure(
            f"{server or 'environment'}: still busy after {attempt} tries: {reason}"
        )

    async def _serve(
        self,
        slot: Slot,
        environment: Environment,
        operations: Sequence[Operation],
        limits: JobLimits,
    ) -> Sequence[OperationResult]:
        limit_s = limits.run_timeout_s(operations)
        work = environment.run(operations)
        if limit_s is None:
            return await work
        try:
            return await self._bounded(slot, work, limit_s)
        except JobAbandoned:
            raise
        except RunTimeout as error:
            text = f"error: {error}"
            return [
                OperationResult(o.id, text, is_error=True, transport_error=True)
                for o in operations
            ]

    async def _bounded(
        self, slot: Slot, work: Coroutine[Any, Any, T], limit_s: float
    ) -> T:
        """Await ``work`` in a task of its own, so that it can be left behind."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait((task,), timeout=limit_s)
        except asyncio.CancelledError:
            await self._stop(slot, task)
            raise
        if task.done():
            return task.result()
        ticket = slot.ticket
        if await self._stop(slot, task):
            raise RunTimeout(ticket.label, ticket.server, limit_s)
        raise JobAbandoned(ticket.label, ticket.server, limit_s)

    async def _stop(self, slot: Slot, task: asyncio.Task[Any]) -> bool:
        """Cancel and wait for the grace time; False when the job had to be left."""
        task.cancel()
        await asyncio.wait((task,), timeout=self._actions.grace_s)
        if task.done():
            if not task.cancelled():
                task.exception()  # seen: it lost to the time limit
            return True
        self._actions.abandon(slot.ticket)
        self._lost.add(task)
        task.add_done_callback(self._forget)
        return False

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._lost.discard(task)
        if not task.cancelled():
            task.exception()
