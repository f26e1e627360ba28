"""HTTP through the gateway: bodies byte for byte, every framing, nothing out of step."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_harness import Seen, Wire, bench, echo, until
from test_router_wire import REFUSED_CHUNKS, REFUSED_HEADS

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\n"


async def test_body_and_unknown_fields_arrive_byte_for_byte():
    body = b'{ "messages":[{"role":"user","unknown":1}],  "x_new": \xff\x00 ,"stream":false}'
    async with bench(1) as made:
        reply = await made.ask(
            body, "X-Custom: a", "traceparent: 00-1-2-3", "Cookie: c"
        )
        (seen,) = made.workers[0].seen
        assert (seen.body, reply.body) == (body, body)
        assert seen.header("x-custom") == "a"
        assert seen.header("traceparent") == "00-1-2-3"
        assert seen.header("cookie") == "c"
        assert seen.header("host") == made.workers[0].url.removeprefix("http://")
        assert seen.header("content-length") == str(len(body))


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_sizes_both_ways(size, chunked):
    body = bytes(range(256)) * (size // 256) + b"z" * (size % 256)

    async def answer(seen: Seen, wire: Wire) -> None:
        if not chunked:
            await wire.respond(seen.body)
            return
        await wire.start_chunked()
        for start in range(0, len(seen.body), 100_000):
            await wire.chunk(seen.body[start : start + 100_000])
        await wire.end_chunked()

    async with bench(1) as made:
        made.workers[0].answer = answer
        client = await made.client()
        if chunked:
            await client.send(CHAT + b"Transfer-Encoding: chunked\r\n\r\n")
            for start in range(0, size, 70_000):
                part = body[start : start + 70_000]
                await client.send(b"%x\r\n%b\r\n" % (len(part), part))
            await client.send(b"0\r\n\r\n")
        else:
            await client.post(body)
        reply = await client.reply()
        assert reply.body == body
        assert made.workers[0].seen[0].body == body


async def test_chunks_are_passed_on_as_they_come():
    step = asyncio.Event()

    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.start_chunked()
        for i in range(3):
            await wire.chunk(b"data: %d\n\n" % i)
            await step.wait()
            step.clear()
        await wire.end_chunked()

    async with bench(1) as made:
        made.workers[0].answer = answer
        client = await made.client()
        await client.post()
        await client.head()
        for i in range(3):
            line = await asyncio.wait_for(client.reader.readuntil(b"\n\n\r\n"), 1)
            assert line == b"9\r\ndata: %d\n\n\r\n" % i
            step.set()
        assert await client.reader.readuntil(b"0\r\n\r\n") == b"0\r\n\r\n"


async def test_connection_is_kept_and_reused_on_both_sides():
    async with bench(1) as made:
        before = made.workers[0].connections
        client = await made.client()
        for i in range(20):
            await client.post(b"%d" % i)
            assert (await client.reply()).body == b"%d" % i
        assert made.workers[0].connections == before + 1
        assert "connection" not in (await made.ask()).headers


async def test_connection_close_is_honoured():
    async with bench(1) as made:
        client = await made.client()
        await client.post(b"x", "Connection: close")
        assert (await client.reply()).headers["connection"] == "close"
        assert await client.closed() == b""


async def test_worker_that_closes_does_not_close_the_client():
    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.respond(b"x", 200, b"Connection: close")
        wire.writer.close()

    async with bench(1) as made:
        made.workers[0].answer = answer
        client = await made.client()
        for _ in range(3):
            await client.post()
            assert (await client.reply()).body == b"x"


async def test_answer_until_close():
    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        wire.writer.close()

    async with bench(1) as made:
        made.workers[0].answer = answer
        client = await made.client()
        await client.post()
        reply = await client.reply()
        assert (reply.headers["connection"], reply.body) == ("close", b"until the end")
        await made.settled()


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_that_have_no_body(status):
    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 %d X\r\nETag: e\r\n\r\n" % status)

    async with bench(1) as made:
        made.workers[0].answer = answer
        client = await made.client()
        for _ in range(2):
            await client.post()
            reply = await client.reply(bodyless=True)
            assert (reply.status, reply.headers["etag"]) == (status, "e")
            assert "content-length" not in reply.headers


async def test_head_request_keeps_the_length_and_sends_no_body():
    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")

    async with bench(1) as made:
        made.workers[0].answer = answer
        client = await made.client()
        for _ in range(2):
            await client.send(b"HEAD /v1/responses/1 HTTP/1.1\r\nHost: g\r\n\r\n")
            reply = await client.reply(bodyless=True)
            assert reply.headers["content-length"] == "5"


async def test_expect_continue_is_answered_by_the_gateway():
    async with bench(1) as made:
        client = await made.client()
        await client.send(CHAT + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n")
        assert (await client.head()).status == 100
        await client.send(b"body")
        assert (await client.reply()).body == b"body"
        assert made.workers[0].seen[0].header("expect") is None


async def test_interim_answers():
    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 100 Continue\r\n\r\n"
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        )
        await wire.respond(b"x")

    async with bench(1) as made:
        made.workers[0].answer = answer
        client = await made.client()
        await client.post()
        assert (await client.head()).status == 103
        assert (await client.reply()).body == b"x"


async def test_http_10_client_gets_plain_bytes():
    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.start_chunked()
        await wire.chunk(b"one")
        await wire.chunk(b"two")
        await wire.end_chunked()

    async with bench(1) as made:
        made.workers[0].answer = answer
        client = await made.client()
        await client.send(b"POST /generate HTTP/1.0\r\nContent-Length: 1\r\n\r\nx")
        reply = await client.reply()
        assert "transfer-encoding" not in reply.headers
        assert reply.body == b"onetwo"


async def test_http_10_keep_alive():
    async with bench(1) as made:
        client = await made.client()
        for _ in range(2):
            await client.send(
                b"POST /generate HTTP/1.0\r\nConnection: keep-alive\r\n"
                b"Content-Length: 1\r\n\r\nx"
            )
            assert (await client.reply()).headers["connection"] == "keep-alive"


async def test_pipelined_request_is_not_answered_and_the_connection_closes():
    async with bench(1) as made:
        client = await made.client()
        one = CHAT + b"Content-Length: 1\r\n\r\n"
        await client.send(one + b"a" + one + b"b")
        assert (await client.reply()).body == b"a"
        assert await client.closed() == b""
        assert [seen.body for seen in made.workers[0].seen] == [b"a"]
        await made.settled()


async def test_empty_lines_around_a_request_are_excused():
    async with bench(1) as made:
        client = await made.client()
        await client.send(b"\r\n" + CHAT + b"Content-Length: 1\r\n\r\na\r\n")
        assert (await client.reply()).body == b"a"
        await client.post(b"b")
        assert (await client.reply()).body == b"b"


async def test_head_may_arrive_byte_by_byte():
    async with bench(1) as made:
        client = await made.client()
        for byte in CHAT + b"Content-Length: 3\r\n\r\nabc":
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.reply()).body == b"abc"


async def test_early_answer_reaches_a_client_that_is_still_sending():
    async def refuse(seen: Seen, wire: Wire) -> None:
        await wire.respond(b"no", 413)

    async with bench(1, max_payload_bytes=1000) as made:
        made.workers[0].answer = refuse
        client = await made.client()
        await client.send(CHAT + b"Content-Length: 2000000\r\n\r\n" + b"x" * 500_000)
        reply = await client.reply()
        assert reply.status == 413
        assert reply.headers["connection"] == "close"
        client = await made.client()
        await client.send(CHAT + b"Transfer-Encoding: chunked\r\n\r\n")
        await client.send(b"fff\r\n" + b"x" * 4095 + b"\r\n")
        assert (await client.reply()).status == 413
        await made.settled()


async def test_slow_head_is_408_and_silent_connections_are_closed():
    async with bench(1, header_read_timeout_s=0.15, keep_alive_timeout_s=0.15) as made:
        silent, slow, idle = [await made.client() for _ in range(3)]
        await slow.send(CHAT)
        await idle.post()
        await idle.reply()
        assert (await slow.reply()).status == 408
        assert await silent.closed() == b""
        assert await idle.closed() == b""


async def test_extra_bytes_of_a_worker_never_reach_another_request():
    async def answer(seen: Seen, wire: Wire) -> None:
        body = seen.body
        await wire.send(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
            + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
        )

    async with bench(1) as made:
        made.workers[0].answer = answer
        for i in range(5):
            assert (await made.ask(b"%d" % i)).body == b"%d" % i


async def test_bytes_on_an_idle_worker_connection_close_it():
    async def answer(seen: Seen, wire: Wire) -> None:
        await echo(seen, wire)
        await asyncio.sleep(0.02)
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged")

    async with bench(1) as made:
        made.workers[0].answer = answer
        (registered,) = made.gateway.pool
        assert (await made.ask(b"a")).body == b"a"
        await until(lambda: registered.backend.connections == 0)
        assert (await made.ask(b"b")).body == b"b"


async def test_refused_heads_are_answered_once_and_closed():
    """Nothing of a smuggled request reaches a worker, whatever follows it."""
    follow = b"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 0\r\n\r\n"
    async with bench(1) as made:
        for name, (status, data) in REFUSED_HEADS.items():
            client = await made.client()
            await client.send(data + follow)
            reply = await client.reply()
            assert reply.status == status, name
            assert reply.headers["connection"] == "close", name
            assert await client.closed() == b"", name
        assert made.workers[0].seen == []
        await made.settled()


async def test_refused_chunks_are_answered_once_and_closed():
    async with bench(1) as made:
        for name, data in REFUSED_CHUNKS.items():
            client = await made.client()
            await client.send(CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + data)
            reply = await client.reply()
            assert reply.status in (400, 431), name
            assert await client.closed() == b"", name
        assert made.workers[0].seen == []
        await made.settled()


pieces = st.sampled_from(
    [
        b"GET /health HTTP/1.1\r\n",
        CHAT,
        b"Host: g\r\n",
        b"Content-Length: 3\r\n",
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"x-smg-routing-key: a\r\n",
        b"Expect: 100-continue\r\n",
        b"Connection: close\r\n",
        b"\r\n",
        b"abc",
        b"3\r\nabc\r\n",
        b"0\r\n\r\n",
        b"\n",
        b"\x00",
        b" ",
    ]
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.lists(pieces | st.binary(max_size=8), max_size=8), min_size=1, max_size=4
    )
)
def test_fuzzed_streams_leave_no_trace(streams):
    """No 5xx of our own, no count left, and the next request is served."""

    async def run() -> None:
        async with bench(1) as made:
            for stream in streams:
                client = await made.client()
                for part in stream:
                    client.writer.write(part)
                    await asyncio.sleep(0)
                client.writer.write_eof()
                answers = await client.closed()
                for line in answers.split(b"\r\n"):
                    if line.startswith(b"HTTP/1.1 "):
                        assert line[9:10] in b"124" or line[9:12] in (b"501", b"505")
            assert (await made.ask(b"still here")).body == b"still here"
            await made.settled()

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
