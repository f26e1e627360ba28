"""A counted limit whose waiters are ordered: the core of both gates.

At most ``capacity`` tickets are held at any instant. Waiting tickets are granted in
ascending order of (key, entry number). One lock guards everything, so coroutines of
any loop and plain threads may share a gate.

The life of a ticket::

    WAITING --grant--> HELD --release--> DONE
       |                 |--release while lent--> CLOSING --borrower done--> DONE
       |--withdraw--> DONE

A grant happens inside whatever call freed the place, before the waiter wakes up: from
then on the ticket counts, and a waiter that is cancelled at that moment releases it.
A holder that asks its own gate again gets its own place lent, one borrower at a time,
so nested work cannot wait for itself.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from typing import NamedTuple, Protocol

from sglang_agent.clock import Clock, RealClock
from sglang_agent.errors import QueueTimeout, WouldBlock


class State(Enum):
    """Where a ticket is in its life."""

    WAITING = "waiting"
    HELD = "held"
    CLOSING = "closing"
    DONE = "done"


# Looked up once: the gate compares states several times a job.
WAITING, HELD, CLOSING, DONE = State


class ServerLimit(NamedTuple):
    """What one server allows: jobs at once, and starts per second with a burst."""

    concurrency: int | None = None
    rate_per_s: float | None = None
    burst: int = 1


class ServerUse(NamedTuple):
    """Jobs of one server, now."""

    running: int
    waiting: int


class Holding(NamedTuple):
    """Who holds or waits for a place, and since when on the gate's clock."""

    label: str
    server: str | None
    since_s: float


class GateStatistics(NamedTuple):
    """A snapshot of a gate. ``peak_running`` is over its whole life."""

    capacity: int
    running: int
    waiting: int
    peak_running: int
    abandoned: int
    paused: bool
    by_server: dict[str, ServerUse]


class Ticket:
    """One place in a gate, from queueing to release."""

    __slots__ = (
        "borrower",
        "borrowers",
        "entry",
        "gate",
        "granted_s",
        "key",
        "label",
        "parent",
        "queued_s",
        "server",
        "state",
        "waker",
    )

    def __init__(
        self,
        gate: Gate,
        label: str,
        key: tuple[float, ...],
        server: str | None,
        queued_s: float,
    ) -> None:
        self.gate = gate
        self.label = label
        self.key = key
        self.server = server
        self.queued_s = queued_s
        self.granted_s = queued_s
        self.entry = -1
        self.state = WAITING
        self.waker: _Waker | None = None
        self.parent: Ticket | None = None
        self.borrower: Ticket | None = None
        self.borrowers: deque[Ticket] | None = None


_HELD: ContextVar[tuple[Ticket, ...]] = ContextVar("sglang_agent_held", default=())


class _Waker(Protocol):
    def wake(self) -> None: ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None: ...


