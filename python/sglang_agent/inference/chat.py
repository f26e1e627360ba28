"""The OpenAI chat route: tools, streaming or not, the label and a request id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from sglang_agent.inference import InferenceFailure, TurnAnswer, TurnRequest
from sglang_agent.inference.http import (
    WORKER_HEADER,
    HttpTransport,
    Retryable,
)

ROUTE = "/v1/chat/completions"


class ChatClient:
    """Asks turns of ``model``. With ``stream`` the first token's time is known."""

    def __init__(
        self, transport: HttpTransport, model: str, *, stream: bool = False
    ) -> None:
        self.transport = transport
        self._model = model
        self._stream = stream

    async def complete(self, request: TurnRequest) -> TurnAnswer:
        """See :class:`~sglang_agent.inference.InferenceClient`."""
        clock = self.transport.clock
        start_s = clock.now()
        collected, attempts = await self.transport.ask_turn(
            request, lambda rid: self._attempt(request, rid)
        )
        return collected.answer(start_s, clock.now(), attempts)

    async def close(self) -> None:
        await self.transport.close()

    async def _attempt(self, request: TurnRequest, rid: str) -> _Collected:
        collected = _Collected()
        post = self.transport.post(ROUTE, self._body(request, rid), request.label)
        async with self.transport.opened(post) as response:
            collected.worker = response.headers.get(
                WORKER_HEADER, self.transport.settings.base_url
            )
            if not self._stream:
                collected.take_whole(orjson.loads(await response.read()))
                return collected.checked()
            async for chunk in server_sent(response):
                if collected.first_token_s is None and chunk.get("choices"):
                    collected.first_token_s = self.transport.clock.now()
                collected.take_chunk(chunk)
        if collected.usage is None:
            raise Retryable(f"{ROUTE}: the stream ended before its usage")
        return collected.checked()

    def _body(self, request: TurnRequest, rid: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            **request.sampling,
            "model": self._model,
            "messages": request.messages,
            "rid": rid,
        }
        if request.tools:
            body["tools"] = request.tools
            if request.tool_choice is not None:
                body["tool_choice"] = request.tool_choice
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens
        if self._stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        return body


class _Collected:
    """One attempt's answer, whole or put together from chunks."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {"role": "assistant", "content": None}
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.first_token_s: float | None = None
        self.worker: str | None = None

    def take_whole(self, body: Any) -> None:
        try:
            choice = body["choices"][0]
            message = choice["message"]
            self.usage = body["usage"]
            self.finish_reason = choice.get("finish_reason")
        except (KeyError, IndexError, TypeError) as error:
            raise InferenceFailure(f"{ROUTE}: no chat completion in the answer") from (
                error
            )
        self.message["content"] = message.get("content")
        if message.get("tool_calls"):
            self.message["tool_calls"] = [
                _plain_call(call) for call in message["tool_calls"]
            ]

    def take_chunk(self, chunk: dict[str, Any]) -> None:
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            if delta.get("content"):
                self.message["content"] = (self.message["content"] or "") + delta[
                    "content"
                ]
            for part in delta.get("tool_calls") or ():
                self._add_call_part(part)

    def checked(self) -> _Collected:
        """Raise :class:`Retryable` when the server gave the request up."""
        if self.finish_reason == "abort":
            raise Retryable(f"{ROUTE}: the server aborted the request")
        return self

    def answer(self, start_s: float, end_s: float, attempts: int) -> TurnAnswer:
        usage = self.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        return TurnAnswer(
            message=self.message,
            input_tokens=usage.get("prompt_tokens") or 0,
            output_tokens=usage.get("completion_tokens") or 0,
            cached_tokens=details.get("cached_tokens") or 0,
            start_s=start_s,
            first_token_s=self.first_token_s,
            end_s=end_s,
            worker=self.worker,
            attempts=attempts,
            truncated=self.finish_reason == "length",
        )

    def _add_call_part(self, part: dict[str, Any]) -> None:
        calls = self.message.setdefault("tool_calls", [])
        index = part.get("index") or 0
        while len(calls) <= index:
            calls.append(
                {
                    "id": "",
                    "type": "function",
                    "function": {"name": "", "arguments": ""},
                }
            )
        call, function = calls[index], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """Keep of a tool call what the next request may send back."""
    function = call["function"]
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


async def server_sent(
    response: aiohttp.ClientResponse,
) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each event up to ``[DONE]``.

    Raises :class:`Retryable` when the worker reports an error inside the stream.
    """
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = orjson.loads(data)
        if "error" in event:
            raise Retryable(f"error in the stream: {str(event['error'])[:300]}")
        yield event
