"""SGLang's ``/generate`` with token ids in and out: token-exact contexts."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from sglang_agent.inference import InferenceFailure, TurnAnswer, TurnRequest
from sglang_agent.inference.chat import server_sent
from sglang_agent.inference.http import (
    WORKER_HEADER,
    HttpTransport,
    Retryable,
)

ROUTE = "/generate"


class GenerateClient:
    """Asks turns by ``input_ids``; ``exact_tokens`` sets the answer's length."""

    def __init__(self, transport: HttpTransport, *, stream: bool = False) -> None:
        self.transport = transport
        self._stream = stream

    async def complete(self, request: TurnRequest) -> TurnAnswer:
        """See :class:`~sglang_agent.inference.InferenceClient`."""
        start_s = self.transport.clock.now()
        answer, attempts = await self.transport.ask_turn(
            request, lambda rid: self._attempt(request, rid, start_s)
        )
        return msgspec.structs.replace(answer, attempts=attempts)

    async def close(self) -> None:
        await self.transport.close()

    async def _attempt(
        self, request: TurnRequest, rid: str, start_s: float
    ) -> TurnAnswer:
        clock = self.transport.clock
        first_token_s = None
        last: dict[str, Any] | None = None
        post = self.transport.post(ROUTE, self._body(request, rid), request.label)
        async with self.transport.opened(post) as response:
            worker = response.headers.get(
                WORKER_HEADER, self.transport.settings.base_url
            )
            if self._stream:
                output_ids: list[int] = []
                async for last in server_sent(response):
                    first_token_s = first_token_s or clock.now()
                    output_ids = _joined(output_ids, last)
                if last is not None:
                    last["output_ids"] = output_ids
            else:
                last = orjson.loads(await response.read())
        return _answer(last, start_s, first_token_s, clock.now(), worker)

    def _body(self, request: TurnRequest, rid: str) -> dict[str, Any]:
        sampling = dict(request.sampling)
        if request.exact_tokens is not None:
            sampling |= {"max_new_tokens": request.exact_tokens, "ignore_eos": True}
        elif request.max_tokens is not None:
            sampling["max_new_tokens"] = request.max_tokens
        return {
            "input_ids": request.input_ids,
            "sampling_params": sampling,
            "rid": rid,
            "routing_key": request.label,
            "stream": self._stream,
        }


def _joined(so_far: list[int], chunk: dict[str, Any]) -> list[int]:
    """Servers stream ids cumulatively or in pieces, by a flag; the count tells."""
    ids: list[int] = chunk.get("output_ids") or []
    total = (chunk.get("meta_info") or {}).get("completion_tokens")
    return ids if total == len(ids) else so_far + ids


def _answer(
    body: dict[str, Any] | None,
    start_s: float,
    first_token_s: float | None,
    end_s: float,
    worker: str,
) -> TurnAnswer:
    try:
        if body is None:
            raise Retryable(f"{ROUTE}: the stream ended before its first event")
        meta = body["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise Retryable(f"{ROUTE}: aborted: {reason.get('message', '')[:300]}")
        return TurnAnswer(
            output_ids=body.get("output_ids"),
            input_tokens=meta["prompt_tokens"],
            output_tokens=meta["completion_tokens"],
            cached_tokens=meta.get("cached_tokens") or 0,
            start_s=start_s,
            first_token_s=first_token_s,
            end_s=end_s,
            worker=worker,
            truncated=reason.get("type") == "length",
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InferenceFailure(f"{ROUTE}: no generation in the answer") from error
