"""The same harness with the semaphore replaced: deep chains go first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from sglang_agent import ActionScheduler, Trajectory

Ask = Callable[[str, int], Awaitable[bool]]  # one turn; False: that was the answer
Act = Callable[[str, int], Awaitable[None]]  # one environment job


async def run_batch(names: list[str], ask: Ask, act: Act) -> None:
    slots = ActionScheduler(capacity=3, policy="caas")
    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(run_sample(name, ask, act, slots))


async def run_sample(name: str, ask: Ask, act: Act, slots: ActionScheduler) -> None:
    trajectory = Trajectory(label=name)
    turn, started_s = 1, time.monotonic()
    while await ask(name, turn):
        trajectory.complete_turn(time.monotonic() - started_s)
        async with slots.slot(trajectory):
            await act(name, turn)
        turn, started_s = turn + 1, time.monotonic()
