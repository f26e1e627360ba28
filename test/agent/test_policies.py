"""The order of waiting jobs, by policy."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_agent import ActionScheduler, Trajectory, VirtualClock, policies

# label: (slot-request time in s, completed turns, mean turn in s), in entry order
JOBS = {
    "A": (1.0, 2, 3.0),
    "B": (5.0, 9, 4.0),
    "C": (29.9, 9, 2.2),
    "D": (31.0, 30, 1.0),
    "E": (29.9, 9, 2.9),
}


def dispatch_order(policy: str) -> list[str]:
    """Queue JOBS at their times while the only slot is taken, then let them run."""
    clock = VirtualClock()
    order: list[str] = []

    async def job(actions: ActionScheduler, label: str) -> None:
        requested_s, turns, mean_s = JOBS[label]
        trajectory = Trajectory(label)
        for _ in range(turns):
            trajectory.complete_turn(mean_s)
        await clock.sleep(requested_s)
        async with actions.slot(trajectory):
            order.append(label)

    async def main() -> None:
        actions = ActionScheduler(
            capacity=1, policy=policy, band_s=30, duration_bucket_s=1, clock=clock
        )
        async with asyncio.TaskGroup() as group:
            # Started outside the slot: a job's own children would borrow it.
            for label in JOBS:
                group.create_task(job(actions, label))
            async with actions.slot(Trajectory("first")):
                await clock.sleep(40)

    clock.run(main())
    return order


def test_caas_bands_then_depth_then_short_turns_then_entry() -> None:
    # C and E share a band, a depth and a bucket: 2.2 and 2.9 both floor to 2.
    assert dispatch_order("caas") == ["C", "E", "B", "A", "D"]


def test_fcfs_is_the_order_of_entry() -> None:
    assert dispatch_order("fcfs") == ["A", "B", "C", "E", "D"]


def test_depth_ignores_bands() -> None:
    assert dispatch_order("depth") == ["D", "B", "C", "E", "A"]


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.floats(0, 100), st.integers(0, 20), st.floats(0, 9)),
        min_size=2,
        max_size=30,
    ),
    capacity=st.integers(1, 3),
)
def test_no_job_overtakes_one_of_an_earlier_band(
    jobs: list[tuple[float, int, float]], capacity: int
) -> None:
    clock = VirtualClock()
    waiting: dict[int, int] = {}

    async def job(actions: ActionScheduler, n: int) -> None:
        requested_s, turns, mean_s = jobs[n]
        trajectory = Trajectory(str(n))
        for _ in range(turns):
            trajectory.complete_turn(mean_s)
        await clock.sleep(requested_s)
        waiting[n] = band = int(clock.now() // 10)
        async with actions.slot(trajectory):
            del waiting[n]
            assert all(band <= other for other in waiting.values())
            await clock.sleep(7.0)

    async def main() -> None:
        actions = ActionScheduler(capacity, "caas", band_s=10, clock=clock)
        async with asyncio.TaskGroup() as group:
            for n in range(len(jobs)):
                group.create_task(job(actions, n))

    clock.run(main())


def test_unknown_policy_names_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match=r"one of caas, depth, fcfs, got 'lifo'"):
        policies.create("lifo", band_s=30, duration_bucket_s=1)


@pytest.mark.parametrize("field", ["band_s", "duration_bucket_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_hyperparameters_must_be_positive(field: str, value: float) -> None:
    values = {"band_s": 30.0, "duration_bucket_s": 1.0} | {field: value}
    with pytest.raises(ValueError, match=field):
        policies.create("caas", **values)


def test_trajectory_refuses_a_negative_duration() -> None:
    with pytest.raises(ValueError, match="duration_s"):
        Trajectory("t").complete_turn(-0.1)
