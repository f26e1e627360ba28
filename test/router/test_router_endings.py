"""Every way a request can end gives its count back once, and never twice."""

from __future__ import annotations

import asyncio

import pytest
from router_harness import Seen, StubWorker, Wire, bench, until

from sgl_router import upstream
from sgl_router.config import HealthSettings
from sgl_router.upstream import Backend


async def hold(seen: Seen, wire: Wire) -> None:
    """Answer nothing until the gateway leaves."""
    await seen.gone.wait()


async def stream_and_hold(seen: Seen, wire: Wire) -> None:
    await wire.start_chunked()
    await wire.chunk(b"data: 1\n\n")
    await seen.gone.wait()


async def test_count_is_taken_at_selection_and_given_back_at_the_last_byte():
    release = asyncio.Event()

    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.start_chunked()
        await release.wait()
        await wire.end_chunked()

    async with bench(1) as made:
        made.workers[0].answer = answer
        client = await made.client()
        await client.post()
        await client.head()
        assert made.loads == [1]
        release.set()
        await made.settled()
        assert made.loads == [0]


async def test_client_leaves_before_the_answer():
    async with bench(1) as made:
        made.workers[0].answer = hold
        (client,) = await made.hold("a")
        client.leave()
        await made.settled()
        await asyncio.wait_for(made.workers[0].seen[0].gone.wait(), 1)


async def test_client_leaves_mid_stream():
    async with bench(1) as made:
        made.workers[0].answer = stream_and_hold
        (client,) = await made.hold("a")
        await client.head()
        client.leave()
        await made.settled()
        await asyncio.wait_for(made.workers[0].seen[0].gone.wait(), 1)


async def test_client_leaves_mid_body():
    async with bench(1) as made:
        client = await made.client()
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 9\r\n\r\n12"
        )
        await until(lambda: made.loads == [1])
        client.leave()
        await made.settled()


async def test_client_half_closes_which_counts_as_leaving():
    async with bench(1) as made:
        made.workers[0].answer = hold
        (client,) = await made.hold("a")
        client.writer.write_eof()
        await made.settled()


async def test_worker_dies_before_the_head_and_nobody_else_is_there():
    async def die(seen: Seen, wire: Wire) -> None:
        wire.cut()

    async with bench(1) as made:
        made.workers[0].answer = die
        reply = await made.ask()
        assert reply.status == 502
        assert made.workers[0].url in reply.json["error"]["message"]
        assert len(made.workers[0].seen) == 1
        await made.settled()


async def test_worker_dies_mid_answer_and_the_client_sees_it_cut():
    async def die(seen: Seen, wire: Wire) -> None:
        await wire.start_chunked()
        await wire.chunk(b"x" * 10)
        await asyncio.sleep(0.01)
        wire.cut()

    async with bench(2) as made:
        for worker in made.workers:
            worker.answer = die
        client = await made.client()
        await client.post()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.reply()
        await made.settled()
        assert sum(len(worker.seen) for worker in made.workers) == 1


