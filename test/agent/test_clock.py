"""Virtual time: it moves only when nothing can run, and ties are decided."""

from __future__ import annotations

import asyncio
import time

import pytest

from sglang_agent.clock import RealClock, VirtualClock, VirtualDeadlock


def test_sleeps_take_no_real_time_and_fire_in_order() -> None:
    clock = VirtualClock()
    log: list[tuple[float, str]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        log.append((clock.now(), name))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for name, seconds in [("a", 3600.0), ("b", 1.0), ("c", 1.0), ("d", 0.0)]:
                group.create_task(sleeper(name, seconds))

    before = time.monotonic()
    clock.run(main())
    assert log == [(0.0, "d"), (1.0, "b"), (1.0, "c"), (3600.0, "a")]
    assert time.monotonic() - before < 5


def test_timeout_ends_at_its_exact_time() -> None:
    clock = VirtualClock()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with clock.timeout(2.5):
                await clock.sleep(10)
        assert clock.now() == 2.5

    clock.run(main())


def test_time_stands_still_while_a_thread_works() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(clock.sleep(5))
            await asyncio.to_thread(time.sleep, 0.02)
            assert clock.now() == 0.0

    clock.run(main())
    assert clock.now() == 5.0


def test_nothing_left_to_happen_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlock, match="nothing is left"):
        VirtualClock().run(main())


def test_a_clock_refuses_another_loop() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="only inside its own run"):
            await VirtualClock().sleep(1)

    asyncio.run(main())


class Server:
    """A source that answers each request after a fixed time, one at a time."""

    def __init__(self, clock: VirtualClock, service_s: float) -> None:
        self.clock = clock
        self.service_s = service_s
        self.queue: list[tuple[float, asyncio.Future[float]]] = []
        self.horizons: list[float] = []
        self.free_s = 0.0

    async def ask(self) -> float:
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.free_s = max(self.free_s, self.clock.now()) + self.service_s
        self.queue.append((self.free_s, future))
        return await future

    def next_event_s(self) -> float | None:
        return self.queue[0][0] if self.queue else None

    def advance(self, horizon_s: float) -> float:
        self.horizons.append(horizon_s)
        end_s, future = self.queue.pop(0)
        assert end_s <= horizon_s
        future.set_result(end_s)
        return end_s


def test_sources_advance_in_lockstep_with_timers() -> None:
    clock = VirtualClock()
    fast, slow = Server(clock, 1.0), Server(clock, 2.0)
    clock.add_source(slow)
    clock.add_source(fast)
    log: list[tuple[float, str]] = []

    async def client(server: Server, name: str, times: int) -> None:
        for _ in range(times):
            assert await server.ask() == clock.now()
            log.append((clock.now(), name))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(client(slow, "slow", 2))
            group.create_task(client(fast, "fast", 3))
            await clock.sleep(1.5)
            log.append((clock.now(), "timer"))

    clock.run(main())
    # At 2.0 both deliver: the source that was added first goes first.
    assert log == [
        (1.0, "fast"),
        (1.5, "timer"),
        (2.0, "slow"),
        (2.0, "fast"),
        (3.0, "fast"),
        (4.0, "slow"),
    ]
    # Never told to run past the next timer or the other source's next event.
    assert fast.horizons == [1.5, 4.0, 4.0]


def test_one_program_gives_one_log() -> None:
    def run() -> list[tuple[float, int]]:
        clock = VirtualClock()
        log: list[tuple[float, int]] = []

        async def worker(n: int) -> None:
            for step in range(20):
                await clock.sleep((n * 7 + step * 3) % 5)
                log.append((clock.now(), n))

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                for n in range(20):
                    group.create_task(worker(n))

        clock.run(main())
        return log

    assert run() == run()


async def test_real_clock_is_monotonic_and_limits() -> None:
    clock = RealClock()
    before = clock.now()
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.001):
            await clock.sleep(5)
    assert 0.001 <= clock.now() - before < 1