class _LoopWaker:
    """Wakes a coroutine, from its own thread or from another."""

    __slots__ = ("_loop", "_thread", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._finish()
        else:
            self._loop.call_soon_threadsafe(self._finish)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        if threading.get_ident() == self._thread:
            self._loop.call_later(delay_s, callback)
        else:
            self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, callback)

    def _finish(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class _ThreadWaker:
    """Wakes a thread, which finds out by itself why."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = threading.Event()

    def wake(self) -> None:
        self.event.set()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        del delay_s, callback  # the thread waits no longer than the next rate slot
        self.event.set()


class _NoWaker:
    """For a ticket that is granted at once or withdrawn at once."""

    __slots__ = ()

    def wake(self) -> None:
        pass

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        pass


class _Lane:
    """The waiting tickets that share a server's limits, or that have none.

    Keys are coarse, so many tickets share one: the heap orders the distinct keys, and
    the tickets of a key stand in a queue in the order of entry.
    """

    __slots__ = (
        "_gone",
        "_keys",
        "_queues",
        "_size",
        "_tat_s",
        "armed_by",
        "armed_s",
        "limit",
        "running",
    )

    def __init__(self, limit: ServerLimit) -> None:
        self.limit = limit
        self.running = 0
        self.armed_by: Ticket | None = None
        self.armed_s = 0.0
        self._keys: list[tuple[float, ...]] = []
        self._queues: dict[tuple[float, ...], deque[Ticket]] = {}
        self._size = 0
        self._gone = 0
        self._tat_s = float("-inf")

    def push(self, ticket: Ticket) -> None:
        queue = self._queues.get(ticket.key)
        if queue is None:
            queue = self._queues[ticket.key] = deque()
            heapq.heappush(self._keys, ticket.key)
        # Only a borrower that lost its lender comes back with an older entry.
        if queue and ticket.entry < queue[-1].entry:
            queue.insert(bisect_left(queue, ticket.entry, key=_entry), ticket)
        else:
            queue.append(ticket)
        self._size += 1

    def head(self) -> Ticket | None:
        """Return the first waiting ticket, dropping those that left."""
        while self._keys:
            queue = self._queues[self._keys[0]]
            while queue:
                if queue[0].state is WAITING:
                    return queue[0]
                queue.popleft()
                self._gone -= 1
                self._size -= 1
            del self._queues[heapq.heappop(self._keys)]
        return None

    def pop(self, now_s: float) -> Ticket:
        """Take the head, which must be there, and book its start."""
        ticket = self._queues[self._keys[0]].popleft()
        self._size -= 1
        self.running += 1
        if self.limit.rate_per_s is not None:
            self._tat_s = max(now_s, self._tat_s) + 1.0 / self.limit.rate_per_s
        return ticket

    def forget(self) -> None:
        """Count a ticket that left while waiting; rebuild when half have."""
        self._gone += 1
        if self._gone > 64 and self._gone * 2 > self._size:
            stay = list(self.waiting())
            self._keys, self._queues, self._size, self._gone = [], {}, 0, 0
            for ticket in stay:
                self.push(ticket)

    def has_room(self) -> bool:
        cap = self.limit.concurrency
        return cap is None or self.running < cap

    def rate_opens_s(self) -> float:
        """Return the time from which the rate allows a start (leaky bucket)."""
        if self.limit.rate_per_s is None:
            return float("-inf")
        return self._tat_s - (self.limit.burst - 1) / self.limit.rate_per_s

    def waiting(self) -> Iterator[Ticket]:
        """Yield the waiting tickets in their order."""
        for key in sorted(self._queues):
            for ticket in self._queues[key]:
                if ticket.state is WAITING:
                    yield ticket

    def waiting_count(self) -> int:
        return self._size - self._gone


class Gate:
    """See the module's text. Raises ValueError for a capacity below 1."""

    def __init__(
        self,
        capacity: int,
        *,
        clock: Clock | None = None,
        servers: Mapping[str, ServerLimit] | None = None,
    ) -> None:
        self.clock: Clock = clock or RealClock()
        self._lock = threading.Lock()
        self._capacity = _checked_capacity(capacity)
        self._entries = itertools.count()
        self._free_lane = _Lane(ServerLimit())
        self._lanes = {
            name: _Lane(_checked_limit(name, limit))
            for name, limit in (servers or {}).items()
        }
        self._held: dict[Ticket, None] = {}
        self._peak = 0
        self._paused = False
        self._abandoned = 0

    # -- what callers do ---------------------------------------------------------

    async def acquire(
        self,
        label: str,
        key: tuple[float, ...] = (),
        server: str | None = None,
        queue_timeout_s: float | None = None,
    ) -> Ticket:
        """Wait for a place from a coroutine.

        Raises :class:`QueueTimeout` when none came in time. When the caller is
        cancelled, waiting or at the moment of the grant, nothing stays held.
        """
        ticket = self._ticket(label, key, server)
        if self._join(ticket, _LoopWaker):
            return ticket
        waker = ticket.waker
        assert isinstance(waker, _LoopWaker)
        try:
            if queue_timeout_s is None:
                await waker.future
            else:
                async with self.clock.timeout(queue_timeout_s):
                    await waker.future
        except TimeoutError:
            if self._withdraw(ticket):
                raise QueueTimeout(label, server, queue_timeout_s or 0.0) from None
        except BaseException:
            if not self._withdraw(ticket):
                self.release(ticket)
            raise
        return ticket

    def acquire_sync(
        self,
        label: str,
        key: tuple[float, ...] = (),
        server: str | None = None,
        queue_timeout_s: float | None = None,
    ) -> Ticket:
        """Wait for a place from a thread, in real time; errors as ``acquire``."""
        if not isinstance(self.clock, RealClock):
            raise RuntimeError("a thread can wait on the real clock only")
        ticket = self._ticket(label, key, server)
        if self._join(ticket, _ThreadWaker):
            return ticket
        waker = ticket.waker
        assert isinstance(waker, _ThreadWaker)
        limit_s = float("inf") if queue_timeout_s is None else queue_timeout_s
        deadline_s = ticket.queued_s + limit_s
        try:
            while ticket.state is WAITING:
                left_s = deadline_s - self.clock.now()
                if left_s <= 0 and self._withdraw(ticket):
                    raise QueueTimeout(label, server, limit_s)
                wait_s = min(left_s, self._rate_wait_s(ticket))
                waker.event.wait(None if wait_s == float("inf") else max(0.0, wait_s))
                waker.event.clear()
                self.dispatch()
        except BaseException:
            if not self._withdraw(ticket):
                self.release(ticket)
            raise
        return ticket

    def acquire_nowait(
        self, label: str, key: tuple[float, ...] = (), server: str | None = None
    ) -> Ticket:
        """Take a place now or raise :class:`WouldBlock`; never overtakes."""
        ticket = self._ticket(label, key, server)
        if not self._join(ticket, _NoWaker) and self._withdraw(ticket):
            raise WouldBlock(f"{label}: no place free among {self._capacity}")
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Give a place back; a second call does nothing."""
        with self._lock:
            if ticket.state is not HELD:
                return
            if ticket.borrower is not None:
                ticket.state = CLOSING
                return
            self._free(ticket)
            self._dispatch()

    def abandon(self, ticket: Ticket) -> bool:
        """Free the place of a job that cannot be stopped; False if it just ended."""
        with self._lock:
            if ticket.state not in (HELD, CLOSING):
                return False
            self._abandoned += 1
            self._free(ticket)
            self._dispatch()
            return True

    # -- settings while running --------------------------------------------------

    @property
    def capacity(self) -> int:
        """Places; lowering it interrupts nobody, the gate drains down to it."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        with self._lock:
            self._capacity = _checked_capacity(capacity)
            self._dispatch()

    @property
    def paused(self) -> bool:
        """While true nothing is granted; holders go on."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        with self._lock:
            self._paused = paused
            self._dispatch()

    def dispatch(self) -> None:
        """Grant whatever can be granted now."""
        with self._lock:
            self._dispatch()

    # -- what observers see ------------------------------------------------------

    def statistics(self) -> GateStatistics:
        with self._lock:
            lanes = [self._free_lane, *self._lanes.values()]
            return GateStatistics(
                capacity=self._capacity,
                running=len(self._held),
                waiting=sum(lane.waiting_count() for lane in lanes),
                peak_running=self._peak,
                abandoned=self._abandoned,
                paused=self._paused,
                by_server=self._by_server(lanes),
            )

    def holders(self) -> list[Holding]:
        """Return who holds a place, longest first."""
        with self._lock:
            return [Holding(t.label, t.server, t.granted_s) for t in self._held]

    def waiters(self) -> list[Holding]:
        """Return who waits, in dispatch order within each server's limits."""
        with self._lock:
            return [
                Holding(t.label, t.server, t.queued_s)
                for lane in (self._free_lane, *self._lanes.values())
                for t in lane.waiting()
            ]

    def held_here(self) -> Ticket | None:
        """Return the place that the calling context holds, if any."""
        for ticket in reversed(_HELD.get()):
            if ticket.gate is self and ticket.state is HELD:
                return ticket
        return None

    # -- inside ------------------------------------------------------------------

    def _by_server(self, lanes: list[_Lane]) -> dict[str, ServerUse]:
        running: dict[str, int] = {}
        waiting: dict[str, int] = {}
        for ticket in self._held:
            if ticket.server is not None:
                running[ticket.server] = running.get(ticket.server, 0) + 1
        for lane in lanes:
            for ticket in lane.waiting():
                if ticket.server is not None:
                    waiting[ticket.server] = waiting.get(ticket.server, 0) + 1
        return {
            name: ServerUse(running.get(name, 0), waiting.get(name, 0))
            for name in sorted(running.keys() | waiting.keys())
        }

    def _ticket(self, label: str, key: tuple[float, ...], server: str | None) -> Ticket:
        return Ticket(self, label, key, server, self.clock.now())

    def _lane_of(self, server: str | None) -> _Lane:
        if server is None or not self._lanes:
            return self._free_lane
        return self._lanes.get(server, self._free_lane)

    def _join(self, ticket: Ticket, make_waker: Callable[[], _Waker]) -> bool:
        """Queue a ticket; True when it was granted at once."""
        with self._lock:
            ticket.entry = next(self._entries)
            ticket.waker = make_waker()
            parent = self.held_here() if _HELD.get() else None
            if parent is None:
                self._lane_of(ticket.server).push(ticket)
                self._dispatch()
            else:
                self._borrow(parent, ticket)
            return ticket.state is HELD

    def _borrow(self, parent: Ticket, ticket: Ticket) -> None:
        ticket.parent = parent
        if parent.borrower is None:
            parent.borrower = ticket
            ticket.state = HELD
            return
        if parent.borrowers is None:
            parent.borrowers = deque()
        parent.borrowers.append(ticket)

    def _free(self, ticket: Ticket) -> None:
        ticket.state = DONE
        parent = ticket.parent
        if parent is not None:
            self._lend_on(parent)
            return
        del self._held[ticket]
        self._lane_of(ticket.server).running -= 1

    def _lend_on(self, parent: Ticket) -> None:
        """Pass a lent place to the next borrower, or back to a parent that left."""
        parent.borrower = None
        while parent.borrowers:
            heir = parent.borrowers.popleft()
            if heir.state is not WAITING:
                continue
            if parent.state is DONE:  # abandoned: nothing is left to lend
                heir.parent = None
                self._lane_of(heir.server).push(heir)
            elif self._grant(heir):
                parent.borrower = heir
                return
            else:
                heir.state = DONE
        if parent.state is CLOSING:
            self._free(parent)

    def _withdraw(self, ticket: Ticket) -> bool:
        """Leave the queue; False when the ticket is no longer waiting."""
        with self._lock:
            if ticket.state is not WAITING:
                return False
            ticket.state = DONE
            if ticket.parent is None:
                self._lane_of(ticket.server).forget()
                self._dispatch()
            return True

    def _dispatch(self) -> None:
        while len(self._held) < self._capacity and not self._paused:
            now_s = self.clock.now()
            lane = self._best_lane(now_s)
            if lane is None:
                return
            ticket = lane.pop(now_s)
            self._held[ticket] = None
            if not self._grant(ticket, now_s):
                self._free(ticket)
            elif len(self._held) > self._peak:
                self._peak = len(self._held)

    def _best_lane(self, now_s: float) -> _Lane | None:
        if not self._lanes:
            return self._free_lane if self._free_lane.head() is not None else None
        best: tuple[tuple[float, ...], int] | None = None
        best_lane = None
        for lane in (self._free_lane, *self._lanes.values()):
            head = lane.head()
            if head is None or not lane.has_room():
                continue
            opens_s = lane.rate_opens_s()
            if opens_s > now_s:
                self._arm(lane, head, opens_s, now_s)
            elif best is None or (head.key, head.entry) < best:
                best, best_lane = (head.key, head.entry), lane
        return best_lane

    def _arm(self, lane: _Lane, head: Ticket, opens_s: float, now_s: float) -> None:
        """Have the head of a rate-limited lane dispatch again when the rate opens."""
        armed = lane.armed_by
        if armed is not None and armed.state is WAITING and lane.armed_s >= opens_s:
            return
        lane.armed_by, lane.armed_s = head, opens_s
        assert head.waker is not None
        head.waker.call_later(opens_s - now_s, self.dispatch)

    def _grant(self, ticket: Ticket, now_s: float | None = None) -> bool:
        """Hand a place over; False when the waiter's loop is gone."""
        ticket.state = HELD
        ticket.granted_s = self.clock.now() if now_s is None else now_s
        if ticket.waker is not None:
            try:
                ticket.waker.wake()
            except RuntimeError:  # its event loop was closed under it
                return False
        return True

    def _rate_wait_s(self, ticket: Ticket) -> float:
        """Return how long the thread that was told to watch a rate may sleep."""
        lane = self._lane_of(ticket.server)
        wait_s = lane.armed_s - self.clock.now()
        return wait_s if lane.armed_by is ticket and wait_s > 0 else float("inf")


class GateOwner:
    """What both gates show of the :class:`Gate` inside them."""

    _gate: Gate

    @property
    def capacity(self) -> int:
        """The limit. Raising it starts waiters at once; lowering it only drains."""
        return self._gate.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._gate.capacity = capacity

    @property
    def paused(self) -> bool:
        """While true nobody starts; whoever holds a place goes on."""
        return self._gate.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._gate.paused = paused

    def statistics(self) -> GateStatistics:
        """Return a snapshot: running, waiting, peak, abandoned, by server."""
        return self._gate.statistics()

    def holders(self) -> list[Holding]:
        """Return who holds a place, longest first."""
        return self._gate.holders()


def enter(ticket: Ticket) -> tuple[Ticket, ...]:
    """Note that the calling context holds ``ticket``; returns what to restore."""
    before = _HELD.get()
    _HELD.set((*before, ticket))
    return before


def leave(before: tuple[Ticket, ...]) -> None:
    """Undo :func:`enter`."""
    _HELD.set(before)


def _entry(ticket: Ticket) -> int:
    return ticket.entry


def _checked_capacity(capacity: int) -> int:
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"capacity must be a whole number >= 1, got {capacity!r}")
    return capacity


def _checked_limit(name: str, limit: ServerLimit) -> ServerLimit:
    if limit.concurrency is not None:
        try:
            _checked_capacity(limit.concurrency)
        except ValueError as error:
            raise ValueError(f"server {name}: {error}") from None
    if limit.rate_per_s is not None and not 0.0 < limit.rate_per_s < float("inf"):
        raise ValueError(
            f"server {name}: rate_per_s must be > 0, got {limit.rate_per_s!r}"
        )
    if limit.burst < 1:
        raise ValueError(f"server {name}: burst must be >= 1, got {limit.burst!r}")
    return limit
