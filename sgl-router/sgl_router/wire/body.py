"""Framing of bodies: where a message ends, without touching its bytes.

Each framer's ``feed`` takes the next bytes of a connection and gives how many of them
belong to the message. ``done`` turns true with its last byte.
"""

from __future__ import annotations

import re
from typing import ClassVar, Protocol, TypeAlias

from sgl_router.wire.errors import MessageError, bad_request

JOIN_BYTES = 16 * 1024
"""Bytes up to this many are copied where that saves a buffer; more are not."""

BodyBytes: TypeAlias = bytes | memoryview
"""Bytes of a body: many are looked at where they were read instead of being copied."""

MAX_LINE = 1024
"""Longest chunk-size line, in bytes."""

MAX_TRAILERS = 8192
"""Most bytes of trailer lines."""

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[\t\x20-\x7e\x80-\xff]*\r\n")
_FORBIDDEN_TRAILERS = frozenset(
    {b"content-length", b"transfer-encoding", b"host", b"connection", b"authorization"}
)


MAX_KNOWN_SIZES = 4096
"""Chunk sizes whose reading is remembered."""


def rest(data: bytes, start: int) -> BodyBytes:
    """What follows ``start``; a copy only while that is cheaper than a view."""
    if len(data) - start <= JOIN_BYTES:
        return data[start:]
    return memoryview(data)[start:]


class Framer(Protocol):
    """Finds the end of one body."""

    done: bool

    def feed(self, data: BodyBytes, spans: list[bytes] | None = None) -> int:
        """Bytes of ``data`` that belong to the body; payload goes to ``spans``."""


class NoBody:
    """A message that ends with its head."""

    done = True

    def feed(self, data: BodyBytes, spans: list[bytes] | None = None) -> int:
        return 0


class SizedBody:
    """A body of known length."""

    __slots__ = ("done", "remaining")

    def __init__(self, length: int) -> None:
        self.remaining = length
        self.done = length == 0

    def feed(self, data: BodyBytes, spans: list[bytes] | None = None) -> int:
        size = len(data)
        if size < self.remaining:
            self.remaining -= size
        else:
            size = self.remaining
            self.remaining = 0
            self.done = True
        if spans is not None:
            spans.append(bytes(data[:size]))
        return size


class BodyUntilClose:
    """A response body that ends with the connection."""

    done = False

    def feed(self, data: BodyBytes, spans: list[bytes] | None = None) -> int:
        if spans is not None:
            spans.append(bytes(data))
        return len(data)


class ChunkedBody:
    """A chunked body, checked strictly so that no other parser can read it otherwise.

    Raises:
        MessageError: from ``feed``, on anything but the grammar of RFC 9112, 7.1.
    """

    __slots__ = (
        "_between",
        "_end_of_chunk",
        "_line",
        "_remaining",
        "_trailer_bytes",
        "done",
    )

    _known_sizes: ClassVar[dict[bytes, int]] = {}

    def __init__(self) -> None:
        self.done = False
        self._between = True  # the next byte begins a size line
        self._remaining = 0  # payload bytes left in the current chunk
        self._end_of_chunk = 0  # CR and LF still owed after the payload
        self._line = b""  # an unfinished size or trailer line
        self._trailer_bytes = -1  # counted once the last chunk was seen

    def feed(self, data: BodyBytes, spans: list[bytes] | None = None) -> int:
        data = bytes(data)
        position, size = 0, len(data)
        if self._between and spans is None:
            position = self._skip_chunks(data)
        while position < size and not self.done:
            if self._remaining:
                start = position
                position += min(self._remaining, size - position)
                self._remaining -= position - start
                if spans is not None:
                    spans.append(data[start:position])
            elif self._end_of_chunk:
                expected = 13 if self._end_of_chunk == 2 else 10
                if data[position] != expected:
                    raise bad_request("chunked body: chunk longer than its size")
                self._end_of_chunk -= 1
                self._between = not self._end_of_chunk
                position += 1
            else:
                position = self._read_line(data, position)
        return position

    def _skip_chunks(self, data: bytes) -> int:
        """Where the whole chunks of known sizes end with which ``data`` begins."""
        sizes = self._known_sizes
        position = 0
        while (end := data.find(b"\r\n", position, position + 18)) > 0:
            size = sizes.get(data[position:end])
            if size is None or data[end + 2 + size : end + size + 4] != b"\r\n":
                break
            position = end + size + 4
        return position

    def _read_line(self, data: bytes, position: int) -> int:
        end = data.find(b"\n", position) + 1
        line = self._line + data[position : end or len(data)]
        if len(line) > MAX_LINE:
            raise bad_request("chunked body: line too long")
        self._between = False
        if not end:
            self._line = line
            return len(data)
        self._line = b""
        if self._trailer_bytes >= 0:
            self._read_trailer(line)
        else:
            self._read_size(line)
        return end

    def _read_size(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise bad_request("chunked body: bad chunk size line")
        self._remaining = int(match[1], 16)
        if self._remaining:
            self._end_of_chunk = 2
            if len(self._known_sizes) < MAX_KNOWN_SIZES:
                self._known_sizes[line[:-2]] = self._remaining
        else:
            self._trailer_bytes = 0

    def _read_trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self.done = True
            return
        self._trailer_bytes += len(line)
        match = _TRAILER.fullmatch(line)
        if match is None or match[1].lower() in _FORBIDDEN_TRAILERS:
            raise bad_request("chunked body: bad trailer line")
        if self._trailer_bytes > MAX_TRAILERS:
            raise MessageError(431, "trailers_too_large", "trailers: too many bytes")


def frame(chunked: bool, content_length: int | None) -> Framer:
    """The framer of a body whose end the head tells; no body when it tells none."""
    if chunked:
        return ChunkedBody()
    return SizedBody(content_length) if content_length else NoBody()
