"""Request heads: parsed strictly with httptools, then written anew for the worker.

Everything that two HTTP implementations could read differently (request smuggling) is
refused: bare CR or LF, folded lines and bad names by httptools; here more than one
length, a length beside chunked, any other transfer coding, a missing or repeated Host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from sgl_router.label import LABEL_HEADER
from sgl_router.wire.errors import MessageError, bad_request
from sgl_router.wire.lines import (
    MAX_KNOWN_LINE_BYTES,
    MAX_KNOWN_LINES,
    KnownLines,
    Reading,
    Special,
    connection_tokens,
    without,
)

METHODS = frozenset({b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"HEAD", b"OPTIONS"})
"""Methods that are passed on."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that concern one connection only and are never passed on."""

MAX_HEADERS = 128
"""Most header lines of one head."""

_DIGITS = re.compile(rb"[0-9]{1,18}")
_TARGET = re.compile(rb"[\x21\x22\x24-\x7e]+")


# What the parser does with a header; plain integers, as enum members are slow to read.
(
    _DROP,
    _HOST,
    _LENGTH,
    _CODING,
    _CONNECTION,
    _EXPECT,
    _UPGRADE,
    _LABEL,
    _LABEL_KEPT,
    _REQUEST_ID,
    _AUTHORIZATION,
    _TARGET_WORKER,
) = range(12)

_PASSED_ON = frozenset({_LABEL_KEPT, _AUTHORIZATION, _REQUEST_ID})
"""Headers that are read and passed on as well."""


@dataclass(frozen=True, slots=True)
class StartLine:
    """A request line, checked; the fields are those of :class:`RequestHead`."""

    method: bytes
    start: bytes
    path: bytes
    http_10: bool


class RequestHead:
    """A request's head, checked.

    Attributes:
        method: as sent.
        start: the request line as the worker gets it, without its CRLF.
        path: the target without its query.
        http_10: whether the client speaks HTTP/1.0.
        lines: header lines to pass on, each ending in CRLF; no Host, no framing.
        framing: the header line that frames the body for the worker.
        labels: values of the label headers by lower-case name; None without any.
        content_length: bytes of the body when a length was given.
        chunked: whether the body is chunked.
        keep_alive: whether the client wants the connection kept.
    """

    __slots__ = (
        "authorized",
        "chunked",
        "content_length",
        "expect_continue",
        "framing",
        "http_10",
        "keep_alive",
        "labels",
        "lines",
        "method",
        "path",
        "request_id",
        "start",
        "target_worker",
    )

    def __init__(self, start: StartLine, lines: bytes) -> None:
        self.method = start.method
        self.start = start.start
        self.path = start.path
        self.http_10 = start.http_10
        self.keep_alive = not start.http_10
        self.lines = lines
        self.framing = b""
        self.labels: dict[bytes, bytes] | None = None
        self.content_length: int | None = None
        self.request_id: bytes | None = None
        self.target_worker: bytes | None = None
        self.chunked = self.expect_continue = self.authorized = False

    @property
    def has_body(self) -> bool:
        """Whether body bytes follow the head."""
        return self.chunked or bool(self.content_length)


class _Silent:
    """Takes none of httptools' callbacks: the parser only judges."""


_SILENT = _Silent()


class RequestParser:
    """Parses request heads; knows which headers carry the label."""

    def __init__(self, label_headers: Iterable[str] = (LABEL_HEADER,)) -> None:
        kinds = dict.fromkeys(HOP_BY_HOP, _DROP)
        kinds |= {
            b"host": _HOST,
            b"content-length": _LENGTH,
            b"transfer-encoding": _CODING,
            b"connection": _CONNECTION,
            b"expect": _EXPECT,
            b"upgrade": _UPGRADE,
            b"x-request-id": _REQUEST_ID,
            b"authorization": _AUTHORIZATION,
            b"x-smg-target-worker": _TARGET_WORKER,
            LABEL_HEADER.encode(): _DROP,
        }
        for header in label_headers:
            name = header.lower().encode()
            kept = name != LABEL_HEADER.encode()
            kinds[name] = _LABEL_KEPT if kept else _LABEL
        self._kinds = kinds
        self._known = KnownLines(self._read_line)
        self._starts: dict[bytes, StartLine] = {}

    def parse(self, data: bytes) -> RequestHead:
        """Parse ``data``, one whole head with its empty line.

        Raises:
            MessageError: the head breaks a rule; ``status`` says which answer it gets.
        """
        first, *lines = data.split(b"\r\n")
        del lines[-2:]  # the empty line, and nothing after it
        if len(lines) > MAX_HEADERS:
            text = f"headers: more than {MAX_HEADERS}"
            raise MessageError(431, "too_many_headers", text)
        known = self._known
        try:
            start = self._starts[first]
            passed = b"".join(map(known.passed, lines))
        except KeyError:
            return self._parse_anew(data, first, lines)
        specials = filter(None, map(known.special, lines))
        return _assemble(start, passed, specials)

    def _parse_anew(self, data: bytes, first: bytes, lines: list[bytes]) -> RequestHead:
        """Parse a head with lines that have not been met yet."""
        try:
            httptools.HttpRequestParser(_SILENT).feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # decided below, from the header itself
        except httptools.HttpParserError as error:
            raise bad_request(f"request head: {error}") from None
        start = self._starts.get(first) or _read_start(first)
        passed, specials = self._known.learn(lines)
        if len(self._starts) >= MAX_KNOWN_LINES:
            self._starts.clear()
        if len(first) <= MAX_KNOWN_LINE_BYTES:
            self._starts[first] = start
        return _assemble(start, passed, specials)

    def _read_line(self, line: bytes) -> Reading:
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        kind = self._kinds.get(name)
        if kind is None:
            return line + b"\r\n", None
        if kind == _DROP:
            return b"", None
        _check_value(kind, value)
        passed = line + b"\r\n" if kind in _PASSED_ON else b""
        return passed, (_LABEL if kind == _LABEL_KEPT else kind, name, value)


