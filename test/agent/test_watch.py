"""Early signs: a blocked loop, a batch that stands still; and an honest ETA."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from rich.console import Console

from sglang_agent import ActionScheduler, AdmissionGate, VirtualClock
from sglang_agent.progress import Facts, LiveView, PlainView, clock_text, make_view
from sglang_agent.state import BatchState, Stage
from sglang_agent.watch import LoopWatch, StallWatch


async def test_a_blocked_loop_is_told_while_it_is_blocked() -> None:
    warned: list[tuple[float, str]] = []
    start_s = time.monotonic()

    def warn(text: str) -> None:
        warned.append((time.monotonic() - start_s, text))
        assert threading.current_thread() is not threading.main_thread()

    async with LoopWatch(warn, warn_s=0.1, interval_s=0.02) as watch:
        await asyncio.sleep(0.05)
        time.sleep(0.5)  # noqa: ASYNC251  (the blocking that is to be seen)
        worst_s = watch.lag_s()
        await asyncio.sleep(0.1)
        assert watch.lag_s() < worst_s
    at_s, text = warned[0]
    assert at_s < 0.5
    assert "the event loop has been blocked for 0." in text
    assert 0.3 < watch.worst_s < 5
    assert len(warned) <= 4  # doubling, no flood


class World:
    def __init__(self, total: int, restored: int = 0) -> None:
        self.clock = VirtualClock()
        self.state = BatchState(total, restored, self.clock)
        self.admission = AdmissionGate(2, clock=self.clock)
        self.actions = ActionScheduler(2, clock=self.clock)
        self.facts = Facts(self.state, self.admission, self.actions, lambda: 0.002)


def test_a_stalled_batch_names_the_samples_and_the_pause() -> None:
    world = World(10)
    warned: list[tuple[float, str]] = []

    def warn(text: str) -> None:
        warned.append((world.clock.now(), text))

    async def main() -> None:
        watch = StallWatch(world.state, world.admission, world.actions, warn, 60.0)
        task = asyncio.create_task(watch.run())
        for n in range(3):
            world.state.move(f"s{n}", f"sample-{n}", Stage.QUEUED)
        world.actions.paused = True
        await world.clock.sleep(200.0)
        world.actions.paused = False
        for n in range(3):
            world.state.finish(f"s{n}", "completed")
        await world.clock.sleep(50.0)
        task.cancel()

    world.clock.run(main())
    assert [round(at_s) for at_s, _ in warned] == [60, 120]
    text = warned[0][1]
    for n in range(3):
        assert f"sample-{n} (queued)" in text
    assert "paused: environment jobs" in text


def test_the_eta_counts_only_what_this_attempt_did() -> None:
    world = World(total=1351, restored=130)

    async def main() -> None:
        assert world.facts.eta() == "ETA unknown"
        world.state.move("s", "s", Stage.INFERENCE)
        await world.clock.sleep(24.0)
        world.state.finish("s", "completed")
        eta_s = world.state.eta_s()
        assert eta_s is not None
        assert eta_s > 7 * 3600

    world.clock.run(main())


def test_views_show_limits_servers_and_who_holds_the_batch() -> None:
    world = World(total=10, restored=2)

    async def main() -> None:
        world.state.move("a", "task-a", Stage.INFERENCE)
        world.state.move("b", "task-b", Stage.QUEUED)
        await world.clock.sleep(90.0)
        world.state.move("a", "task-a", Stage.ENVIRONMENT)
        world.state.finish("b", "environment")

    world.clock.run(main())
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(LiveView(world.facts, console).render())
    text = capture.get()
    assert "3/10 done, 2 from before, 1 failed" in text
    heads = [line.split(" ")[0] for line in text.splitlines()[1:]]
    assert heads[:5] == ["samples", "inference", "environment", "time", "longest"]
    assert "task-a: environment for 0.0 s after 1 turns" in text
    line = PlainView(world.facts, console).status()
    assert line.startswith("0:01:30: 3/10 done")
    assert "0 running (CE 2), 0 waiting" in line
    assert "loop lag 2 ms" in line


def test_plain_lines_when_not_a_terminal() -> None:
    world = World(1)
    quiet = Console(force_terminal=False)
    assert isinstance(make_view(world.facts, quiet, plain=False), PlainView)
    loud = Console(force_terminal=True)
    assert isinstance(make_view(world.facts, loud, plain=False), LiveView)
    assert isinstance(make_view(world.facts, loud, plain=True), PlainView)


@pytest.mark.parametrize(("s", "text"), [(0, "0:00:00"), (3725.4, "1:02:05")])
def test_durations(s: float, text: str) -> None:
    assert clock_text(s) == text
