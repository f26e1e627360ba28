"""A local server that speaks the model routes and generates nothing.

It answers the OpenAI chat route, completions and ``/generate`` after a set delay,
calls the first tool offered for a set number of turns, counts what is in flight,
records headers and aborts, and fails on demand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

LABEL_HEADER = "x-smg-routing-key"
MODEL = "stub"

Fault = Callable[[int, dict[str, Any]], "web.StreamResponse | None"]
"""Gets the request's number (from 1) and body; a response replaces the answer."""


@dataclass
class StubWorker:
    """Settings and what was seen. Times in seconds, token counts as invented.

    ``tool_turns`` is how many tool calls a conversation makes before its answer (by
    the count of assistant messages in it), unless ``tool_choice`` decides.
    """

    delay_s: float = 0.0
    tool_turns: int = 2
    output_tokens: int = 8
    server_info: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None
    hang: Callable[[int, dict[str, Any]], bool] | None = None
    keep_requests: bool = True

    labels: Counter[str] = field(default_factory=Counter)
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0
    served: int = 0
    _running: dict[str, asyncio.Event] = field(default_factory=dict)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**28)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/v1/models", self._models),
                web.get("/server_info", self._server_info),
                web.get("/health", self._health),
            ]
        )
        return app

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Serve on loopback and yield the base URL; port 0 takes a free one."""
        runner = web.AppRunner(
            self.application(), access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            host, bound = runner.addresses[0][:2]
            yield f"http://{host}:{bound}"
        finally:
            await runner.cleanup()

    async def _begin(
        self, request: web.Request
    ) -> tuple[dict[str, Any], web.StreamResponse | None]:
        """Book a request, wait its time, and say whether it is to fail."""
        body: dict[str, Any] = orjson.loads(await request.read())
        self.served += 1
        number = self.served
        self.labels[request.headers.get(LABEL_HEADER, "")] += 1
        if self.keep_requests:
            self.requests.append({"path": request.path, **body})
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            hangs = self.hang is not None and self.hang(number, body)
            if await self._stopped(body, 3600.0 if hangs else self.delay_s):
                return body, _json({"error": {"message": "aborted"}}, 503)
            return body, None if self.fault is None else self.fault(number, body)
        finally:
            self.in_flight -= 1

    async def _stopped(self, body: dict[str, Any], delay_s: float) -> bool:
        """Take the time of a generation; True when it was aborted meanwhile."""
        if delay_s <= 0:
            return False
        rid = str(body.get("rid"))
        stop = self._running[rid] = asyncio.Event()
        try:
            async with asyncio.timeout(delay_s):
                await stop.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._running.pop(rid, None)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, failure = await self._begin(request)
        if failure is not None:
            return failure
        message = self._message(body)
        if body.get("stream"):
            return await self._stream_chat(request, message, body)
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return _json(
            {
                "id": body.get("rid"),
                "object": "chat.completion",
                "model": MODEL,
                "choices": [choice],
                "usage": self._usage(body["messages"]),
            }
        )

    async def _stream_chat(
        self, request: web.Request, message: dict[str, Any], body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        calls = message.pop("tool_calls", None)
        for call in calls or ():
            arguments = call["function"]["arguments"]
            head = {**call, "function": {**call["function"], "arguments": ""}}
            await _event(response, _delta({"tool_calls": [{"index": 0, **head}]}))
            for piece in (arguments[:1], arguments[1:]):
                part = {"index": 0, "function": {"arguments": piece}}
                await _event(response, _delta({"tool_calls": [part]}))
        if message["content"]:
            await _event(response, _delta({"content": message["content"]}))
        await _event(response, _delta({}, finish_reason="stop"))
        usage = self._usage(body["messages"])
        await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        _, failure = await self._begin(request)
        if failure is not None:
            return failure
        return _json({"choices": [{"text": "stub"}], "usage": self._usage([])})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, failure = await self._begin(request)
        if failure is not None:
            return failure
        count = body["sampling_params"].get("max_new_tokens", self.output_tokens)
        prompt = len(body["input_ids"])
        meta = {
            "id": body.get("rid"),
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "cached_tokens": prompt // 2,
            "finish_reason": {"type": "length", "length": count},
        }
        answer = {"text": "", "output_ids": [7] * count, "meta_info": meta}
        if not body.get("stream"):
            return _json(answer)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await _event(response, answer)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _abort(self, request: web.Request) -> web.Response:
        rid = orjson.loads(await request.read())["rid"]
        self.aborted.append(rid)
        if rid in self._running:
            self._running[rid].set()
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _server_info(self, request: web.Request) -> web.Response:
        return _json(self.server_info)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    def _message(self, body: dict[str, Any]) -> dict[str, Any]:
        turns = sum(1 for m in body["messages"] if m["role"] == "assistant")
        choice = body.get("tool_choice", "auto")
        wants_tool = choice == "required" or (
            choice == "auto" and turns < self.tool_turns
        )
        if not wants_tool or not body.get("tools"):
            return {"role": "assistant", "content": f"answer after {turns} turns"}
        function = {
            "name": body["tools"][0]["function"]["name"],
            "arguments": orjson.dumps({"turn": turns}).decode(),
        }
        call = {"id": f"call-{turns}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def _usage(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        prompt = 10 * len(messages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": max(0, prompt - 20)},
        }


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, content_type="application/json"
    )


def _delta(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": finish_reason}]}


async def _event(response: web.StreamResponse, event: Any) -> None:
    await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


async def _serve_until_stopped(worker: StubWorker, port: int) -> None:
    async with worker.serving(port) as url:
        print(url, flush=True)  # noqa: T201  (whoever started it reads the address)
        await asyncio.Event().wait()


def main() -> None:
    """``python -m sglang_agent.testing.stub_worker``: serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--delay-s", type=float, default=0.0, help="time of a turn")
    parser.add_argument("--tool-turns", type=int, default=2, help="tool calls a sample")
    options = parser.parse_args()
    worker = StubWorker(
        delay_s=options.delay_s, tool_turns=options.tool_turns, keep_requests=False
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_until_stopped(worker, options.port))


if __name__ == "__main__":
    main()
