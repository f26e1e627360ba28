"""Response heads: parsed strictly with httptools, then written anew for the client."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import httptools

from sgl_router.wire.errors import MessageError
from sgl_router.wire.lines import (
    MAX_KNOWN_LINE_BYTES,
    MAX_KNOWN_LINES,
    KnownLines,
    Reading,
    Special,
    connection_tokens,
    without,
)
from sgl_router.wire.request import HOP_BY_HOP

ROUTED_WORKER_HEADER = b"x-smg-routed-worker-id"
"""Names the worker that answered: its URL."""

ERROR_CODE_HEADER = b"x-smg-error-code"
"""Marks an answer made by the gateway itself; a worker's own is dropped."""

_LENGTH_VALUE = re.compile(rb"[0-9]{1,18}")


class ResponseError(MessageError):
    """A worker's answer that cannot be passed on (502)."""

    def __init__(self, message: str) -> None:
        super().__init__(502, "bad_response", message)


# What the parser does with a header.
_DROP, _LENGTH, _CODING, _CONNECTION, _REQUEST_ID = range(5)
_KINDS = {
    **dict.fromkeys(HOP_BY_HOP, _DROP),
    ROUTED_WORKER_HEADER: _DROP,
    ERROR_CODE_HEADER: _DROP,
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"connection": _CONNECTION,
    b"x-request-id": _REQUEST_ID,
}


class ResponseHead:
    """A response's head, checked.

    Attributes:
        status: the status code.
        start: the status line as the client gets it, without its CRLF.
        lines: header lines to pass on, each ending in CRLF; no framing.
        framing: the header line that frames the body for the client.
        content_length: bytes of the body when a length was given.
        chunked: whether the body is chunked.
        keep_alive: whether the worker keeps the connection.
        has_request_id: whether the worker set x-request-id itself.
    """

    __slots__ = (
        "chunked",
        "content_length",
        "framing",
        "has_request_id",
        "keep_alive",
        "lines",
        "start",
        "status",
    )

    def __init__(self, start: StatusLine, lines: bytes) -> None:
        self.status = start.status
        self.start = start.start
        self.keep_alive = start.keep_alive
        self.lines = lines
        self.framing = b""
        self.content_length: int | None = None
        self.chunked = self.has_request_id = False

    def bodyless(self, method: bytes) -> bool:
        """Whether no body follows, whatever the headers say (RFC 9112, 6.3)."""
        return method == b"HEAD" or self.status < 200 or self.status in (204, 304)


@dataclass(frozen=True, slots=True)
class StatusLine:
    """A status line, checked; the fields are those of :class:`ResponseHead`."""

    status: int
    start: bytes
    keep_alive: bool


class _Silent:
    """Takes none of httptools' callbacks: the parser only judges."""


_SILENT = _Silent()


class ResponseParser:
    """Parses response heads and remembers their lines."""

    def __init__(self) -> None:
        self._known = KnownLines(_read_line)
        self._starts: dict[bytes, StatusLine] = {}

    def parse(self, data: bytes) -> ResponseHead:
        """Parse ``data``, one whole head with its empty line.

        Raises:
            ResponseError: the head cannot be understood in one way only.
        """
        first, *lines = data.split(b"\r\n")
        del lines[-2:]  # the empty line, and nothing after it
        known = self._known
        try:
            start = self._starts[first]
            passed = b"".join(map(known.passed, lines))
        except KeyError:
            return self._parse_anew(data, first, lines)
        return _assemble(start, passed, filter(None, map(known.special, lines)))

    def _parse_anew(
        self, data: bytes, first: bytes, lines: list[bytes]
    ) -> ResponseHead:
        """Parse a head with lines that have not been met yet."""
        parser = httptools.HttpResponseParser(_SILENT)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # a 101 is refused by the caller
        except httptools.HttpParserError as error:
            raise ResponseError(f"response head: {error}") from None
        start = _read_start(first, parser.get_status_code())
        passed, specials = self._known.learn(lines)
        if len(self._starts) >= MAX_KNOWN_LINES:
            self._starts.clear()
        if len(first) <= MAX_KNOWN_LINE_BYTES:
            self._starts[first] = start
        return _assemble(start, passed, specials)


def _read_start(first: bytes, status: int) -> StatusLine:
    """Read a status line whose code the parser has found."""
    version = first[:9]
    if version == b"HTTP/1.0 ":
        return StatusLine(status, b"HTTP/1.1 " + first[9:], keep_alive=False)
    if version != b"HTTP/1.1 " or not 100 <= status <= 999:
        raise ResponseError(f"response head: {first[:20]!r} refused")
    return StatusLine(status, first, keep_alive=True)


def _read_line(line: bytes) -> Reading:
    name, _, value = line.partition(b":")
    name, value = name.lower(), value.strip(b" \t")
    kind = _KINDS.get(name)
    if kind is None:
        return line + b"\r\n", None
    if kind == _DROP:
        return b"", None
    if kind == _LENGTH and not _LENGTH_VALUE.fullmatch(value):
        raise ResponseError("content-length: not one plain number")
    if kind == _CODING and value.lower() != b"chunked":
        raise ResponseError("transfer-encoding: only chunked, once")
    passed = line + b"\r\n" if kind == _REQUEST_ID else b""
    return passed, (kind, name, value)


def _assemble(
    start: StatusLine, passed: bytes, specials: Iterable[Special]
) -> ResponseHead:
    """Put a head together and judge what its lines say in common."""
    head = ResponseHead(start, passed)
    for kind, _, value in specials:
        if kind == _LENGTH:
            if head.content_length is not None:
                raise ResponseError("content-length: not one plain number")
            head.content_length = int(value)
            head.framing = b"content-length: %d\r\n" % head.content_length
        elif kind == _CODING:
            if head.chunked:
                raise ResponseError("transfer-encoding: only chunked, once")
            head.chunked = True
            head.framing = b"transfer-encoding: chunked\r\n"
        elif kind == _CONNECTION:
            _read_connection(head, value)
        else:
            head.has_request_id = True
    if head.chunked and head.content_length is not None:
        raise ResponseError("content-length: given beside transfer-encoding")
    return head


def _read_connection(head: ResponseHead, value: bytes) -> None:
    keep_alive, nominated = connection_tokens(value)
    if keep_alive is not None:
        head.keep_alive = keep_alive
    if nominated:
        head.lines = without(head.lines, nominated)


parse_response = ResponseParser().parse
"""Parses one response head; what it remembers is shared by all connections."""
