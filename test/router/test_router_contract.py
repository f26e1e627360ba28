"""What any correct proxy does: held by the gateway and by a plain oracle alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from router_harness import Bench, RawClient, Seen, StubWorker, Wire, bench
from router_oracle import oracle


class Proxied:
    """One worker behind one kind of proxy."""

    def __init__(self, worker: StubWorker, port: int) -> None:
        self.worker = worker
        self._port = port

    async def client(self) -> RawClient:
        return RawClient(
            *await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        )


@contextlib.asynccontextmanager
async def through_gateway() -> AsyncIterator[Proxied]:
    made: Bench
    async with bench(1) as made:
        yield Proxied(made.workers[0], made.port)
        await made.settled()


@contextlib.asynccontextmanager
async def through_oracle() -> AsyncIterator[Proxied]:
    worker = StubWorker()
    await worker.start()
    try:
        async with oracle(worker.url) as port:
            yield Proxied(worker, port)
    finally:
        await worker.stop()
        await asyncio.sleep(0.001)


@pytest.fixture(params=[through_gateway, through_oracle], ids=["gateway", "oracle"])
def proxied(request):
    return request.param


async def test_statuses_bodies_and_headers_come_through(proxied):
    async with proxied() as made:
        client = await made.client()
        for status in (200, 201, 400, 404, 422, 500):

            async def answer(seen: Seen, wire: Wire, status: int = status) -> None:
                await wire.respond(b"<%b>" % seen.body, status, b"X-Worker: kept")

            made.worker.answer = answer
            await client.post(b"%d" % status, "X-Client: kept")
            reply = await client.reply()
            assert (reply.status, reply.body) == (status, b"<%d>" % status)
            assert reply.headers["x-worker"] == "kept"
            assert made.worker.seen[-1].header("x-client") == "kept"
        client.leave()


async def test_method_and_query_come_through(proxied):
    async with proxied() as made:
        client = await made.client()
        for method in ("GET", "DELETE", "PUT", "PATCH"):
            await client.post(b"b", path="/v1/things/%7E1?x=%20y&z", method=method)
            await client.reply()
            seen = made.worker.seen[-1]
            assert (seen.method, seen.target) == (method, "/v1/things/%7E1?x=%20y&z")
        client.leave()


@pytest.mark.parametrize("size", [0, 1, 100_000, 2_000_000])
async def test_bodies_of_every_size(proxied, size):
    body = bytes(i % 251 for i in range(1000)) * (size // 1000) + b"x" * (size % 1000)
    async with proxied() as made:
        client = await made.client()
        await client.post(body)
        assert (await client.reply()).body == body
        assert made.worker.seen[0].body == body
        client.leave()


async def test_chunked_request_body(proxied):
    async with proxied() as made:
        client = await made.client()
        await client.send(
            b"POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\n5;ext=1\r\ndefgh\r\n0\r\n\r\n"
        )
        assert (await client.reply()).body == b"abcdefgh"
        client.leave()


async def test_events_arrive_while_the_answer_goes_on(proxied):
    step = asyncio.Event()

    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.start_chunked()
        for i in range(5):
            await wire.chunk(b"data: %d\n\n" % i)
            await step.wait()
            step.clear()
        await wire.end_chunked()

    async with proxied() as made:
        made.worker.answer = answer
        client = await made.client()
        await client.post()
        reply = await client.head()
        assert reply.headers["content-type"] == "text/event-stream"
        for i in range(5):
            event = await asyncio.wait_for(client.reader.readuntil(b"\n\n"), 2)
            assert event.endswith(b"data: %d\n\n" % i)
            step.set()
        await asyncio.wait_for(client.reader.readuntil(b"0\r\n\r\n"), 2)
        client.leave()


@pytest.mark.parametrize("streaming", [False, True])
async def test_worker_is_let_go_when_the_client_leaves(proxied, streaming):
    async def answer(seen: Seen, wire: Wire) -> None:
        if streaming:
            await wire.start_chunked()
            await wire.chunk(b"data: 1\n\n")
        await seen.gone.wait()

    async with proxied() as made:
        made.worker.answer = answer
        client = await made.client()
        await client.post()
        if streaming:
            await client.head()
        while not made.worker.seen:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        client.leave()
        await asyncio.wait_for(made.worker.seen[0].gone.wait(), 2)


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body_keep_the_connection(proxied, status):
    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 %d X\r\n\r\n" % status)

    async with proxied() as made:
        made.worker.answer = answer
        client = await made.client()
        for _ in range(2):
            await client.post()
            assert (await client.reply(bodyless=True)).status == status
        client.leave()


async def test_many_at_once_are_not_mixed_up(proxied):
    async with proxied() as made:

        async def one(i: int) -> None:
            client = await made.client()
            for turn in range(5):
                body = b"%d/%d" % (i, turn) * 50
                await client.post(body)
                assert (await client.reply()).body == body
            client.leave()

        await asyncio.gather(*(one(i) for i in range(40)))


async def test_two_hundred_streams_at_once_all_get_their_head(proxied):
    """A pool with a hidden cap would let the last ones wait for the first."""
    release = asyncio.Event()

    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.start_chunked()
        await release.wait()
        await wire.end_chunked()

    async with proxied() as made:
        made.worker.answer = answer
        clients = [await made.client() for _ in range(200)]
        for client in clients:
            await client.post()
        for client in clients:
            assert (await client.head()).status == 200
        release.set()
        for client in clients:
            await client.reader.readuntil(b"0\r\n\r\n")
            client.leave()
