"""Failures of a worker: who is asked next, with what, and what the counts say."""

from __future__ import annotations

import asyncio

import pytest
from router_harness import QUICK_HEALTH, Seen, StubWorker, Wire, bench, echo, until

from sgl_router.breaker import BreakerSettings


def answering(status: int, body: bytes = b"{}"):
    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.respond(body, status)

    return answer


async def cut(seen: Seen, wire: Wire) -> None:
    wire.cut()


async def test_refused_connection_goes_to_the_ring_successor_with_the_label():
    async with bench(3) as made:
        label = made.label_at(0)
        urls = list(made.gateway.pool.by_url)
        order = made.gateway.pool.policy._ring.order(label)
        await made.workers[0].stop()
        for _ in range(2):
            reply = await made.ask(b'{"a": 1}', f"x-smg-routing-key: {label}")
            assert (reply.status, reply.worker) == (200, order[1])
        successor = made.workers[urls.index(order[1])]
        assert [seen.label for seen in successor.seen] == [label, label]
        assert [seen.body for seen in successor.seen] == [b'{"a": 1}'] * 2
        assert made.loads == [0, 0, 0]
        assert made.gateway.pool.by_url[made.workers[0].url].errors["connect"] == 2
        await made.settled()


async def test_worker_that_dies_before_answering_is_replaced():
    async with bench(2) as made:
        made.workers[0].answer = cut
        label = made.label_at(0)
        reply = await made.ask(b"abc", f"x-smg-routing-key: {label}")
        assert (reply.status, reply.body) == (200, b"abc")
        assert [len(worker.seen) for worker in made.workers] == [1, 1]
        assert made.workers[1].seen[0].label == label
        await made.settled()


async def test_busy_is_not_broken():
    """429 is retried on the successor and never opens the circuit; 500 does."""
    breaker = BreakerSettings(failure_threshold=10)
    async with bench(2, breaker=breaker) as made:
        label = made.label_at(0)
        first = made.gateway.pool.by_url[made.workers[0].url]
        made.workers[0].answer = answering(429)
        for _ in range(20):
            reply = await made.ask(b"{}", f"x-smg-routing-key: {label}")
            assert (reply.status, reply.worker) == (200, made.workers[1].url)
        assert first.breaker.state(made.gateway.now_s()) == "closed"
        made.workers[0].answer = answering(500)
        for _ in range(20):
            await made.ask(b"{}", f"x-smg-routing-key: {label}")
        assert first.breaker.state(made.gateway.now_s()) == "open"
        assert len(made.workers[0].seen) == 20 + 10
        await made.settled()


async def test_last_answer_is_passed_on_when_nobody_is_left():
    async with bench(2) as made:
        for worker in made.workers:
            worker.answer = answering(429, b"busy")
        reply = await made.ask()
        assert (reply.status, reply.body) == (429, b"busy")
        assert [len(worker.seen) for worker in made.workers] == [1, 1]
        await made.settled()


async def test_open_circuit_takes_trial_requests_and_closes_again():
    breaker = BreakerSettings(failure_threshold=2, success_threshold=2, open_s=0.15)
    async with bench(1, breaker=breaker, retry_max_attempts=1) as made:
        worker = made.workers[0]
        worker.answer = answering(500)
        assert [(await made.ask()).status for _ in range(3)] == [500, 500, 503]
        worker.answer = echo
        await until(lambda: bool(made.gateway.pool.loads))
        (registered,) = made.gateway.pool
        assert registered.breaker.state(made.gateway.now_s()) == "half_open"
        assert [(await made.ask()).status for _ in range(2)] == [200, 200]
        assert registered.breaker.state(made.gateway.now_s()) == "closed"


async def test_no_worker_is_503_with_retry_after():
    stub = StubWorker()
    stub.healthy = False
    async with bench([stub]) as made:
        reply = await made.ask()
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        assert reply.headers["x-smg-error-code"] == "no_available_workers"
        await made.settled()


async def test_stale_pooled_connection_is_replaced_once():
    """The worker closes an idle connection just as a request is written to it."""

    async def answer_then_close(seen: Seen, wire: Wire) -> None:
        if len(made.workers[0].seen) == 2:
            wire.cut()  # the reused connection: no byte of an answer
        else:
            await echo(seen, wire)

    async with bench(1) as made:
        made.workers[0].answer = answer_then_close
        assert (await made.ask(b"one")).body == b"one"
        reply = await made.ask(b"two")
        assert (reply.status, reply.body) == (200, b"two")
        (registered,) = made.gateway.pool
        assert not registered.errors
        assert len(made.workers[0].seen) == 3
        await made.settled()


async def test_idle_connection_closed_by_the_worker_is_not_used():
    async def answer_once(seen: Seen, wire: Wire) -> None:
        await echo(seen, wire)
        wire.writer.close()

    async with bench(1) as made:
        made.workers[0].answer = answer_once
        (registered,) = made.gateway.pool
        for _ in range(3):
            assert (await made.ask(b"x")).status == 200
            await until(lambda: registered.backend.connections == 0)
            assert registered.backend.idle == 0
        assert len(made.workers[0].seen) == 3


async def test_body_over_the_cap_is_streamed_and_not_retried():
    async with bench(2, max_buffered_bytes=1000) as made:
        made.workers[0].answer = cut
        label = f"x-smg-routing-key: {made.label_at(0)}"
        assert (await made.ask(b"x" * 1001, label)).status == 502
        assert (await made.ask(b"x" * 1000, label)).status == 200
        await made.settled()


async def test_retries_can_be_switched_off():
    async with bench(2, retry_max_attempts=1) as made:
        for worker in made.workers:
            worker.answer = answering(500)
        assert (await made.ask()).status == 500
        assert sum(len(worker.seen) for worker in made.workers) == 1


async def test_answer_that_has_started_is_never_retried():
    async def broken(seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")
        wire.writer.close()

    async with bench(2) as made:
        for worker in made.workers:
            worker.answer = broken
        client = await made.client()
        await client.post()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.reply()
        assert sum(len(worker.seen) for worker in made.workers) == 1


async def test_bad_answers_of_a_worker_are_502():
    bad = [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\nx: y\r\n folded\r\nContent-Length: 0\r\n\r\n",
    ]
    async with bench(1, breaker=BreakerSettings(failure_threshold=0)) as made:
        for data in bad:

            async def answer(seen: Seen, wire: Wire, data: bytes = data) -> None:
                await wire.send(data)
                await seen.gone.wait()

            made.workers[0].answer = answer
            reply = await made.ask()
            assert reply.status == 502, data
        await made.settled()


async def test_unhealthy_worker_leaves_and_returns():
    health = QUICK_HEALTH.__class__(
        interval_s=0.02,
        startup_interval_s=0.02,
        failure_threshold=2,
        success_threshold=2,
    )
    async with bench(2, health=health) as made:
        made.workers[0].healthy = False
        await until(lambda: len(made.gateway.pool.loads) == 1)
        assert {(await made.ask()).worker for _ in range(4)} == {made.workers[1].url}
        made.workers[0].healthy = True
        await until(lambda: len(made.gateway.pool.loads) == 2)