def _assemble(
    start: StartLine, passed: bytes, specials: Iterable[Special]
) -> RequestHead:
    """Put a head together and judge what its lines say in common."""
    head = RequestHead(start, passed)
    hosts = 0
    for kind, name, value in specials:
        if kind == _HOST:
            hosts += 1
        elif kind == _LENGTH:
            if head.content_length is not None:
                raise bad_request("content-length: given more than once")
            head.content_length = int(value)
            head.framing = b"content-length: %d\r\n" % head.content_length
        elif kind == _AUTHORIZATION:
            head.authorized = True
        elif kind == _LABEL:
            labels = head.labels = head.labels or {}
            labels.setdefault(name, value)
        else:
            _apply_rare(head, kind, value)
    if hosts != 1 and not (head.http_10 and hosts == 0):
        raise bad_request(f"host: {hosts} Host headers; exactly one is needed")
    if head.chunked and head.content_length is not None:
        raise bad_request("content-length: given beside transfer-encoding")
    return head


def _read_start(first: bytes) -> StartLine:
    """Read a request line."""
    if not first:
        raise bad_request("request head: empty lines before it")
    method, _, rest = first.partition(b" ")
    target, _, version = rest.rpartition(b" ")
    if version not in (b"HTTP/1.0", b"HTTP/1.1"):
        text = first.decode("ascii", "replace")[-20:]
        raise MessageError(505, "http_version", f"http version: {text!r} refused")
    if method not in METHODS:
        name = method.decode("ascii", "replace")
        raise MessageError(501, "method", f"method: {name} is not served")
    if target[:1] != b"/" and target != b"*":
        target = _origin_form(target)
        first = b" ".join((method, target, version))
    if not _TARGET.fullmatch(target):
        raise bad_request("request target: bytes that a URL may not hold")
    return StartLine(method, first, target.partition(b"?")[0], version == b"HTTP/1.0")


def _check_value(kind: int, value: bytes) -> None:
    """Refuse what no head may say."""
    if kind == _LENGTH and not _DIGITS.fullmatch(value):
        raise bad_request("content-length: not a plain number")
    if kind == _CODING and value.lower() != b"chunked":
        raise bad_request("transfer-encoding: only chunked, once, is allowed")
    if kind == _EXPECT and value.lower() != b"100-continue":
        raise MessageError(417, "expect", "expect: only 100-continue is known")
    if kind == _UPGRADE and value.lower() != b"h2c":
        raise MessageError(501, "upgrade", "upgrade: not served here")


def _apply_rare(head: RequestHead, kind: int, value: bytes) -> None:
    """Take what fewer heads say."""
    if kind == _CONNECTION:
        _read_connection(head, value)
    elif kind == _REQUEST_ID:
        head.request_id = value
    elif kind == _TARGET_WORKER:
        head.target_worker = value
    elif kind == _EXPECT:
        head.expect_continue = not head.http_10
    elif kind == _CODING:
        if head.http_10:
            raise bad_request("transfer-encoding: not part of HTTP/1.0")
        if head.chunked:
            raise bad_request("transfer-encoding: only chunked, once, is allowed")
        head.chunked = True
        head.framing = b"transfer-encoding: chunked\r\n"


def _origin_form(url: bytes) -> bytes:
    """The path and query of an absolute-form target."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise bad_request("request target: not a URL") from None
    if parts.scheme not in (b"http", b"https") or not parts.netloc:
        raise bad_request("request target: neither a path nor an http URL")
    path = parts.path or b"/"
    return path + b"?" + parts.query if parts.query else path


def _read_connection(head: RequestHead, value: bytes) -> None:
    """Read keep-alive, close, and headers that are made hop-by-hop."""
    keep_alive, nominated = connection_tokens(value)
    if keep_alive is not None:
        head.keep_alive = keep_alive
    if nominated:
        head.lines = without(head.lines, nominated)
