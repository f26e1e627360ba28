"""The action scheduler as a library: limits, cancellation, budgets, servers, threads."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_agent import (
    ActionScheduler,
    AdmissionGate,
    JobAbandoned,
    QueueTimeout,
    ServerLimit,
    Trajectory,
    VirtualClock,
    WouldBlock,
)


class Peak:
    """Counts how many are inside at once."""

    def __init__(self) -> None:
        self.now = self.most = self.total = 0

    def __enter__(self) -> Peak:
        self.now += 1
        self.total += 1
        self.most = max(self.most, self.now)
        return self

    def __exit__(self, *_: object) -> None:
        self.now -= 1


async def together(count: int, job: Callable[[int], Any]) -> None:
    async with asyncio.TaskGroup() as group:
        for n in range(count):
            group.create_task(job(n))


def test_two_limits_with_two_meanings() -> None:
    clock = VirtualClock()
    active, jobs = Peak(), Peak()

    async def main() -> None:
        admission = AdmissionGate(16, clock=clock)
        actions = ActionScheduler(2, clock=clock)

        async def sample(n: int) -> None:
            trajectory = Trajectory(f"s{n}")
            async with admission.admit(trajectory.label):
                with active:
                    for _ in range(3):
                        await clock.sleep(0.1)
                        trajectory.complete_turn(0.1)
                        async with actions.slot(trajectory):
                            with jobs:
                                await clock.sleep(0.5)

        await together(40, sample)
        assert admission.statistics().peak_running == active.most == 16
        assert actions.statistics().peak_running == jobs.most == 2

    clock.run(main())
    assert jobs.total == 120


@pytest.mark.parametrize("seed", range(5))
def test_the_limit_holds_through_retries_timeouts_and_cancels(seed: int) -> None:
    clock, chance, jobs = VirtualClock(), random.Random(seed), Peak()

    async def main() -> None:
        actions = ActionScheduler(4, clock=clock)

        async def job(n: int) -> None:
            for _ in range(3):  # retries
                try:
                    async with actions.slot(
                        Trajectory(f"t{n}"), queue_timeout_s=20, run_timeout_s=0.7
                    ):
                        with jobs:
                            await clock.sleep(chance.uniform(0.1, 1.0))
                    return
                except TimeoutError:
                    await clock.sleep(chance.uniform(0.0, 0.2))

        tasks = [asyncio.create_task(job(n)) for n in range(200)]
        for task in chance.sample(tasks, 40):
            await clock.sleep(chance.uniform(0.0, 0.3))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        statistics = actions.statistics()
        assert (statistics.running, statistics.waiting) == (0, 0)

    clock.run(main())
    assert jobs.most == 4


@pytest.mark.parametrize("seed", range(50))
def test_no_slot_leaks_whenever_half_are_cancelled(seed: int) -> None:
    clock, chance, jobs = VirtualClock(), random.Random(seed), Peak()

    async def main() -> None:
        actions = ActionScheduler(2, clock=clock)

        async def job(n: int) -> None:
            async with actions.slot(Trajectory(f"t{n}")):
                with jobs:
                    await clock.sleep(chance.choice([0.0, 0.01, 0.02]))

        tasks = [asyncio.create_task(job(n)) for n in range(200)]
        victims = chance.sample(tasks, 100)
        while victims:
            # Some in the same loop round as an end: at hand-over.
            for victim in victims[: chance.randint(1, 4)]:
                victim.cancel()
                victims.remove(victim)
            await clock.sleep(chance.choice([0.0, 0.0, 0.01]))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert actions.statistics().running == 0
        with actions.slot_nowait(Trajectory("next")):
            pass

    clock.run(main())
    assert jobs.most == 2


def test_fan_out_inside_a_turn_counts() -> None:
    clock, jobs = VirtualClock(), Peak()

    async def main() -> None:
        actions = ActionScheduler(4, clock=clock)

        async def sample(n: int) -> None:
            trajectory = Trajectory(f"s{n}")

            async def tool(_: int) -> None:
                async with actions.slot(trajectory):
                    with jobs:
                        await clock.sleep(1.0)

            await together(4, tool)

        await together(8, sample)
        assert clock.now() == 8.0

    clock.run(main())
    assert (jobs.most, jobs.total) == (4, 32)


@pytest.mark.parametrize(("cs", "expected"), [(3, 2.3), (50, 10.0)])
def test_separate_limits_keep_inference_busy(cs: int, expected: float) -> None:
    """CE 3, 0.3 s an environment job, 1.0 s a turn, 200 samples of 10 turns."""
    clock, in_flight = VirtualClock(), Peak()
    seen: list[tuple[float, int]] = []

    async def main() -> None:
        admission = AdmissionGate(cs, clock=clock)
        actions = ActionScheduler(3, clock=clock)

        async def sample(n: int) -> None:
            trajectory = Trajectory(f"s{n}")
            async with admission.admit(trajectory.label):
                for _ in range(10):
                    with in_flight:
                        await clock.sleep(1.0)
                    trajectory.complete_turn(1.0)
                    async with actions.slot(trajectory):
                        await clock.sleep(0.3)

        async def look() -> None:
            while True:
                await clock.sleep(0.137)
                seen.append((clock.now(), in_flight.now))

        looking = asyncio.create_task(look())
        await together(200, sample)
        looking.cancel()

    clock.run(main())
    end_s = seen[-1][0]
    middle = [n for at_s, n in seen if 0.3 * end_s < at_s < 0.7 * end_s]
    assert sum(middle) / len(middle) == pytest.approx(expected, rel=0.05)


def test_queueing_is_not_charged_to_the_run_budget() -> None:
    clock, jobs = VirtualClock(), Peak()

    async def main() -> None:
        actions = ActionScheduler(1, clock=clock)

        async def job(n: int) -> None:
            async with actions.slot(Trajectory(f"t{n}"), run_timeout_s=1.0) as slot:
                with jobs:
                    await clock.sleep(0.6)
                assert slot.started_s - slot.queued_s == pytest.approx(0.6 * n)

        await together(5, job)

    clock.run(main())
    assert jobs.total == 5


def test_a_job_that_ignores_its_end_is_abandoned_and_its_slot_comes_back() -> None:
    clock = VirtualClock()

    async def main() -> None:
        actions = ActionScheduler(1, grace_s=2.0, clock=clock)

        async def deaf() -> None:
            async with actions.slot(Trajectory("deaf"), run_timeout_s=1.0):
                for _ in range(10):
                    with contextlib.suppress(asyncio.CancelledError):
                        await clock.sleep(1.0)

        task = asyncio.create_task(deaf())
        await clock.sleep(0.5)
        async with actions.slot(Trajectory("next")):
            assert clock.now() == pytest.approx(3.0)
        (lost,) = actions.abandoned
        assert (lost.label, lost.ran_s) == ("deaf", pytest.approx(3.0))
        assert actions.statistics().abandoned == 1
        await asyncio.wait([task])
        assert actions.statistics().running == 0  # its late end frees nothing twice

    clock.run(main())


def test_the_queue_has_a_deadline_of_its_own() -> None:
    clock = VirtualClock()

    async def main() -> None:
        actions = ActionScheduler(1, clock=clock)

        async def late() -> None:
            with pytest.raises(QueueTimeout, match="late: no environment slot"):
                async with actions.slot(Trajectory("late"), queue_timeout_s=2.0):
                    pytest.fail("must not start")
            assert clock.now() == 2.0

        task = asyncio.create_task(late())
        async with actions.slot(Trajectory("holder")):
            await clock.sleep(5.0)
        await task
        assert actions.statistics().waiting == 0

    clock.run(main())


def test_nested_work_borrows_its_parents_slot_one_at_a_time() -> None:
    clock, inner = VirtualClock(), Peak()

    async def main() -> None:
        actions = ActionScheduler(1, clock=clock)
        admission = AdmissionGate(1, clock=clock)

        async def sub_sample(n: int) -> None:
            async with admission.admit(f"sub{n}"), actions.slot(Trajectory(f"sub{n}")):
                with inner:
                    await clock.sleep(1.0)

        async with (
            asyncio.timeout(60),
            admission.admit("outer"),
            actions.slot(Trajectory("outer")),
        ):
            await together(3, sub_sample)
            assert actions.statistics().running == 1
        assert clock.now() == 3.0
        assert actions.statistics().running == 0

    clock.run(main())
    assert (inner.most, inner.total) == (1, 3)


def test_a_lent_slot_stays_taken_until_the_borrower_ends() -> None:
    clock = VirtualClock()

    async def main() -> None:
        actions = ActionScheduler(1, clock=clock)

        async def orphan() -> None:
            async with actions.slot(Trajectory("orphan")):
                await clock.sleep(5.0)

        async with actions.slot(Trajectory("parent")):
            task = asyncio.create_task(orphan())
            await clock.sleep(1.0)
        assert actions.statistics().running == 1
        async with actions.slot(Trajectory("next")):
            assert clock.now() == 5.0
        await task

    clock.run(main())


def test_a_servers_cap_does_not_hold_up_others() -> None:
    clock, at_a, at_b = VirtualClock(), Peak(), Peak()
    ended: dict[str, list[float]] = {"a": [], "b": []}

    async def main() -> None:
        actions = ActionScheduler(
            8, "fcfs", servers={"a": ServerLimit(concurrency=2)}, clock=clock
        )

        async def job(n: int) -> None:
            server, peak = ("a", at_a) if n < 10 else ("b", at_b)
            async with actions.slot(Trajectory(f"t{n}"), server=server):
                with peak:
                    await clock.sleep(1.0)
            ended[server].append(clock.now())

        task = asyncio.create_task(together(20, job))
        await clock.sleep(0.5)
        use = actions.statistics().by_server
        assert (use["a"].running, use["a"].waiting) == (2, 8)
        assert (use["b"].running, use["b"].waiting) == (6, 4)
        await task

    clock.run(main())
    assert (at_a.most, at_b.most) == (2, 6)
    assert max(ended["b"]) == 2.0
    assert max(ended["a"]) == 5.0


def test_a_servers_rate_spaces_its_starts_and_keeps_the_slot_free() -> None:
    clock = VirtualClock()
    starts: list[float] = []

    async def main() -> None:
        limit = ServerLimit(rate_per_s=2.0, burst=2)
        actions = ActionScheduler(8, servers={"a": limit}, clock=clock)

        async def job(n: int) -> None:
            async with actions.slot(Trajectory(f"t{n}"), server="a"):
                starts.append(clock.now())

        task = asyncio.create_task(together(6, job))
        await clock.sleep(0.1)
        assert actions.statistics().running == 0
        await task

    clock.run(main())
    assert starts == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.5, 2.0])


def test_limits_change_while_running() -> None:
    clock, jobs = VirtualClock(), Peak()

    async def main() -> None:
        actions = ActionScheduler(3, clock=clock)

        async def job(n: int) -> None:
            async with actions.slot(Trajectory(f"t{n}")):
                with jobs:
                    await clock.sleep(10.0)

        task = asyncio.create_task(together(30, job))
        await clock.sleep(1.0)
        assert jobs.now == 3
        actions.capacity = 6
        await clock.sleep(0.0)
        await clock.sleep(0.5)
        assert jobs.now == 6
        actions.capacity = 2
        assert jobs.now == 6  # nobody is interrupted
        await clock.sleep(13.0)
        assert jobs.now == 2
        await task

    clock.run(main())
    assert jobs.total == 30


def test_a_pause_stops_starts_only() -> None:
    clock = VirtualClock()

    async def main() -> None:
        actions = ActionScheduler(2, clock=clock)
        actions.paused = True
        started: list[float] = []

        async def job(n: int) -> None:
            async with actions.slot(Trajectory(f"t{n}")):
                started.append(clock.now())

        task = asyncio.create_task(together(2, job))
        await clock.sleep(7.0)
        assert started == []
        actions.paused = False
        await task
        assert started == [7.0, 7.0]

    clock.run(main())


async def test_no_wait_twin_and_who_holds_what() -> None:
    actions = ActionScheduler(1)
    leave = asyncio.Event()
    holder = asyncio.create_task(_hold(actions, "holder", leave))
    waiter = asyncio.create_task(_hold(actions, "waiter", leave))
    await asyncio.sleep(0)
    (holding,) = actions.holders()
    assert (holding.label, holding.server) == ("holder", "sqlite")
    assert [w.label for w in actions.waiters()] == ["waiter"]
    with (
        pytest.raises(WouldBlock, match="other: no place free among 1"),
        actions.slot_nowait(Trajectory("other")),
    ):
        pass
    leave.set()
    await asyncio.gather(holder, waiter)
    with actions.slot_nowait(Trajectory("now")):
        assert actions.statistics().running == 1


async def _hold(actions: ActionScheduler, label: str, leave: asyncio.Event) -> None:
    async with actions.slot(Trajectory(label), server="sqlite"):
        await leave.wait()


def test_threads_share_the_limit_and_the_order_with_coroutines() -> None:
    actions = ActionScheduler(3)
    peak, lock = Peak(), threading.Lock()

    def in_thread(n: int) -> None:
        with actions.slot_sync(Trajectory(f"thread-{n}")):
            with lock:
                peak.__enter__()
            time.sleep(0.002)
            with lock:
                peak.__exit__()

    async def in_loop(n: int) -> None:
        async with actions.slot(Trajectory(f"task-{n}")):
            with lock:
                peak.__enter__()
            await asyncio.sleep(0.002)
            with lock:
                peak.__exit__()

    with ThreadPoolExecutor(12) as pool:
        futures = [pool.submit(in_thread, n) for n in range(60)]
        asyncio.run(together(60, in_loop))
        for future in futures:
            future.result(timeout=30)
    assert (peak.most, peak.total) == (3, 120)
    assert actions.statistics().running == 0


def test_a_thread_has_a_queue_deadline_and_loses_an_overrun_slot() -> None:
    actions = ActionScheduler(1, grace_s=0.05)
    with pytest.raises(JobAbandoned):
        _overrun(actions)
    assert actions.abandoned[0].label == "deaf"
    assert actions.statistics().running == 0


def _overrun(actions: ActionScheduler) -> None:
    with (
        actions.slot_sync(Trajectory("deaf"), run_timeout_s=0.05),
        ThreadPoolExecutor(1) as pool,
    ):
        # Another thread waits in vain at first, then gets the abandoned slot.
        with pytest.raises(QueueTimeout):
            pool.submit(_wait_briefly, actions, 0.01).result()
        pool.submit(_wait_briefly, actions, 10.0).result()


def _wait_briefly(actions: ActionScheduler, limit_s: float) -> None:
    with actions.slot_sync(Trajectory("waiter"), queue_timeout_s=limit_s):
        pass


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5])
def test_a_capacity_below_one_is_refused(capacity: Any) -> None:
    with pytest.raises(ValueError, match="capacity must be a whole number >= 1"):
        ActionScheduler(capacity)
    with pytest.raises(ValueError, match="capacity must be a whole number >= 1"):
        AdmissionGate(3).capacity = capacity


def test_a_bad_server_limit_names_the_server() -> None:
    with pytest.raises(ValueError, match="server sqlite: rate_per_s must be > 0"):
        ActionScheduler(1, servers={"sqlite": ServerLimit(rate_per_s=0.0)})


def test_one_admission_limit_spans_all_groups() -> None:
    clock, active = VirtualClock(), Peak()

    async def main() -> None:
        admission = AdmissionGate(10, clock=clock)

        async def sample(n: int) -> None:
            async with admission.admit(f"s{n}"):
                with active:
                    await clock.sleep(1.0)

        async with asyncio.TaskGroup() as groups:
            groups.create_task(together(20, sample))
            groups.create_task(together(20, sample))

    clock.run(main())
    assert (active.most, active.total) == (10, 40)
