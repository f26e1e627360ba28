"""Time as an argument: one clock contract, a real and a virtual implementation.

Every gate, client and runner takes a :class:`Clock` and asks it for the time, for
sleeps and for time limits. Under :class:`RealClock` these are asyncio's own. Under
:class:`VirtualClock` they are asyncio's own as well, on an event loop whose time is a
number: it stands still while anything can run and then jumps to the next event. The
very same gates therefore run in tests and under simulation, and one program gives one
outcome, because equal times are decided by a counter.

A simulator adds the world outside the loop as :class:`EventSource` objects. When no
callback can run, the loop asks each source for a lower bound of its next event, takes
the earliest of these and of its own timers, and either fires that timer or calls the
source's ``advance``. Nothing else runs meanwhile, so a source may block on a worker
process. For example, a source in front of one simulated engine::

    class Worker:
        def submit(self, request):            # called by coroutines
            future = asyncio.get_running_loop().create_future()
            self.process.send((clock.now(), request))
            self.waiting[request.id] = future
            return future

        def next_event_s(self):               # a bound; None when idle
            return self.process.ask_end_of_next_step() if self.waiting else None

        def advance(self, horizon_s):         # run at most up to horizon_s
            reached_s, finished = self.process.run_until_delivery(horizon_s)
            for answer in finished:
                self.waiting.pop(answer.id).set_result(answer)
            return reached_s

    clock = VirtualClock()
    clock.add_source(worker)
    clock.run(main())
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Clock(Protocol):
    """What the gates and the runner know of time. All values are seconds."""

    def now(self) -> float:
        """Return the time since an arbitrary origin; it never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Wait; zero or less lets other tasks run once."""

    def timeout(self, seconds: float | None) -> asyncio.Timeout:
        """Limit a block of code, as ``asyncio.timeout``; None sets no limit."""


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float | None) -> asyncio.Timeout:
        return asyncio.timeout(seconds)


class EventSource(Protocol):
    """A part of the simulated world that lives outside the event loop."""

    def next_event_s(self) -> float | None:
        """Return a time before which this source does nothing by itself.

        None while it is idle. Asked whenever the loop has nothing to run, so keep
        the answer until something is submitted or ``advance`` is called.
        """

    def advance(self, horizon_s: float) -> float:
        """Run to at most ``horizon_s`` and return the time that was reached.

        Called only for the source with the earliest bound. It must stop as soon as
        it has delivered something (set a future's result), and must get at least as
        far as its own bound. Up to ``horizon_s`` nothing else can happen, so several
        internal steps may be taken at once.
        """


class VirtualDeadlock(RuntimeError):
    """Every task waits for something that no timer and no source will bring."""


class VirtualClock:
    """A clock that moves only when nothing is runnable.

    ``run`` is its entry point. A callback in a thread pool counts as runnable: while
    one is out, virtual time stands still. Network I/O is not supported on the
    virtual loop.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s
        self._sources: list[EventSource] = []
        self._loop: VirtualLoop | None = None

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._check_loop()
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float | None) -> asyncio.Timeout:
        self._check_loop()
        return asyncio.timeout(seconds)

    def add_source(self, source: EventSource) -> None:
        """Add a part of the world; equal times go in the order of addition."""
        self._sources.append(source)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end on a fresh virtual loop and return its result.

        Raises :class:`VirtualDeadlock` when time can no longer move.
        """
        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            return runner.run(main)

    def new_loop(self) -> VirtualLoop:
        """Return a fresh loop on this clock, for callers that drive it themselves."""
        self._loop = VirtualLoop(self)
        return self._loop

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a VirtualClock works only inside its own run()")

    def _advance(self, next_timer_s: float) -> bool:
        """Move to the next event; True when a source produced it, not a timer."""
        bounds = [
            (bound_s, order)
            for order, source in enumerate(self._sources)
            if (bound_s := source.next_event_s()) is not None
        ]
        first_s, order = min(bounds, default=(math.inf, -1))
        # A source goes before a timer of the same moment: what a worker finished at
        # t must be visible to whatever gives up at t.
        if order < 0 or first_s > next_timer_s:
            if math.isinf(next_timer_s):
                raise VirtualDeadlock(f"at {self._now:g} s nothing is left to happen")
            self._now = max(self._now, next_timer_s)
            return False
        others_s = min((s for s, other in bounds if other != order), default=math.inf)
        reached_s = self._sources[order].advance(min(next_timer_s, others_s))
        self._now = max(self._now, reached_s)
        return True


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop of a :class:`VirtualClock`.

    Timers are kept here rather than in the base class so that equal times fire in
    the order in which they were set.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_VirtualSelector(self))
        self._clock = clock
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._threads = 0

    def time(self) -> float:
        return self._clock.now()

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._threads += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._threads -= 1

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._threads -= 1

    def waits_for_threads(self) -> bool:
        return self._threads > 0

    def advance(self) -> None:
        """Move time to the next event and make its callbacks ready."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        next_timer_s = self._timers[0][0] if self._timers else math.inf
        if self._clock._advance(next_timer_s):
            return
        while self._timers and self._timers[0][0] <= self._clock.now():
            handle = heapq.heappop(self._timers)[2]
            if not handle.cancelled():
                self.call_soon(_fire, handle)


def _fire(handle: asyncio.TimerHandle) -> None:
    # A callback that ran before this one may have cancelled it.
    if not handle.cancelled():
        handle._run()


class _VirtualSelector(selectors.DefaultSelector):
    """Where a real loop would sleep, moves the virtual clock instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._virtual_loop = loop

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if self._virtual_loop.waits_for_threads():
            return super().select(timeout)
        if timeout is None:
            self._virtual_loop.advance()
        return []
