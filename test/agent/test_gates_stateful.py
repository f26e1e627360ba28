"""Both gates against a model: limit, order, no loss, no second start."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_agent import (
    ActionScheduler,
    AdmissionGate,
    ServerLimit,
    Trajectory,
    VirtualClock,
    policies,
)
from sglang_agent.policies import QueuedJob

BAND_S, BUCKET_S = 10.0, 1.0
CAPPED = "capped"
JobKey = tuple[tuple[float, ...], int]


class Waiting(NamedTuple):
    """A waiting job of the model; sorts in the order of dispatch."""

    key: tuple[float, ...]
    entry: int
    server: str | None


class GateMachine(RuleBasedStateMachine):
    """Jobs come, end, are cancelled; limits move; the model says who runs."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.loop = self.clock.new_loop()
        self.capacity = 2
        self.paused = False
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.leave: dict[int, asyncio.Event] = {}
        self.started: list[int] = []
        self.inside: set[int] = set()
        self.expected_started: list[int] = []
        self.running: dict[int, Waiting] = {}
        self.waiting: list[Waiting] = []
        self.entries = 0
        self.gate = self.loop.run_until_complete(self.make_gate())

    async def make_gate(self) -> ActionScheduler | AdmissionGate:
        return AdmissionGate(self.capacity, clock=self.clock)

    def key(self, trajectory: Trajectory) -> tuple[float, ...]:
        return ()

    def cap(self, server: str | None) -> float:
        return float("inf")

    def enter(self, trajectory: Trajectory, server: str | None) -> object:
        assert isinstance(self.gate, AdmissionGate)
        return self.gate.admit(trajectory.label)

    async def job(self, n: int, trajectory: Trajectory, server: str | None) -> None:
        async with self.enter(trajectory, server):  # type: ignore[attr-defined]
            self.started.append(n)
            self.inside.add(n)
            # Checked at the very moment of a start, not only between rules.
            assert len(self.inside) <= self.gate.capacity
            try:
                await self.leave[n].wait()
            finally:
                self.inside.remove(n)

    def settle(self) -> None:
        async def some_rounds() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(some_rounds())

    def dispatch(self) -> None:
        """Do in the model what the gate should have done."""
        while len(self.running) < self.capacity and not self.paused:
            free = [w for w in sorted(self.waiting) if self.has_room(w.server)]
            if not free:
                return
            self.waiting.remove(free[0])
            self.running[free[0].entry] = free[0]
            self.expected_started.append(free[0].entry)

    def has_room(self, server: str | None) -> bool:
        used = sum(1 for w in self.running.values() if w.server == server)
        return used < self.cap(server)

    @rule(
        turns=st.integers(0, 3),
        mean_s=st.sampled_from([0.2, 0.9, 1.5]),
        server=st.sampled_from([None, "free", CAPPED]),
    )
    def come(self, turns: int, mean_s: float, server: str | None) -> None:
        n = self.entries
        self.entries += 1
        trajectory = Trajectory(f"t{n}")
        for _ in range(turns):
            trajectory.complete_turn(mean_s)
        self.leave[n] = asyncio.Event()
        self.waiting.append(Waiting(self.key(trajectory), n, server))
        self.tasks[n] = self.loop.create_task(self.job(n, trajectory, server))
        self.settle()
        self.dispatch()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        n = data.draw(st.sampled_from(sorted(self.running)))
        self.leave[n].set()
        self.settle()
        del self.running[n]
        self.dispatch()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel_running(self, data: st.DataObject) -> None:
        n = data.draw(st.sampled_from(sorted(self.running)))
        self.tasks[n].cancel()
        self.settle()
        del self.running[n]
        self.dispatch()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_waiting(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.waiting)))
        self.tasks[gone.entry].cancel()
        self.settle()
        self.waiting.remove(gone)
        self.dispatch()

    @precondition(lambda self: self.running and self.waiting)
    @rule(data=st.data())
    def cancel_at_hand_over(self, data: st.DataObject) -> None:
        """A job ends; whoever gets its place is cancelled before it wakes."""
        n = data.draw(st.sampled_from(sorted(self.running)))
        granted = self.loop.run_until_complete(self.end_and_cancel_next(n))
        self.settle()
        del self.running[n]
        # In the model: they got the place, then left it, in that order.
        while granted and len(self.running) < self.capacity and not self.paused:
            free = [w for w in sorted(self.waiting) if self.has_room(w.server)]
            if not free:
                break
            self.waiting.remove(free[0])
            if f"t{free[0].entry}" in granted:
                granted.remove(f"t{free[0].entry}")
                continue
            self.running[free[0].entry] = free[0]
            self.expected_started.append(free[0].entry)
        self.dispatch()

    async def end_and_cancel_next(self, n: int) -> set[str]:
        """Cancel in the very loop round in which the place was handed over."""
        before = set(self.gate_holders())
        self.leave[n].set()
        for _ in range(3):
            await asyncio.sleep(0)
            granted = set(self.gate_holders()) - before
            if granted:
                for label in granted:
                    self.tasks[int(label[1:])].cancel()
                return granted
        return set()

    def gate_holders(self) -> list[str]:
        return [holding.label for holding in self.gate.holders()]

    @rule(capacity=st.integers(1, 4))
    def resize(self, capacity: int) -> None:
        # Lowering must interrupt nobody, so the check inside jobs allows for it.
        self.capacity = capacity
        self.gate.capacity = capacity
        self.settle()
        self.dispatch()

    @rule()
    def pause_or_resume(self) -> None:
        self.paused = not self.paused
        self.gate.paused = self.paused
        self.settle()
        self.dispatch()

    @rule(seconds=st.sampled_from([0.5, 4.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @invariant()
    def the_gate_agrees(self) -> None:
        assert self.started == self.expected_started
        assert self.inside == set(self.running)
        statistics = self.gate.statistics()
        assert statistics.running == len(self.running)
        assert statistics.waiting == len(self.waiting)
        assert len(set(self.started)) == len(self.started)

    def teardown(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        if self.tasks:
            everything = asyncio.gather(*self.tasks.values(), return_exceptions=True)
            results = self.loop.run_until_complete(everything)
            failed = [r for r in results if isinstance(r, AssertionError)]
            assert not failed
        assert self.gate.statistics().running == 0
        assert self.gate.statistics().waiting == 0
        self.loop.close()


class ActionMachine(GateMachine):
    """The action scheduler: an order by key, and a server that has its own cap."""

    policy_name = "caas"

    async def make_gate(self) -> ActionScheduler | AdmissionGate:
        self.policy = policies.create(
            self.policy_name, band_s=BAND_S, duration_bucket_s=BUCKET_S
        )
        return ActionScheduler(
            self.capacity,
            self.policy_name,
            band_s=BAND_S,
            duration_bucket_s=BUCKET_S,
            servers={CAPPED: ServerLimit(concurrency=1)},
            clock=self.clock,
        )

    def key(self, trajectory: Trajectory) -> tuple[float, ...]:
        return self.policy.key(
            QueuedJob(self.clock.now(), trajectory.turns, trajectory.mean_turn_s)
        )

    def cap(self, server: str | None) -> float:
        return 1 if server == CAPPED else float("inf")

    def enter(self, trajectory: Trajectory, server: str | None) -> object:
        assert isinstance(self.gate, ActionScheduler)
        return self.gate.slot(trajectory, server=server)


class FirstComeMachine(ActionMachine):
    policy_name = "fcfs"


@pytest.mark.parametrize("machine", [GateMachine, ActionMachine, FirstComeMachine])
def test_gate_against_model(machine: type[GateMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=25, stateful_step_count=30, deadline=None),
    )
