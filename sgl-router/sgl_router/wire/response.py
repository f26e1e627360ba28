"""Response heads: parsed strictly with httptools, then written anew for the client."""

from __future__ import annotations

import re

import httptools

from sgl_router.wire.errors import MessageError
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
    """A response's head, checked.

    Attributes:
        status: the status code.
        start: the status line as the client gets it, without its CRLF.
        lines: header lines to pass on, each ending in CRLF; no framing.
        content_length: bytes of the body when a length was given.
        chunked: whether the body is chunked.
        keep_alive: whether the worker keeps the connection.
        has_request_id: whether the worker set x-request-id itself.
    """

    status: int
    start: bytes
    lines: bytes
    content_length: int | None = None
    chunked = False
    keep_alive = True
    has_request_id = False

    def bodyless(self, method: bytes) -> bool:
        """Whether no body follows, whatever the headers say (RFC 9112, 6.3)."""
        return method == b"HEAD" or self.status < 200 or self.status in (204, 304)


class _Silent:
    """Takes none of httptools' callbacks: the parser only judges."""


_SILENT = _Silent()


def parse_response(data: bytes) -> ResponseHead:
    """Parse ``data``, one whole head with its empty line.

    Raises:
        ResponseError: the head cannot be understood in one way only.
    """
    parser = httptools.HttpResponseParser(_SILENT)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # a 101 is refused by the caller
    except httptools.HttpParserError as error:
        raise ResponseError(f"response head: {error}") from None
    first, *lines = data.split(b"\r\n")
    del lines[-2:]  # the empty line, and nothing after it
    version = first[:9]
    head = ResponseHead()
    head.status = parser.get_status_code()
    if version == b"HTTP/1.0 ":
        head.keep_alive = False
        first = b"HTTP/1.1 " + first[9:]
    elif version != b"HTTP/1.1 " or not 100 <= head.status <= 999:
        raise ResponseError(f"response head: {first[:20]!r} refused")
    head.start = first
    _read_headers(head, lines)
    return head


def _read_headers(head: ResponseHead, lines: list[bytes]) -> None:
    kept: list[bytes] = []
    nominated: set[bytes] | None = None
    for line in lines:
        name, _, value = line.partition(b":")
        key = name.lower()
        if key not in _SPECIAL:
            kept.append(line)
        elif key == b"content-length":
            _read_length(head, value.strip(b" \t"))
        elif key == b"transfer-encoding":
            if head.chunked or value.strip().lower() != b"chunked":
                raise ResponseError("transfer-encoding: only chunked, once")
            head.chunked = True
        elif key == b"connection":
            nominated = _read_connection(head, value, nominated)
        elif key == b"x-request-id":
            head.has_request_id = True
            kept.append(line)
    if head.chunked and head.content_length is not None:
        raise ResponseError("content-length: given beside transfer-encoding")
    if nominated:
        kept = [line for line in kept if line.split(b":")[0].lower() not in nominated]
    kept.append(b"")
    head.lines = b"\r\n".join(kept)


def _read_length(head: ResponseHead, value: bytes) -> None:
    if head.content_length is not None or not _LENGTH.fullmatch(value):
        raise ResponseError("content-length: not one plain number")
    head.content_length = int(value)


def _read_connection(
    head: ResponseHead, value: bytes, nominated: set[bytes] | None
) -> set[bytes] | None:
    for token in (token.strip() for token in value.lower().split(b",")):
        if token == b"close":
            head.keep_alive = False
        elif token == b"keep-alive":
            head.keep_alive = True
        elif token:
            nominated = nominated or set()
            nominated.add(token)
    return nominated
