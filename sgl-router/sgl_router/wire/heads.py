"""Heads met before: a connection's heads are mostly the same but for their length.

A head is remembered without its Content-Length, together with what was read from it;
the next one that is equal byte for byte is not parsed again. A length is cut out only
where it is a line of its own with nothing but digits, so that the rest is a head that
says the same; everything else is left to the parser, which refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from sgl_router.wire.errors import MessageError

MAX_KNOWN_HEADS = 4096
"""Heads remembered; when there are more, all are forgotten."""

MAX_KNOWN_BYTES = 2048
"""Longest head worth remembering."""

MAX_LENGTH_DIGITS = 18
"""Most digits of a length."""


class ReadHead(Protocol):
    """What reading a head gives."""

    chunked: bool


Head = TypeVar("Head", bound=ReadHead)


class KnownHeads(Generic[Head]):
    """Remembers what heads say; what it gives out is shared and never changed.

    Args:
        parse: reads a head anew: what it says, and the length if one was left in it.
        refuse: makes the error that refuses a head, from its reason.
    """

    __slots__ = ("_heads", "_parse", "_refuse")

    def __init__(
        self,
        parse: Callable[[bytes], tuple[Head, int | None]],
        refuse: Callable[[str], MessageError],
    ) -> None:
        self._parse = parse
        self._refuse = refuse
        self._heads: dict[bytes, Head] = {}

    def read(self, data: bytes) -> tuple[Head, int | None]:
        """Read ``data``, one whole head with its empty line: what it says, its length.

        Raises:
            MessageError: the head breaks a rule.
        """
        rest, length = cut_length(data)
        head = self._heads.get(rest)
        if head is None:
            head, length = self._read_anew(rest, length)
        if length is not None and head.chunked:
            raise self._refuse("content-length: given beside transfer-encoding")
        return head, length

    def _read_anew(self, rest: bytes, length: int | None) -> tuple[Head, int | None]:
        head, odd_length = self._parse(rest)
        if odd_length is not None:
            if length is not None:
                raise self._refuse("content-length: given more than once")
            return head, odd_length
        if len(self._heads) >= MAX_KNOWN_HEADS:
            self._heads.clear()
        if len(rest) <= MAX_KNOWN_BYTES:
            self._heads[rest] = head
        return head, length


def cut_length(head: bytes) -> tuple[bytes, int | None]:
    """A head without its Content-Length and that length, if it is written plainly."""
    before, found, after = head.partition(b"\r\nContent-Length: ")
    if not found:
        before, _, after = head.partition(b"\r\ncontent-length: ")
    digits, end, tail = after.partition(b"\r\n")
    folded = tail[:1] in b" \t"  # true as well when nothing follows
    if digits.isdigit() and len(digits) <= MAX_LENGTH_DIGITS and not folded:
        return before + end + tail, int(digits)
    return head, None


def joined(lines: list[bytes], hop_by_hop: set[bytes]) -> bytes:
    """Header lines with their ends, less those of the given lower-case names."""
    if hop_by_hop:
        lines = [
            line for line in lines if line.split(b":", 1)[0].lower() not in hop_by_hop
        ]
    return b"".join([line + b"\r\n" for line in lines])


def connection_tokens(value: bytes) -> tuple[bool | None, set[bytes]]:
    """Whether a Connection header keeps the connection, and headers it names.

    None when it does not say; the names, in lower case, are hop-by-hop.
    """
    tokens = {token.strip() for token in value.lower().split(b",")}
    keep_alive = None
    if b"close" in tokens:
        keep_alive = False
    elif b"keep-alive" in tokens:
        keep_alive = True
    return keep_alive, tokens - {b"close", b"keep-alive", b""}
