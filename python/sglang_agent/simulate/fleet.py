"""The workers of a simulated deployment and the router in front of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from sglang_agent.clock import VirtualClock
from sglang_agent.simulate import wire
from sglang_agent.simulate.errors import RequestRefused, SimulationError
from sglang_agent.simulate.workers import WorkerChannel

NS = 1e9


class RoutingPolicy(Protocol):
    """What the simulator needs of :class:`sgl_router.policies.Policy`."""

    needs_text: ClassVar[bool]

    def pick(
        self, label: str | None, loads: Mapping[str, int], text: str | None = None
    ) -> str:
        """Return the worker for one request."""


class VirtualWorker:
    """One worker as an event source of the virtual clock."""

    def __init__(self, name: str, channel: WorkerChannel, clock: VirtualClock) -> None:
        self.name = name
        self._channel = channel
        self._clock = clock
        self._now_ns = 0
        self._bound_ns: int | None = None
        self._held: list[wire.Finished] = []
        self._arrivals: list[wire.Request] = []
        self._forget: list[str] = []
        self._answers: dict[str, asyncio.Future[wire.Finished]] = {}

    def submit(self, request: wire.Request) -> asyncio.Future[wire.Finished]:
        """Hand a request in, at the clock's present."""
        answer: asyncio.Future[wire.Finished] = (
            asyncio.get_running_loop().create_future()
        )
        self._answers[request.id] = answer
        self._arrivals.append(request)
        earliest_ns = (
            max(self._now_ns, request.arrival_ns) + self._channel.ready.step_floor_ns
        )
        if self._bound_ns is None or earliest_ns < self._bound_ns:
            self._bound_ns = earliest_ns
        return answer

    def forget(self, label: str) -> None:
        """Tell the worker that a trajectory is over."""
        self._forget.append(label)

    def next_event_s(self) -> float | None:
        """Nothing is delivered before this; None while nothing is in flight."""
        if self._held:
            return self._now_ns / NS
        return None if self._bound_ns is None else self._bound_ns / NS

    def advance(self, horizon_s: float) -> float:
        """Run, and deliver the first answers that fall before ``horizon_s``."""
        until_ns = wire.FOREVER_NS if math.isinf(horizon_s) else round(horizon_s * NS)
        if not self._held:
            self._run(until_ns)
        if self._held and self._now_ns <= until_ns:
            for finished in self._held:
                answer = self._answers.pop(finished.id)
                if not answer.done():  # its trajectory may have been cancelled
                    answer.set_result(finished)
            self._held = []
            return self._now_ns / NS
        if math.isinf(horizon_s) and not self._held:
            raise SimulationError(
                f"{self.name}: {len(self._answers)} requests wait at "
                f"{self._now_ns / NS:.3f} s and none of them can run"
            )
        return horizon_s

    def _run(self, until_ns: int) -> None:
        arrivals, self._arrivals = self._arrivals, []
        forget, self._forget = self._forget, []
        progress = self._channel.advance(until_ns, arrivals, forget)
        self._now_ns = progress.now_ns
        self._bound_ns = progress.quiet_until_ns
        self._held = progress.finished


class Fleet:
    """Routes turns to workers by label and loads, as the gateway does."""

    def __init__(self, workers: Sequence[VirtualWorker], policy: RoutingPolicy) -> None:
        self._workers = {worker.name: worker for worker in workers}
        self._policy = policy
        self._loads = dict.fromkeys(self._workers, 0)

    async def complete(
        self, request: wire.Request, text: Callable[[], str]
    ) -> tuple[str, wire.Finished]:
        """Answer one turn; returns the worker's name and its answer.

        Raises :class:`RequestRefused` when the engine gave the request up.
        """
        prompt = text() if self._policy.needs_text else None
        name = self._policy.pick(request.label, self._loads, prompt)
        self._loads[name] += 1
        try:
            finished = await self._workers[name].submit(request)
        finally:
            self._loads[name] -= 1
        if finished.error is not None:
            raise RequestRefused(f"{name} gave {request.id} up: {finished.error}")
        return name, finished

    def forget(self, label: str) -> None:
        """A trajectory is over."""
        for worker in self._workers.values():
            worker.forget(label)
