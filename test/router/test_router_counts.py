"""Placement through the wire: what in-flight counts taken at selection lead to."""

from __future__ import annotations

import pytest
from router_harness import Seen, Wire, bench, until


async def hold(seen: Seen, wire: Wire) -> None:
    await seen.gone.wait()


@pytest.mark.parametrize(
    ("workers", "requests", "expected"),
    [(2, 20, [13, 7]), (4, 20, [7, 6, 6, 1]), (2, 4, [3, 1])],
)
async def test_held_open_requests_of_one_label(workers, requests, expected):
    async with bench(workers) as made:
        for worker in made.workers:
            worker.answer = hold
        clients = await made.hold(made.label_at(0), requests)
        assert sorted(made.loads, reverse=True) == expected
        assert sorted((w.running for w in made.workers), reverse=True) == expected
        for client in clients:
            client.leave()
        await made.settled()


async def test_slow_heads_do_not_look_idle():
    """Eight keys of one home while no answer has begun: nobody gets more than three."""
    async with bench(4) as made:
        for worker in made.workers:
            worker.answer = hold
        clients = []
        for i in range(8):
            client = await made.client()
            await client.post(b"{}", f"x-smg-routing-key: {made.label_at(0, i * 20)}")
            clients.append(client)
        await until(lambda: sum(made.loads) == 8)
        assert max(made.loads) <= 3
        for client in clients:
            client.leave()
        await made.settled()


async def test_turns_of_a_trajectory_stay_together_under_light_load():
    async with bench(4) as made:
        client = await made.client()
        last: dict[int, str | None] = {}
        stayed = 0
        for turn in range(10):
            for i in range(50):
                await client.post(b"{}", f"x-smg-routing-key: s{i}")
                worker = (await client.reply()).worker
                stayed += turn > 0 and last[i] == worker
                last[i] = worker
        assert stayed >= 0.95 * 50 * 9
        assert len(set(last.values())) == 4


async def test_gap_option_keeps_two_requests_at_home():
    options = {"load_factor": 1.25, "balance_abs_threshold": 2.0}
    async with bench(4, policy_options=options) as made:
        for worker in made.workers:
            worker.answer = hold
        clients = await made.hold(made.label_at(0), 2)
        assert made.loads == [2, 0, 0, 0]
        for client in clients:
            client.leave()
        await made.settled()
