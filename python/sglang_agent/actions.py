"""How many environment jobs run at once (CE), and which waiting job is next.

A harness adopts it by replacing its semaphore::

    actions = ActionScheduler(capacity=3, policy="caas")
    trajectory = Trajectory(label="sample-7")
    ...
    trajectory.complete_turn(duration_s=2.4)     # after each inference turn
    async with actions.slot(trajectory):         # around each environment job
        result = await run_tool(...)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

from sglang_agent import gate, policies
from sglang_agent.clock import Clock
from sglang_agent.errors import JobAbandoned, RunTimeout
from sglang_agent.gate import Gate, GateOwner, Holding, ServerLimit, Ticket
from sglang_agent.policies import QueuedJob
from sglang_agent.trajectory import Trajectory


class Abandoned(NamedTuple):
    """A job whose slot was taken away because it ignored its end."""

    label: str
    server: str | None
    ran_s: float


class ActionScheduler(GateOwner):
    """The execution limit CE with an order among the jobs that wait.

    ``policy`` is a name of :func:`sglang_agent.policies.names`; ``band_s`` is B of
    equation 13 and ``duration_bucket_s`` Delta_I of equation 15. A job's key is fixed
    when it queues, from its trajectory's turns at that moment; request times count
    from the scheduler's creation. ``servers`` sets further limits by server name.

    Never more than ``capacity`` jobs hold a slot, whatever is cancelled, times out or
    is retried. Time in the queue is never charged to a run budget. A job that is
    still there ``grace_s`` seconds after its run budget loses its slot and is listed
    in ``abandoned``. A job that asks for a slot while it holds one lends its own, one
    borrower at a time. Raises ValueError for a setting out of range.
    """

    def __init__(
        self,
        capacity: int,
        policy: str = "caas",
        *,
        band_s: float = 30.0,
        duration_bucket_s: float = 1.0,
        servers: Mapping[str, ServerLimit] | None = None,
        grace_s: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        self._gate = Gate(capacity, clock=clock, servers=servers)
        self.policy = policies.create(
            policy, band_s=band_s, duration_bucket_s=duration_bucket_s
        )
        self.clock = self._gate.clock
        self.grace_s = grace_s
        self.abandoned: list[Abandoned] = []
        self._origin_s = self.clock.now()

    def slot(
        self,
        trajectory: Trajectory,
        *,
        server: str | None = None,
        queue_timeout_s: float | None = None,
        run_timeout_s: float | None = None,
    ) -> Slot:
        """Hold a slot from a coroutine: ``async with actions.slot(t) as slot:``.

        Raises :class:`~sglang_agent.errors.QueueTimeout` on entry, and
        :class:`~sglang_agent.errors.RunTimeout` on exit when the body was cancelled
        at its run budget.
        """
        return Slot(self, trajectory, server, queue_timeout_s, run_timeout_s)

    @contextmanager
    def slot_sync(
        self,
        trajectory: Trajectory,
        *,
        server: str | None = None,
        queue_timeout_s: float | None = None,
        run_timeout_s: float | None = None,
    ) -> Iterator[Ticket]:
        """Hold a slot from a thread: ``with actions.slot_sync(t):``.

        A thread cannot be interrupted: past ``run_timeout_s`` plus the grace time its
        slot is given to others and :class:`~sglang_agent.errors.JobAbandoned` is
        raised once the body ends.
        """
        ticket = self._gate.acquire_sync(
            trajectory.label, self._key(trajectory), server, queue_timeout_s
        )
        timer = None
        if run_timeout_s is not None:
            timer = threading.Timer(
                run_timeout_s + self.grace_s, self.abandon, (ticket,)
            )
            timer.daemon = True
            timer.start()
        before = gate.enter(ticket)
        try:
            yield ticket
        finally:
            gate.leave(before)
            if timer is not None:
                timer.cancel()
            self._gate.release(ticket)
        if run_timeout_s is not None and self._lost(ticket, run_timeout_s):
            raise JobAbandoned(ticket.label, server, run_timeout_s)

    @contextmanager
    def slot_nowait(
        self, trajectory: Trajectory, *, server: str | None = None
    ) -> Iterator[Ticket]:
        """Hold a slot if one is free now; works in coroutines and threads.

        Raises :class:`~sglang_agent.errors.WouldBlock` otherwise.
        """
        ticket = self._gate.acquire_nowait(
            trajectory.label, self._key(trajectory), server
        )
        before = gate.enter(ticket)
        try:
            yield ticket
        finally:
            gate.leave(before)
            self._gate.release(ticket)

    def waiters(self) -> list[Holding]:
        """Return the waiting jobs, in dispatch order within each server's limits."""
        return self._gate.waiters()

    def abandon(self, ticket: Ticket) -> None:
        """Take the slot of a job that cannot be stopped."""
        if self._gate.abandon(ticket):
            ran_s = self.clock.now() - ticket.granted_s
            self.abandoned.append(Abandoned(ticket.label, ticket.server, ran_s))

    def _key(self, trajectory: Trajectory) -> tuple[float, ...]:
        requested_s = self.clock.now() - self._origin_s
        return self.policy.key(
            QueuedJob(requested_s, trajectory.turns, trajectory.mean_turn_s)
        )

    def _lost(self, ticket: Ticket, run_timeout_s: float) -> bool:
        ran_s = self.clock.now() - ticket.granted_s
        return ran_s > run_timeout_s + self.grace_s


class Slot:
    """One job's stay; ``queued_s`` and ``started_s`` are on the scheduler's clock."""

    __slots__ = (
        "_actions",
        "_before",
        "_limit",
        "_overdue",
        "_queue_timeout_s",
        "_run_timeout_s",
        "_server",
        "_ticket",
        "_trajectory",
    )

    def __init__(
        self,
        actions: ActionScheduler,
        trajectory: Trajectory,
        server: str | None,
        queue_timeout_s: float | None,
        run_timeout_s: float | None,
    ) -> None:
        self._actions = actions
        self._trajectory = trajectory
        self._server = server
        self._queue_timeout_s = queue_timeout_s
        self._run_timeout_s = run_timeout_s
        self._ticket: Ticket | None = None
        self._before: tuple[Ticket, ...] = ()
        self._limit: asyncio.Timeout | None = None
        self._overdue: asyncio.TimerHandle | None = None

    @property
    def ticket(self) -> Ticket:
        """The place in the gate; RuntimeError before entry."""
        if self._ticket is None:
            raise RuntimeError("the slot was not entered")
        return self._ticket

    @property
    def queued_s(self) -> float:
        return self.ticket.queued_s

    @property
    def started_s(self) -> float:
        return self.ticket.granted_s

    async def __aenter__(self) -> Slot:
        actions = self._actions
        self._ticket = await actions._gate.acquire(
            self._trajectory.label,
            actions._key(self._trajectory),
            self._server,
            self._queue_timeout_s,
        )
        self._before = gate.enter(self._ticket)
        if self._run_timeout_s is not None:
            self._limit = actions.clock.timeout(self._run_timeout_s)
            await self._limit.__aenter__()
            self._overdue = asyncio.get_running_loop().call_later(
                self._run_timeout_s + actions.grace_s, actions.abandon, self._ticket
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        gate.leave(self._before)
        # Release first: nothing below may keep the slot.
        self._actions._gate.release(self.ticket)
        if self._limit is None or self._overdue is None:
            return
        self._overdue.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise RunTimeout(
                self._trajectory.label, self._server, self._run_timeout_s or 0.0
            ) from error
