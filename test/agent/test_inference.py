"""The HTTP clients against a stub server: labels, retries, aborts, streaming."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from sglang_agent.inference import InferenceFailure, TurnRequest
from sglang_agent.inference.chat import ChatClient
from sglang_agent.inference.generate import GenerateClient
from sglang_agent.inference.http import HttpSettings, HttpTransport
from sglang_agent.labels import current_label, routing_headers
from sglang_agent.testing.stub_worker import StubWorker

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
USER = [{"role": "user", "content": "hello"}]


def transport(url: str, **more: Any) -> HttpTransport:
    return HttpTransport(HttpSettings(base_url=url, retry_base_s=0.01, **more))


def turn(number: int = 1, **more: Any) -> TurnRequest:
    return TurnRequest(label="sample-1", turn=number, messages=USER, **more)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_with_tools_whole_or_streamed(stream: bool) -> None:
    worker = StubWorker()
    async with worker.serving() as url:
        client = ChatClient(transport(url), "stub", stream=stream)
        answer = await client.complete(
            turn(tools=TOOLS, tool_choice="required", max_tokens=9)
        )
        await client.close()
    assert answer.message is not None
    (call,) = answer.message["tool_calls"]
    assert call == {
        "id": "call-0",
        "type": "function",
        "function": {"name": "look", "arguments": '{"turn":0}'},
    }
    assert (answer.input_tokens, answer.output_tokens) == (10, 8)
    assert (answer.first_token_s is not None) == stream
    assert answer.worker == url
    (request,) = worker.requests
    assert request["rid"] == "sample-1.1/1"
    assert request["max_tokens"] == 9
    assert worker.labels == {"sample-1": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_token_exact_generation(stream: bool) -> None:
    worker = StubWorker()
    async with worker.serving() as url:
        client = GenerateClient(transport(url), stream=stream)
        answer = await client.complete(
            TurnRequest(label="a", turn=2, input_ids=[1, 2, 3, 4], exact_tokens=5)
        )
        await client.close()
    assert answer.output_ids == [7] * 5
    assert (answer.input_tokens, answer.output_tokens) == (4, 5)
    assert answer.cached_tokens == 2
    (request,) = worker.requests
    assert request["sampling_params"] == {"max_new_tokens": 5, "ignore_eos": True}
    assert request["routing_key"] == "a"


async def test_the_worker_is_named_by_the_gateway() -> None:
    def named(_: int, body: dict[str, Any]) -> web.Response:
        answer = {
            "choices": [{"message": {"content": "hi"}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        }
        return web.json_response(answer, headers={"x-smg-routed-worker-id": "w-2"})

    async with StubWorker(fault=named).serving() as url:
        client = ChatClient(transport(url), "stub")
        answer = await client.complete(turn())
        await client.close()
    assert (answer.worker, answer.truncated, answer.cached_tokens) == ("w-2", True, 0)


async def test_a_cut_generation_is_retried_as_the_same_turn_and_counted_once() -> None:
    class Cutting(StubWorker):
        async def _chat(self, request: web.Request) -> web.StreamResponse:
            if self.served == 0:
                await self._begin(request)
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return await super()._chat(request)

    worker = Cutting()
    async with worker.serving() as url:
        client = ChatClient(transport(url), "stub")
        answer = await client.complete(turn(7))
        await client.close()
    assert [r["rid"] for r in worker.requests] == ["sample-1.7/1", "sample-1.7/2"]
    assert worker.aborted == ["sample-1.7/1"]
    assert worker.labels == {"sample-1": 2}
    assert (answer.attempts, answer.output_tokens) == (2, 8)


async def test_giving_up_on_a_long_generation_reaches_the_worker_within_a_second() -> (
    None
):
    worker = StubWorker(delay_s=10.0)
    async with worker.serving() as url:
        client = ChatClient(transport(url), "stub")
        before = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.complete(turn())
        await client.close()  # lets the abort go out
        assert time.monotonic() - before < 1.1
    assert worker.aborted == ["sample-1.1/1"]


async def test_a_request_limit_is_per_attempt() -> None:
    worker = StubWorker(hang=lambda number, _: number == 1)
    async with worker.serving() as url:
        client = ChatClient(transport(url, request_timeout_s=0.1), "stub")
        answer = await client.complete(turn())
        await client.close()
    assert answer.attempts == 2
    assert worker.aborted == ["sample-1.1/1"]


@pytest.mark.parametrize(("status", "attempts"), [(400, 1), (404, 1), (503, 3)])
async def test_only_what_can_succeed_is_retried(status: int, attempts: int) -> None:
    def refuse(_: int, body: dict[str, Any]) -> web.Response:
        error = {"error": {"message": "the reason"}}
        return web.json_response(error, status=status)

    worker = StubWorker(fault=refuse)
    async with worker.serving() as url:
        client = ChatClient(transport(url, max_retries=2), "stub")
        with pytest.raises(InferenceFailure, match=f"HTTP {status}: the reason"):
            await client.complete(turn())
        await client.close()
    assert worker.served == attempts


async def test_retry_after_is_honoured() -> None:
    def busy_once(number: int, _: dict[str, Any]) -> web.Response | None:
        if number > 1:
            return None
        return web.Response(status=429, headers={"retry-after": "0.2"})

    worker = StubWorker(fault=busy_once)
    async with worker.serving() as url:
        client = ChatClient(transport(url), "stub")
        before = time.monotonic()
        assert (await client.complete(turn())).attempts == 2
        assert time.monotonic() - before >= 0.2
        await client.close()
    assert worker.aborted == []  # what was refused does not run


async def test_an_error_inside_a_stream_is_retried() -> None:
    def broken_once(number: int, _: dict[str, Any]) -> web.Response | None:
        if number > 1:
            return None
        text = 'data: {"error": {"message": "out of memory"}}\n\n'
        return web.Response(text=text, content_type="text/event-stream")

    async with StubWorker(fault=broken_once).serving() as url:
        client = ChatClient(transport(url), "stub", stream=True)
        assert (await client.complete(turn())).attempts == 2
        await client.close()


async def test_a_request_that_the_server_gave_up_is_asked_again() -> None:
    def aborted_once(number: int, _: dict[str, Any]) -> web.Response | None:
        if number > 1:
            return None
        choice = {"message": {"content": "hal"}, "finish_reason": "abort"}
        return web.json_response({"choices": [choice], "usage": {}})

    async with StubWorker(fault=aborted_once).serving() as url:
        client = ChatClient(transport(url), "stub")
        assert (await client.complete(turn())).attempts == 2
        await client.close()


@pytest.mark.parametrize("text", ["<html>", '{"choices": []}', "[]"])
async def test_an_answer_that_is_none_is_an_inference_failure(text: str) -> None:
    def odd(_: int, body: dict[str, Any]) -> web.Response:
        return web.Response(text=text)

    async with StubWorker(fault=odd).serving() as url:
        client = ChatClient(transport(url), "stub")
        with pytest.raises(InferenceFailure, match=r"no JSON|no chat completion"):
            await client.complete(turn())
        await client.close()


async def test_every_call_of_a_sample_carries_its_label() -> None:
    """Chat turns, completions, a judge and a summary, from the sample's own task."""
    worker = StubWorker()
    async with worker.serving() as url:
        shared = transport(url)
        client = ChatClient(shared, "stub")

        async def sample(name: str) -> None:
            current_label.set(name)
            await client.complete(TurnRequest(label=name, turn=1, messages=USER))
            await shared.call("/v1/completions", {"prompt": "x"})
            async with asyncio.TaskGroup() as group:  # a judge and a summary
                for _ in range(2):
                    group.create_task(
                        shared.call("/v1/chat/completions", {"messages": USER})
                    )
            assert routing_headers() == {"x-smg-routing-key": name}

        async with asyncio.TaskGroup() as group:
            for n in range(5):
                group.create_task(sample(f"s{n}"))
        with pytest.raises(RuntimeError, match="no sample is running"):
            await shared.call("/v1/completions", {"prompt": "x"})
        await client.close()
    assert worker.labels == {f"s{n}": 4 for n in range(5)}


async def test_more_connections_than_the_usual_cap() -> None:
    class Gathering(StubWorker):
        """Answers nobody before 150 requests are there at once."""

        all_there = asyncio.Event()

        async def _chat(self, request: web.Request) -> web.StreamResponse:
            self.in_flight += 1
            if self.in_flight == 150:
                self.all_there.set()
            await self.all_there.wait()
            return await super()._chat(request)

    worker = Gathering()
    async with worker.serving() as url:
        client = ChatClient(transport(url), "stub")
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for n in range(150):
                group.create_task(client.complete(turn(n)))
        await client.close()
    assert worker.served == 150


@pytest.mark.parametrize("label", ["", "x" * 129, "two words", "naïve"])
def test_a_label_no_gateway_would_take_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 128 visible ASCII"):
        routing_headers(label)
