"""Header lines met before, with what each becomes and what it means.

The grammar of one header line does not depend on its neighbours, and most lines come
again and again. A line that httptools has accepted in one head is remembered with its
reading, so a head of known lines is put together without parsing it anew. What depends
on several lines (two lengths, a length beside chunked) is judged on every head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TypeAlias

MAX_KNOWN_LINES = 8192
"""Lines remembered; when there are more, all are forgotten."""

MAX_KNOWN_LINE_BYTES = 512
"""Longest line worth remembering."""

Special: TypeAlias = tuple[int, bytes, bytes]
"""What a line says about the message itself: kind, lower-case name, value."""

Reading: TypeAlias = tuple[bytes, Special | None]
"""The line as it is passed on (CRLF included, empty when it is not), and its meaning."""


class KnownLines:
    """Remembers readings of lines.

    Args:
        read: gives the reading of one line; raises what refuses the message.
    """

    __slots__ = ("_passed", "_read", "_specials", "passed", "special")

    def __init__(self, read: Callable[[bytes], Reading]) -> None:
        self._read = read
        self._passed: dict[bytes, bytes] = {}
        self._specials: dict[bytes, Special] = {}
        self.passed: Callable[[bytes], bytes] = self._passed.__getitem__
        """A known line as it is passed on; KeyError for an unknown one."""
        self.special: Callable[[bytes], Special | None] = self._specials.get
        """What a known line says about the message, if anything."""

    def learn(self, lines: Sequence[bytes]) -> tuple[bytes, list[Special]]:
        """Read ``lines`` of an accepted head: what is passed on, and what they mean."""
        readings = [self._read(line) for line in lines]
        for line, (passed, special) in zip(lines, readings, strict=True):
            if len(line) <= MAX_KNOWN_LINE_BYTES:
                self._remember(line, passed, special)
        specials = [special for _, special in readings if special is not None]
        return b"".join([passed for passed, _ in readings]), specials

    def _remember(self, line: bytes, passed: bytes, special: Special | None) -> None:
        if len(self._passed) >= MAX_KNOWN_LINES:
            self._passed.clear()
            self._specials.clear()
        self._passed[line] = passed
        if special is not None:
            self._specials[line] = special


def line_name(line: bytes) -> bytes:
    """The lower-case name of a header line."""
    return line.partition(b":")[0].lower()


def without(lines: bytes, names: Set[bytes]) -> bytes:
    """Header lines, each ending in CRLF, less those of the given lower-case names."""
    kept = [line for line in lines.split(b"\r\n") if line_name(line) not in names]
    return b"\r\n".join(kept)


def connection_tokens(value: bytes) -> tuple[bool | None, set[bytes]]:
    """Whether a Connection header keeps the connection (None: it does not say), and
    the lower-case names of headers that it makes hop-by-hop."""
    tokens = {token.strip() for token in value.lower().split(b",")}
    keep_alive = None
    if b"close" in tokens:
        keep_alive = False
    elif b"keep-alive" in tokens:
        keep_alive = True
    return keep_alive, tokens - {b"close", b"keep-alive", b""}
