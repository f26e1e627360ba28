"""Response heads: parsed strictly with httptools, then written anew for the client."""

from __future__ import annotations

import re

import httptools

from sgl_router.wire.errors import MessageError
from sgl_router.wire.heads import KnownHeads, connection_tokens, joined
from sgl_router.wire.request import HOP_BY_HOP

ROUTED_WORKER_HEADER = b"x-smg-routed-worker-id"
"""Names the worker that answered: its URL."""

ERROR_CODE_HEADER = b"x-smg-error-code"
"""Marks an answer made by the gateway itself; a worker's own is dropped."""

_LENGTH = re.compile(rb"[0-9]{1,18}")
_OURS = frozenset({ROUTED_WORKER_HEADER, ERROR_CODE_HEADER})
_SPECIAL = HOP_BY_HOP | _OURS | {b"content-length", b"x-request-id"}


class ResponseError(MessageError):
    """A worker's answer that cannot be passed on (502)."""

    def __init__(self, message: str) -> None:
        super().__init__(502, "bad_response", message)


class ResponseHead:
    """A response's head but for its length, checked; shared by equal heads.

    Attributes:
        status: the status code.
        start: the status line as the client gets it, without its CRLF.
        lines: header lines to pass on, each ending in CRLF; no framing.
        bodyless: whether no body follows whatever the headers say (RFC 9112, 6.3);
            none follows the answer to a HEAD either.
        chunked: whether the body is chunked.
        keep_alive: whether the worker keeps the connection.
        has_request_id: whether the worker set x-request-id itself.
    """

    __slots__ = (
        "bodyless",
        "chunked",
        "has_request_id",
        "keep_alive",
        "lines",
        "start",
        "status",
    )

    def __init__(self, status: int, start: bytes, keep_alive: bool) -> None:
        self.status = status
        self.start = start
        self.keep_alive = keep_alive
        self.lines = b""
        self.bodyless = status < 200 or status in (204, 304)
        self.chunked = self.has_request_id = False


class _Silent:
    """Takes none of httptools' callbacks: the parser only judges."""


_SILENT = _Silent()


def _parse(data: bytes) -> tuple[ResponseHead, int | None]:
    """Read a head that has not been met yet."""
    parser = httptools.HttpResponseParser(_SILENT)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # a 101 is refused by the caller
    except httptools.HttpParserError as error:
        raise ResponseError(f"response head: {error}") from None
    first, *lines = data.split(b"\r\n")
    del lines[-2:]  # the empty line, and nothing after it
    head = _read_start(first, parser.get_status_code())
    return head, _read_headers(head, lines)


def _read_start(first: bytes, status: int) -> ResponseHead:
    """Read a status line whose code the parser has found."""
    version = first[:9]
    if version == b"HTTP/1.0 ":
        return ResponseHead(status, b"HTTP/1.1 " + first[9:], keep_alive=False)
    if version != b"HTTP/1.1 " or not 100 <= status <= 999:
        raise ResponseError(f"response head: {first[:20]!r} refused")
    return ResponseHead(status, first, keep_alive=True)


def _read_headers(head: ResponseHead, lines: list[bytes]) -> int | None:
    kept: list[bytes] = []
    nominated: set[bytes] = set()
    length: int | None = None
    for line in lines:
        name, _, value = line.partition(b":")
        key = name.lower()
        if key not in _SPECIAL:
            kept.append(line)
        elif key == b"content-length":
            length = _read_length(length, value.strip(b" \t"))
        elif key == b"transfer-encoding":
            if head.chunked or value.strip().lower() != b"chunked":
                raise ResponseError("transfer-encoding: only chunked, once")
            head.chunked = True
        elif key == b"connection":
            keep_alive, names = connection_tokens(value)
            head.keep_alive = head.keep_alive if keep_alive is None else keep_alive
            nominated |= names
        elif key == b"x-request-id":
            head.has_request_id = True
            kept.append(line)
    head.lines = joined(kept, nominated)
    return length


def _read_length(before: int | None, value: bytes) -> int:
    if before is not None or not _LENGTH.fullmatch(value):
        raise ResponseError("content-length: not one plain number")
    return int(value)


parse_response = KnownHeads(_parse, ResponseError).read
"""Reads one whole head with its empty line: what it says, and its length.

What it remembers is shared by all connections. Raises ResponseError when the head
cannot be understood in one way only.
"""
