"""Workers in lockstep: no worker may run past a moment at which news can still come."""

import asyncio
import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_router.policies import make_policy
from sglang_agent.clock import VirtualClock
from sglang_agent.simulate import wire
from sglang_agent.simulate.errors import SimulationError
from sglang_agent.simulate.fleet import NS, Fleet, VirtualWorker

FLOOR_NS = 5


class FakeChannel:
    """One request at a time, ``output.length`` passes of ``pass_ns`` each.

    Fails the test when a request arrives that an earlier pass should have seen.
    """

    def __init__(self, pass_ns: int) -> None:
        self.ready = wire.Ready(1000, 10, 3, 0.9, FLOOR_NS)
        self._pass_ns = pass_ns
        self._now_ns = 0
        self._last_start_ns = -1
        self._queue: list[tuple[int, int, wire.Request]] = []
        self._left: list[tuple[wire.Request, int]] = []
        self._entries = 0
        self.log: list[tuple[str, int]] = []

    def advance(self, until_ns, requests, forget) -> wire.Progress:
        for request in requests:
            assert request.arrival_ns > self._last_start_ns, "arrived in the past"
            self._entries += 1
            heapq.heappush(self._queue, (request.arrival_ns, self._entries, request))
        finished: list[wire.Finished] = []
        while not finished and self._start(until_ns):
            request, left = self._left[0]
            self._last_start_ns = self._now_ns
            self._now_ns += self._pass_ns
            self._left[0] = (request, left - 1)
            if left == 1:
                self._left.pop(0)
                finished.append(self._finish(request))
        return wire.Progress(self._now_ns, self._quiet(), 0, len(self._left), finished)

    def _start(self, until_ns: int) -> bool:
        if not self._left and self._queue and self._queue[0][0] < until_ns:
            self._now_ns = max(self._now_ns, self._queue[0][0])
        if self._now_ns >= until_ns:
            return False
        while self._queue and self._queue[0][0] <= self._now_ns:
            request = heapq.heappop(self._queue)[2]
            self._left.append((request, request.output.length))
        return bool(self._left)

    def _finish(self, request: wire.Request) -> wire.Finished:
        self.log.append((request.id, self._now_ns))
        return wire.Finished(request.id, 1, 1, 0, self._now_ns, self._now_ns, 0)

    def _quiet(self) -> int | None:
        bounds = [max(self._now_ns, e[0]) + FLOOR_NS for e in self._queue[:1]]
        if self._left:
            bounds.append(self._now_ns + min(n for _, n in self._left) * FLOOR_NS)
        return min(bounds, default=None)


def request(label: str, turn: int, passes: int, clock: VirtualClock) -> wire.Request:
    return wire.Request(
        id=f"{label}.{turn}",
        label=label,
        arrival_ns=round(clock.now() * NS),
        prompt=[wire.Segment(0, 1)],
        output=wire.Segment(0, passes),
        max_new_tokens=10,
    )


def play(workers: int, plan: list[list[tuple[int, int]]], policy: str = "lbch"):
    """Run trajectories of (passes, pause in ns) turns; returns the workers' logs."""
    clock = VirtualClock()
    channels = [FakeChannel(pass_ns=5 + 3 * index) for index in range(workers)]
    sources = [VirtualWorker(f"w{i}", c, clock) for i, c in enumerate(channels)]
    for source in sources:
        clock.add_source(source)
    fleet = Fleet(sources, make_policy(policy, [s.name for s in sources]))

    async def trajectory(label: str, turns: list[tuple[int, int]]) -> None:
        for number, (passes, pause_ns) in enumerate(turns):
            await fleet.complete(request(label, number, passes, clock), str)
            await clock.sleep(pause_ns / NS)

    async def batch() -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, turns in enumerate(plan):
                tasks.create_task(trajectory(f"t{index}", turns))

    clock.run(batch())
    return [channel.log for channel in channels], clock.now()


turn_lists = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=5),
    min_size=1,
    max_size=6,
)


@given(workers=st.integers(1, 3), plan=turn_lists)
@settings(max_examples=60, deadline=None)
def test_nothing_arrives_in_a_workers_past(workers, plan) -> None:
    logs, _ = play(workers, plan)
    assert sum(map(len, logs)) == sum(map(len, plan))


@given(plan=turn_lists)
@settings(max_examples=20, deadline=None)
def test_the_same_plan_gives_the_same_logs(plan) -> None:
    assert play(2, plan) == play(2, plan)


def test_one_worker_and_one_trajectory_take_the_sum_of_their_times() -> None:
    (log,), end_s = play(1, [[(3, 7), (2, 11)]])
    assert log == [("t0.0", 15), ("t0.1", 15 + 7 + 10)]
    assert end_s == pytest.approx((15 + 7 + 10 + 11) / NS)


def test_a_worker_that_cannot_go_on_ends_the_run_with_the_reason() -> None:
    class Stuck(FakeChannel):
        def advance(self, until_ns, requests, forget) -> wire.Progress:
            return wire.Progress(0, None, 1, 0, [])

    clock = VirtualClock()
    worker = VirtualWorker("w0", Stuck(5), clock)
    clock.add_source(worker)

    async def ask() -> None:
        await worker.submit(request("t", 0, 1, clock))

    with pytest.raises(SimulationError, match="w0: 1 requests wait"):
        clock.run(ask())


def test_every_router_policy_can_stand_in_front() -> None:
    rng = random.Random(1)
    plan = [
        [(rng.randint(1, 5), rng.randint(0, 9)) for _ in range(3)] for _ in range(6)
    ]
    for name in ("lbch", "consistent_hashing", "cache_aware", "round_robin"):
        logs, _ = play(2, plan, name)
        assert sum(map(len, logs)) == 18
