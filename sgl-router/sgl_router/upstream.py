"""Connections to one worker: opened on demand, kept alive, read strictly."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from sgl_router.wire.body import (
    BodyBytes,
    BodyUntilClose,
    Framer,
    NoBody,
    frame,
    rest,
)
from sgl_router.wire.errors import MessageError
from sgl_router.wire.response import ResponseError, ResponseHead, parse_response

if TYPE_CHECKING:
    from sgl_router.exchange import Exchange

MAX_HEAD_BYTES = 64 * 1024
"""Longest response head."""

MAX_DISCARDED_BYTES = 256 * 1024
"""Most bytes of an unwanted answer read only to keep its connection."""

MAX_IDLE_CONNECTIONS = 1024
"""Most idle connections kept for one worker."""

WRITE_BUFFER_BYTES = 512 * 1024
"""Unsent bytes at which the other side is asked to pause."""


_NO_BODY = NoBody()


class UpstreamConnection:
    """One connection to a worker; carries one exchange at a time.

    An :class:`asyncio.Protocol` in all but name, like the client's.
    """

    __slots__ = (
        "_buffer",
        "_discarded",
        "_framer",
        "_keep_alive",
        "_paused",
        "answered",
        "backend",
        "closed",
        "exchange",
        "idle_since_s",
        "reused",
        "transport",
    )

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.reused = False
        self.answered = False
        self.closed = False
        self.idle_since_s = 0.0
        self._buffer = b""
        self._framer: Framer | None = None
        self._keep_alive = True
        self._discarded = 0
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's inherits nothing
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.backend.connections += 1

    def attach(self, exchange: Exchange) -> None:
        """Carry ``exchange`` from now on."""
        self.exchange = exchange
        self.answered = False
        self._framer = None
        self._discarded = 0

    def detach(self) -> None:
        """Give up the exchange, reading its answer to the end if that is cheap."""
        self.exchange = None
        self.resume_reading()
        if self._framer is None or isinstance(self._framer, BodyUntilClose):
            self.abort()

    def abort(self) -> None:
        """Close at once; the worker sees its client leave."""
        self.exchange = None
        if not self.closed:
            self.closed = True
            self.transport.abort()

    def pause_reading(self) -> None:
        """Take no more bytes from the worker until resumed."""
        if not (self._paused or self.closed):
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Undo :meth:`pause_reading`."""
        if self._paused and not self.closed:
            self._paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.client.pause_reading()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.resume_request()

    def data_received(self, data: bytes) -> None:
        try:
            if self._framer is None:
                self._read_head(data)
            else:
                self._read_body(self._framer, data)
        except MessageError as error:
            self._fail(error)

    def _fail(self, error: MessageError) -> None:
        exchange = self.exchange
        self.abort()
        if exchange is not None:
            exchange.answer_broken(str(error))

    def _read_head(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # bytes nobody asked for
            self.abort()
            return
        self.answered = True
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        end = data.find(b"\r\n\r\n") + 4
        if end == 3 or end > MAX_HEAD_BYTES:
            if len(data) > MAX_HEAD_BYTES:
                raise ResponseError("response head: too long")
            self._buffer = data
            return
        head, given = parse_response(data[:end])
        if head.status < 200:
            self._read_interim(exchange, head, data[end:])
            return
        bodyless = head.bodyless or exchange.head.method == b"HEAD"
        length = 0 if bodyless else given
        until_close = length is None and not head.chunked
        self._keep_alive = head.keep_alive and not until_close
        whole = len(data) - end == length  # as most answers are
        framer: Framer = _NO_BODY
        if not whole:
            framer = BodyUntilClose() if until_close else frame(length is None, length)
        self._framer = framer
        exchange.answer_head(head, given, until_close)
        if not whole:
            self._read_body(framer, data[end:] if head.chunked else rest(data, end))
        elif self.exchange is None:  # asked elsewhere instead
            self._to_pool(time.monotonic())
        else:
            exchange.answer_end(rest(data, end))

    def _read_interim(
        self, exchange: Exchange, head: ResponseHead, data: bytes
    ) -> None:
        """Pass a 1xx on and read what follows it."""
        if head.status == 101:
            raise ResponseError("response head: the worker switched protocols")
        exchange.interim_answer(head)
        if data:
            self._read_head(data)

    def _read_body(self, framer: Framer, data: BodyBytes) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.dechunk:
            spans: list[bytes] = []
            used = framer.feed(data, spans)
            payload: BodyBytes = b"".join(spans)
        else:
            used = framer.feed(data)
            payload = data if used == len(data) else data[:used]
        if used < len(data):  # more than the answer: the connection is out of step
            self._keep_alive = False
        if exchange is None:
            self._discard(framer, used)
        elif framer.done:
            exchange.answer_end(payload)
        else:
            exchange.answer_bytes(payload)

    def _discard(self, framer: Framer, size: int) -> None:
        self._discarded += size
        if framer.done:
            self._to_pool(time.monotonic())
        elif self._discarded > MAX_DISCARDED_BYTES:
            self.abort()

    def recycle(self, request_complete: bool, now_s: float) -> None:
        """After an answer's last byte: back to the pool, or closed if it must be."""
        self.exchange = None
        if self._paused:
            self.resume_reading()
        if request_complete:
            self._to_pool(now_s)
        else:
            self.abort()

    def _to_pool(self, now_s: float) -> None:
        self._framer = None
        if self._keep_alive and not self.closed:
            self.backend.give_back(self, now_s)
        else:
            self.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self.backend.lost(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if isinstance(self._framer, BodyUntilClose) and error is None:
            exchange.answer_end(b"")
        elif self._framer is not None:
            exchange.answer_broken("the worker closed the connection mid-answer")
        else:
            exchange.connection_failed(self, answered=self.answered)


class Backend:
    """An address that answers requests, and the idle connections to it.

    Args:
        url: ``http(s)://host[:port]``; unused when ``unix_path`` is given.
        tls: how https is spoken; needed for an https URL.
        api_key: sent as a bearer token where the client sends no Authorization.
        unix_path: connect to this socket instead.
    """

    def __init__(
        self,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        api_key: str | None = None,
        unix_path: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self.url = url
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if secure else 80)
        self.tls = tls if secure else None
        self.unix_path = unix_path
        # what follows a request line, its CRLF first
        self.host_lines = (
            f"\r\nhost: {parts.netloc}\r\nvia: 1.1 sgl-router\r\n".encode()
        )
        named = unix_path is None
        # what follows a status line, its CRLF first
        self.routed_lines = (
            f"\r\nx-smg-routed-worker-id: {url}\r\n".encode() if named else b"\r\n"
        )
        # what ends a request's head that comes without an Authorization
        self.auth_end = (
            f"authorization: Bearer {api_key}\r\n\r\n".encode() if api_key else b"\r\n"
        )
        self.connections = 0
        self.closed = False
        self._idle: list[UpstreamConnection] = []

    @property
    def idle(self) -> int:
        """Connections waiting for a request."""
        return len(self._idle)

    async def open(self) -> UpstreamConnection:
        """A new connection.

        Raises:
            OSError: it cannot be made (refused, unreachable, bad certificate).
        """
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(self)
        protocol = cast(asyncio.Protocol, connection)
        if self.unix_path is not None:
            await loop.create_unix_connection(lambda: protocol, self.unix_path)
        else:
            await loop.create_connection(
                lambda: protocol, self.host, self.port, ssl=self.tls
            )
            no_delay(connection.transport)
        return connection

    def take(self) -> UpstreamConnection | None:
        """The connection that became idle last, if any."""
        if not self._idle:
            return None
        connection = self._idle.pop()
        connection.reused = True
        return connection

    def give_back(self, connection: UpstreamConnection, now_s: float) -> None:
        """Keep ``connection`` for the next request."""
        if self.closed or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.abort()
            return
        connection.idle_since_s = now_s
        self._idle.append(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        """``connection`` is closed."""
        self.connections -= 1
        if connection.exchange is None and connection in self._idle:
            self._idle.remove(connection)

    def expire(self, idle_since_s: float) -> None:
        """Close connections that have been idle since before ``idle_since_s``."""
        while self._idle and self._idle[0].idle_since_s < idle_since_s:
            self._idle.pop(0).abort()

    def close(self) -> None:
        """Close idle connections now and busy ones when their answer ends."""
        self.closed = True
        while self._idle:
            self._idle.pop().abort()


def no_delay(transport: asyncio.BaseTransport) -> None:
    """Send small writes at once (TCP_NODELAY)."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
