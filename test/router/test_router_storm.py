"""Ten thousand requests with everything going wrong at once: the counts stay right."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from router_harness import Bench, Seen, StubWorker, Wire, bench, until

from sgl_router.breaker import BreakerSettings
from sgl_router.config import HealthSettings

ALPHA = 1.25
HEALTH = HealthSettings(
    interval_s=0.05,
    startup_interval_s=0.02,
    failure_threshold=2,
    success_threshold=1,
)


def misbehave(draw: random.Random):
    """An answer that is good, slow, broken, or cut, by chance."""

    async def answer(seen: Seen, wire: Wire) -> None:
        kind = draw.random()
        if kind < 0.05:
            wire.cut()
        elif kind < 0.10:
            await wire.respond(b"busy", draw.choice([429, 500, 503]))
        elif kind < 0.15:
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort")
            wire.cut()
        elif kind < 0.18:
            await wire.send(b"not http\r\n\r\n")
            wire.cut()
        elif kind < 0.40:
            await wire.start_chunked()
            for _ in range(draw.randint(1, 5)):
                await wire.chunk(b"data: x\n\n")
                await asyncio.sleep(draw.random() * 0.01)
            await wire.end_chunked()
        else:
            await asyncio.sleep(draw.random() * 0.01)
            await wire.respond(b"fine")

    return answer


async def visit(made: Bench, draw: random.Random, requests: int) -> None:
    """One client that sends, leaves, stalls, or breaks off, again and again."""
    client = None
    for _ in range(requests):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            client = client or await made.client()
            body = b"x" * draw.choice([0, 10, 10_000])
            label = f"x-smg-routing-key: t{draw.randint(0, 30)}"
            headers = [label] if draw.random() < 0.9 else []
            if draw.random() < 0.05:
                await client.send(
                    b"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 9\r\n\r\nab"
                )
                client.leave()
                client = None
                continue
            await client.post(body, *headers)
            kind = draw.random()
            if kind < 0.10:
                await asyncio.sleep(draw.random() * 0.005)
                client.leave()
                client = None
            elif kind < 0.15:
                await client.head()
                client.leave()
                client = None
            else:
                reply = await client.reply()
                if reply.headers.get("connection") == "close":
                    client.leave()
                    client = None
            continue
        client = None
    if client is not None:
        client.leave()


async def upset(made: Bench, draw: random.Random, spare: list[StubWorker]) -> None:
    """Kill, revive, add, and remove workers for as long as the storm goes on."""
    pool = made.gateway.pool
    while True:
        await asyncio.sleep(0.03)
        action = draw.choice(["kill", "remove", "add", "sick"])
        stub = draw.choice(made.workers + spare)
        if action == "kill":
            await stub.stop()
            await asyncio.sleep(0.02)
            await stub.start()
        elif action == "sick":
            stub.healthy = not stub.healthy
        elif action == "add" and stub.url not in pool.by_url:
            made.gateway.add_worker(stub.url)
        elif action == "remove" and stub.url in pool.by_url and len(pool) > 1:
            pool.remove(pool.by_url[stub.url])


def check_every_selection(made: Bench) -> list[str]:
    """Wrap the policy so that each choice is held against equation 9."""
    pool = made.gateway.pool
    choose = pool.policy.choose
    wrong: list[str] = []

    def checked(label, loads, text=None):
        choice = choose(label, loads, text)
        bound = (sum(loads.values()) + 1) / len(loads) * ALPHA
        if min(loads.values()) < 0:
            wrong.append(f"negative: {loads}")
        for url, load in loads.items():
            if load != pool.by_url[url].in_flight:
                wrong.append(f"{url}: {load} is not its count")
        if loads[choice.worker] > bound:
            wrong.append(f"{loads[choice.worker]} is above {bound}: {choice}")
        return choice

    pool.policy.choose = checked
    return wrong


async def storm(requests: int, clients: int, seed: int) -> None:
    draw = random.Random(seed)
    spare = [StubWorker() for _ in range(2)]
    for stub in spare:
        await stub.start()
    settings = {
        "breaker": BreakerSettings(failure_threshold=5, open_s=0.05),
        "health": HEALTH,
        "policy_options": {"load_factor": ALPHA},
    }
    async with bench(4, **settings) as made:
        for stub in made.workers + spare:
            stub.answer = misbehave(draw)
        wrong = check_every_selection(made)
        upsetting = asyncio.create_task(upset(made, draw, spare))
        async with asyncio.TaskGroup() as visits:
            for _ in range(clients):
                visits.create_task(visit(made, draw, requests // clients))
        upsetting.cancel()
        await asyncio.gather(upsetting, return_exceptions=True)
        made.close()
        await until(lambda: not made.gateway.exchanges)
        assert wrong == []
        assert [worker.in_flight for worker in made.gateway.pool] == [0] * len(
            list(made.gateway.pool)
        )
        assert set(made.gateway.pool.loads.values()) <= {0}
        assert made.gateway.pool.draining == []
        assert made.gateway.admission.running == 0
        statuses = sum(
            sum(route.statuses.values())
            for route in made.gateway.counts.routes.values()
        )
        assert statuses >= requests // clients * clients * 0.9
    for stub in spare:
        await stub.stop()


@pytest.mark.parametrize("seed", [1, 2])
async def test_small_storm(seed):
    await storm(requests=400, clients=20, seed=seed)


@pytest.mark.slow
async def test_storm_of_ten_thousand_requests():
    await storm(requests=10_000, clients=100, seed=3)
