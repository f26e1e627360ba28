"""A harness as many have it: one semaphore in front of the environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Ask = Callable[[str, int], Awaitable[bool]]  # one turn; False: that was the answer
Act = Callable[[str, int], Awaitable[None]]  # one environment job


async def run_batch(names: list[str], ask: Ask, act: Act) -> None:
    slots = asyncio.Semaphore(3)
    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(run_sample(name, ask, act, slots))


async def run_sample(name: str, ask: Ask, act: Act, slots: asyncio.Semaphore) -> None:
    turn = 1
    while await ask(name, turn):
        async with slots:
            await act(name, turn)
        turn += 1
