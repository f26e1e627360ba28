"""Early signs of trouble: a blocked event loop, and a batch that stands still."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType

from sglang_agent.actions import ActionScheduler
from sglang_agent.admission import AdmissionGate
from sglang_agent.state import BatchState

STALLED_SAMPLES_NAMED = 10


class LoopWatch:
    """Measures how late the event loop runs its callbacks.

    A thread looks on, so the warning comes while the loop is still blocked: at
    ``warn_s`` seconds and again at each doubling. Use as ``async with``.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        *,
        warn_s: float = 1.0,
        interval_s: float = 0.1,
    ) -> None:
        self._warn = warn
        self._warn_s = warn_s
        self._interval_s = interval_s
        self._beat_s = time.monotonic()
        self._late_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._task: asyncio.Task[None] | None = None
        self.worst_s = 0.0

    def lag_s(self) -> float:
        """Return the present lag in seconds, also from inside a long block."""
        overdue_s = time.monotonic() - self._beat_s - self._interval_s
        return max(self._late_s, overdue_s, 0.0)

    async def __aenter__(self) -> LoopWatch:
        self._beat_s = time.monotonic()
        self._task = asyncio.create_task(self._beat())
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._task is not None:
            self._task.cancel()
        await asyncio.to_thread(self._thread.join)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            now_s = time.monotonic()
            self._late_s = max(0.0, now_s - self._beat_s - self._interval_s)
            self.worst_s = max(self.worst_s, self._late_s)
            self._beat_s = now_s

    def _look_on(self) -> None:
        next_warning_s = self._warn_s
        while not self._stop.wait(self._interval_s):
            lag_s = time.monotonic() - self._beat_s - self._interval_s
            if lag_s < self._warn_s:
                next_warning_s = self._warn_s
            elif lag_s >= next_warning_s:
                next_warning_s *= 2.0
                self.worst_s = max(self.worst_s, lag_s)
                self._warn(
                    f"warning: the event loop has been blocked for {lag_s:.1f} s;"
                    " blocking code belongs into a thread"
                )


class StallWatch:
    """Warns when no sample changed its stage for ``limit_s`` seconds.

    The warning names the samples left, their stages, and a pause if one is on. It
    repeats at each doubling until something moves.
    """

    def __init__(
        self,
        state: BatchState,
        admission: AdmissionGate,
        actions: ActionScheduler,
        warn: Callable[[str], None],
        limit_s: float,
    ) -> None:
        self._state = state
        self._admission = admission
        self._actions = actions
        self._warn = warn
        self._limit_s = limit_s
        self.warnings = 0

    async def run(self) -> None:
        """Watch until cancelled."""
        limit_s = self._limit_s
        seen_s = self._state.last_event_s
        while True:
            now_s = self._state.clock.now()
            if self._state.last_event_s != seen_s:
                seen_s, limit_s = self._state.last_event_s, self._limit_s
            idle_s = now_s - seen_s
            if idle_s >= limit_s:
                self.warnings += 1
                self._warn(self._describe(idle_s))
                limit_s *= 2.0
            await self._state.clock.sleep(max(limit_s - idle_s, 0.05 * limit_s))

    def _describe(self, idle_s: float) -> str:
        names = [
            f"{s.sample_id} ({s.stage.value})"
            for s in self._state.oldest(STALLED_SAMPLES_NAMED)
        ]
        more = self._state.active - len(names)
        if more > 0:
            names.append(f"{more} more")
        paused = [
            name
            for name, is_paused in (
                ("admission", self._admission.paused),
                ("environment jobs", self._actions.paused),
            )
            if is_paused
        ]
        text = f"warning: nothing moved for {idle_s:.0f} s; waiting for"
        text += f" {', '.join(names) or 'nobody'}"
        return text + (f"; paused: {', '.join(paused)}" if paused else "")
