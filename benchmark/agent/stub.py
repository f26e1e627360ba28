"""A chat server that costs next to nothing, so that the client is what is measured.

Every conversation calls the tool ``look`` in each of its turns but the last. A turn
takes no time or, with ``--mean-s``, what :func:`workload.service_s` says of it, which
the measuring side knows as well. Prints its base URL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re

import workload

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ASSISTANT = re.compile(rb'"role": ?"assistant"')
_TURN_ID = re.compile(rb'"rid": ?"([^"/]+)')


def _response(status: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def _answer(turns: int) -> bytes:
    """The answer to a conversation with so many answers in it."""
    message: dict[str, object] = {"role": "assistant", "content": "the answer"}
    if turns < workload.TURNS - 1:
        function = {"name": "look", "arguments": json.dumps({"turn": turns})}
        call = {"id": f"call-{turns}", "type": "function", "function": function}
        message.update(content=None, tool_calls=[call])
    reason = "tool_calls" if "tool_calls" in message else "stop"
    prompt_tokens = 10 * (2 * turns + 1)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 8,
        "total_tokens": prompt_tokens + 8,
        "prompt_tokens_details": {"cached_tokens": max(0, prompt_tokens - 20)},
    }
    return _response(
        "200 OK",
        {
            "id": "stub",
            "object": "chat.completion",
            "created": 0,
            "model": "stub",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": usage,
        },
    )


ANSWERS = [_answer(turns) for turns in range(workload.TURNS)]
MODELS = _response("200 OK", {"object": "list", "data": [{"id": "stub"}]})
NOTHING = _response("404 Not Found", {})


class Connection(asyncio.Protocol):
    """One connection; a request on it follows the answer to the one before."""

    def __init__(self, mean_s: float) -> None:
        self._mean_s = mean_s
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._received, 0, end)
        whole = end + 4 + (int(length[1]) if length else 0)
        if len(self._received) >= whole:
            request, self._received = self._received[:whole], self._received[whole:]
            self._serve(request, request[end + 4 :])

    def _serve(self, request: bytes, body: bytes) -> None:
        if not request.startswith(b"POST /v1/chat/completions"):
            models = request.startswith(b"GET /v1/models")
            self._transport.write(MODELS if models else NOTHING)
            return
        answer = ANSWERS[len(_ASSISTANT.findall(body))]
        if self._mean_s == 0.0:
            self._transport.write(answer)
            return
        turn_id = _TURN_ID.search(body)
        assert turn_id is not None
        asyncio.get_running_loop().call_later(
            workload.service_s(turn_id[1].decode(), self._mean_s),
            self._transport.write,
            answer,
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mean-s", type=float, default=0.0)
    options = parser.parse_args()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(options.mean_s), "127.0.0.1", 0, backlog=4096
    )
    port = server.sockets[0].getsockname()[1]
    print(f"http://127.0.0.1:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
