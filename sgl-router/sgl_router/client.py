"""Connections from clients: one request at a time on each."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, cast

from sgl_router.exchange import Exchange
from sgl_router.upstream import WRITE_BUFFER_BYTES, no_delay
from sgl_router.wire.errors import MessageError, bad_request
from sgl_router.wire.request import RequestHead

if TYPE_CHECKING:
    from sgl_router.gateway import Gateway

MAX_HEAD_BYTES = 64 * 1024
"""Longest request head."""

MAX_PIPELINED_BYTES = 64 * 1024
"""Bytes after a request that are read and dropped before reading stops."""

MAX_LINGER_BYTES = 4 * 1024 * 1024
"""Most bytes read and dropped from a client that is still sending when refused."""

LINGER_S = 2.0
"""Longest wait for such a client to stop."""

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    413: b"Content Too Large",
    417: b"Expectation Failed",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}


class ClientConnection:
    """One connection of a client: an :class:`asyncio.Protocol` in all but name.

    Without a base class of the interpreter it can be compiled to a native one.

    Attributes:
        exchange: the request under way, None between requests.
        has_pipelined: bytes of a further request came too early; the connection is
            closed after the present answer.
        reading_paused: nothing is read from the client for now.
        write_paused_s: since when (monotonic) the client has not taken its answer;
            0.0 while it does.
        waiting_since_s: since when the next request's head is awaited.
    """

    __slots__ = (
        "_buffer",
        "_lingered",
        "closed",
        "exchange",
        "gateway",
        "has_pipelined",
        "lingering",
        "reading_paused",
        "served",
        "transport",
        "waiting_since_s",
        "write_paused_s",
    )

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.has_pipelined = False
        self.reading_paused = False
        self.write_paused_s = 0.0
        self.waiting_since_s = 0.0
        self.served = 0
        self.closed = False
        self.lingering = False
        self._lingered = 0
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's inherits nothing
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        no_delay(transport)
        self.waiting_since_s = time.monotonic()
        self.gateway.clients.add(self)

    @property
    def idle(self) -> bool:
        """Whether nothing of a request has arrived."""
        return self.exchange is None and not self._buffer

    # Reading.

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is not None:
            try:
                exchange.request_data(data)
            except MessageError as error:
                exchange.refuse(error)
        elif not self.lingering:
            self._read_head(data)
        else:
            self._lingered += len(data)
            if self._lingered > MAX_LINGER_BYTES:
                self.abort()

    def _read_head(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        elif data[:2] == b"\r\n":  # an empty line before the request is allowed
            data = data[2:]
        end = data.find(b"\r\n\r\n") + 4
        try:
            if end == 3 or end > MAX_HEAD_BYTES:
                self._wait_for_head(data)
                return
            head, length = self.gateway.parser.parse(data[:end])
        except MessageError as error:
            self._refuse_head(error)
            return
        route = self.gateway.routes.find(head.path)
        self.exchange = exchange = Exchange(self.gateway, self, head, length, route)
        exchange.begin(data, end)

    def _wait_for_head(self, data: bytes) -> None:
        if len(data) > MAX_HEAD_BYTES:
            limit = f"request head: more than {MAX_HEAD_BYTES} bytes"
            raise MessageError(431, "head_too_large", limit)
        if data.count(b"\n") != data.count(b"\r\n"):
            raise bad_request("request head: a LF stands alone")
        self._buffer = data

    def _refuse_head(self, error: MessageError) -> None:
        self.gateway.head_refused(error)
        self.write_error(error, None, b"", keep=False)
        self._linger()

    def head_timed_out(self) -> None:
        """The next request's head did not come in time."""
        if self._buffer:
            text = "request head: took too long"
            self._refuse_head(MessageError(408, "head_timeout", text))
        else:
            self.close()

    def pipelined(self, data: bytes) -> None:
        """Bytes came after the request under way; only an empty line is excused."""
        if self.has_pipelined or data.strip(b"\r\n"):
            self.has_pipelined = True
            self._lingered += len(data)
            if self._lingered > MAX_PIPELINED_BYTES:
                self.pause_reading()  # until now, to see the client leave

    def eof_received(self) -> bool:
        self._gone()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self.gateway.clients.discard(self)
        self._gone()

    def _gone(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_gone()

    # Writing.

    def write(self, data: bytes) -> None:
        """Send bytes of an answer."""
        if not self.closed:
            self.transport.write(data)

    def write_error(
        self,
        error: MessageError,
        head: RequestHead | None,
        request_id: bytes,
        keep: bool,
    ) -> None:
        """Send an answer of the gateway's own."""
        body = error_body(error)
        lines = [
            b"HTTP/1.1 %d %b\r\n" % (error.status, _REASONS.get(error.status, b"")),
            b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),
            b"x-smg-error-code: %b\r\n" % error.code.encode(),
        ]
        if request_id:
            lines.append(b"x-request-id: %b\r\n" % request_id)
        if error.status in (429, 503):
            lines.append(b"retry-after: 1\r\n")
        if not keep:
            lines.append(b"connection: close\r\n")
        elif head is not None and head.http_10:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        if head is None or head.method != b"HEAD":
            lines.append(body)
        self.write(b"".join(lines))

    def exchange_done(self, keep: bool, now_s: float) -> None:
        """The answer is written: wait for the next request, or close."""
        exchange, self.exchange = self.exchange, None
        self.served += 1
        self.waiting_since_s = now_s
        if keep and not self.has_pipelined and not self.gateway.closing:
            if self.reading_paused:
                self.resume_reading()
        elif exchange is not None and not exchange.request_complete:
            self._linger()
        else:
            self.close()

    def _linger(self) -> None:
        """Half-close, then drop what the client still sends, so that it can read on."""
        self.lingering = True
        self.resume_reading()
        if self.closed:
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.close)

    def close(self) -> None:
        """Close once everything written has been sent."""
        if not self.closed:
            self.transport.close()

    def abort(self) -> None:
        """Close at once; an answer under way is seen to be cut short."""
        if not self.closed:
            self.transport.abort()

    # Flow control.

    def pause_reading(self) -> None:
        """Take no more bytes from the client until resumed."""
        if not (self.reading_paused or self.closed):
            self.reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Undo :meth:`pause_reading`, except for a client that pipelines."""
        if self.reading_paused and not self.closed and not self.has_pipelined:
            self.reading_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused_s = time.monotonic()
        if self.exchange is not None:
            self.exchange.pause_answer()

    def resume_writing(self) -> None:
        self.write_paused_s = 0.0
        if self.exchange is not None:
            self.exchange.resume_answer()


def error_body(error: MessageError) -> bytes:
    """An error in the shape that OpenAI and Anthropic clients both read."""
    detail = {"message": str(error), "type": error.code, "code": error.status}
    return json.dumps({"type": "error", "error": detail}).encode()