async def test_worker_closes_early_inside_a_length():
    async def short(seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        wire.writer.close()

    async with bench(1) as made:
        made.workers[0].answer = short
        client = await made.client()
        await client.post()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.reply()
        await made.settled()


async def test_request_timeout_before_the_head_is_504():
    async with bench(1, request_timeout_s=0.15) as made:
        made.workers[0].answer = hold
        reply = await made.ask()
        assert reply.status == 504
        await made.settled()


async def test_request_timeout_mid_stream_cuts_the_answer():
    async with bench(1, request_timeout_s=0.15) as made:
        made.workers[0].answer = stream_and_hold
        client = await made.client()
        await client.post()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.reply()
        await made.settled()


async def test_client_that_stops_sending_its_body_gets_408():
    async with bench(1, body_stall_timeout_s=0.15) as made:
        client = await made.client()
        await client.send(
            b"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 9\r\n\r\n12"
        )
        assert (await client.reply()).status == 408
        await made.settled()


async def test_client_that_stops_reading_is_cut_and_memory_stays_bounded():
    sent = 0

    async def flood(seen: Seen, wire: Wire) -> None:
        nonlocal sent
        await wire.start_chunked()
        while not seen.gone.is_set():
            await wire.chunk(b"x" * 65536)
            sent += 65536

    async with bench(1, body_stall_timeout_s=0.3) as made:
        made.workers[0].answer = flood
        client = await made.client()
        client.writer.transport.pause_reading()
        await client.post()
        await made.settled()
        assert sent < 32 * 2**20


async def test_worker_that_stops_reading_pauses_the_client():
    """A body far larger than the buffers arrives whole once the worker reads on."""
    go = asyncio.Event()

    class Slow(StubWorker):
        async def _one(self, reader, writer):
            reader._transport.pause_reading()
            await go.wait()
            reader._transport.resume_reading()
            return await super()._one(reader, writer)

    slow = Slow()
    await slow.start()
    async with bench([slow], health=HealthSettings(disabled=True)) as made:
        body = b"y" * (24 * 2**20)
        client = await made.client()
        sending = asyncio.create_task(client.post(body))
        await asyncio.sleep(0.3)
        held = sum(exchange._held_bytes for exchange in made.gateway.exchanges)
        assert held < 4 * 2**20
        assert not sending.done()
        go.set()
        await sending
        reply = await client.reply()
        assert len(reply.body) == len(body)


@pytest.mark.skipif(
    not upstream.__file__.endswith(".py"), reason="a compiled build takes no patches"
)
async def test_client_leaves_while_the_worker_is_being_connected(monkeypatch):
    """The connection that comes up later goes to the pool, the count is back at once."""
    go = asyncio.Event()
    opened = Backend.open

    async def slowly(self):
        await go.wait()
        return await opened(self)

    monkeypatch.setattr(Backend, "open", slowly)
    async with bench(1) as made:
        client = await made.client()
        await client.post()
        await until(lambda: made.loads == [1])
        client.leave()
        await until(lambda: made.loads == [0])
        go.set()
        (registered,) = made.gateway.pool
        await until(lambda: registered.backend.idle == 1)
        assert registered.backend.connections == 1
        assert (await made.ask(b"x")).body == b"x"
        assert registered.backend.connections == 1


async def test_client_that_pipelines_is_still_seen_to_leave():
    async with bench(1) as made:
        made.workers[0].answer = hold
        client = await made.client()
        await client.post()
        await client.post()
        await until(lambda: made.loads == [1])
        client.leave()
        await made.settled()


async def test_probes_never_touch_counts():
    async with bench(1) as made:
        worker = made.workers[0]
        worker.answer = hold
        clients = await made.hold("a", 10)
        assert made.gateway.prober is not None
        (registered,) = made.gateway.pool
        for _ in range(3):
            assert await made.gateway.prober.probe(registered) is None
        assert made.loads == [10]
        for client in clients:
            client.leave()
        await made.settled()


async def test_removed_and_added_again_with_requests_open():
    """Counts belong to one registration: no negative value, no borrowed load."""
    async with bench(2) as made:
        worker = made.workers[0]
        worker.answer = hold
        old = await made.hold(made.label_at(0), 2)
        pool = made.gateway.pool
        first = pool.by_url[worker.url]
        pool.remove(first)
        made.gateway.add_worker(worker.url)
        await until(lambda: worker.url in pool.loads)
        second = pool.by_url[worker.url]
        assert (first.in_flight, second.in_flight) == (2, 0)
        new = await made.hold(made.label_at(1))
        assert second.in_flight == 1
        for client in old:
            client.leave()
        await until(lambda: first.in_flight == 0)
        assert second.in_flight == 1
        assert first not in list(pool)
        new[0].leave()
        await made.settled()


async def test_graceful_shutdown_lets_requests_end():
    release = asyncio.Event()

    async def answer(seen: Seen, wire: Wire) -> None:
        await release.wait()
        await wire.respond(b"done")

    async with bench(1, shutdown_grace_s=5.0) as made:
        made.workers[0].answer = answer
        (client,) = await made.hold("a")
        idle = await made.client()
        asyncio.get_running_loop().call_later(0.1, release.set)
        reading = asyncio.create_task(client.reply())
    reply = await reading
    assert reply.body == b"done"
    assert await idle.closed() == b""
