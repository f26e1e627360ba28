"""Request heads: parsed strictly with httptools, then written anew for the worker.

Everything that two HTTP implementations could read differently (request smuggling) is
refused: bare CR or LF, folded lines and bad names by httptools; here more than one
length, a length beside chunked, any other transfer coding, a missing or repeated Host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

import httptools

from sgl_router.label import LABEL_HEADER
from sgl_router.wire.errors import MessageError, bad_request
from sgl_router.wire.heads import KnownHeads, connection_tokens, joined

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


class RequestHead:
    """A request's head but for its length, checked; shared by equal heads.

    Attributes:
        method: as sent.
        start: the request line as the worker gets it, without its CRLF.
        path: the target without its query.
        http_10: whether the client speaks HTTP/1.0.
        lines: header lines to pass on, each ending in CRLF; no Host, no framing.
        labels: values of the label headers by lower-case name; None without any.
        chunked: whether the body is chunked.
        keep_alive: whether the client wants the connection kept.
    """

    __slots__ = (
        "authorized",
        "chunked",
        "expect_continue",
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

    def __init__(self, method: bytes, target: bytes, http_10: bool) -> None:
        self.method = method
        self.start = b"%b %b HTTP/1.%d" % (method, target, 0 if http_10 else 1)
        self.path = target.partition(b"?")[0]
        self.http_10 = http_10
        self.keep_alive = not http_10
        self.lines = b""
        self.labels: dict[bytes, bytes] | None = None
        self.request_id: bytes | None = None
        self.target_worker: bytes | None = None
        self.chunked = self.expect_continue = self.authorized = False


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
        self.parse = KnownHeads(self._parse, bad_request).read
        """Reads one whole head with its empty line: what it says, and its length.

        Raises:
            MessageError: the head breaks a rule; ``status`` says which answer it gets.
        """

    def _parse(self, data: bytes) -> tuple[RequestHead, int | None]:
        """Read a head that has not been met yet."""
        try:
            httptools.HttpRequestParser(_SILENT).feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # decided below, from the header itself
        except httptools.HttpParserError as error:
            raise bad_request(f"request head: {error}") from None
        first, *lines = data.split(b"\r\n")
        del lines[-2:]  # the empty line, and nothing after it
        head = _read_start(first)
        return head, self._read_headers(head, lines)

    def _read_headers(self, head: RequestHead, lines: list[bytes]) -> int | None:
        if len(lines) > MAX_HEADERS:
            text = f"headers: more than {MAX_HEADERS}"
            raise MessageError(431, "too_many_headers", text)
        kept: list[bytes] = []
        nominated: set[bytes] = set()
        lengths: list[int] = []
        hosts = 0
        for line in lines:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip(b" \t")
            kind = self._kinds.get(name)
            if kind is None or kind in _PASSED_ON:
                kept.append(line)
            if kind == _HOST:
                hosts += 1
            elif kind == _LENGTH:
                lengths.append(_read_length(value))
            elif kind == _CONNECTION:
                nominated |= _read_connection(head, value)
            elif kind is not None and kind != _DROP:
                _read_special(head, kind, name, value)
        if hosts != 1 and not (head.http_10 and hosts == 0):
            raise bad_request(f"host: {hosts} Host headers; exactly one is needed")
        if len(lengths) > 1:
            raise bad_request("content-length: given more than once")
        head.lines = joined(kept, nominated)
        return lengths[0] if lengths else None


def _read_start(first: bytes) -> RequestHead:
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
    if not _TARGET.fullmatch(target):
        raise bad_request("request target: bytes that a URL may not hold")
    return RequestHead(method, target, version == b"HTTP/1.0")


def _read_special(head: RequestHead, kind: int, name: bytes, value: bytes) -> None:
    """Take what a header says about the message itself."""
    if kind in (_LABEL, _LABEL_KEPT):
        head.labels = head.labels or {}
        head.labels.setdefault(name, value)
    elif kind == _AUTHORIZATION:
        head.authorized = True
    elif kind == _REQUEST_ID:
        head.request_id = value
    elif kind == _CODING:
        _read_coding(head, value)
    elif kind == _TARGET_WORKER:
        head.target_worker = value
    elif kind == _EXPECT:
        if value.lower() != b"100-continue":
            raise MessageError(417, "expect", "expect: only 100-continue is known")
        head.expect_continue = not head.http_10
    elif value.lower() != b"h2c":  # upgrade
        raise MessageError(501, "upgrade", "upgrade: not served here")


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


def _read_connection(head: RequestHead, value: bytes) -> set[bytes]:
    """Read keep-alive and close; gives the headers that are made hop-by-hop."""
    keep_alive, nominated = connection_tokens(value)
    if keep_alive is not None:
        head.keep_alive = keep_alive
    return nominated


def _read_length(value: bytes) -> int:
    if not _DIGITS.fullmatch(value):
        raise bad_request("content-length: not a plain number")
    return int(value)


def _read_coding(head: RequestHead, value: bytes) -> None:
    if head.http_10:
        raise bad_request("transfer-encoding: not part of HTTP/1.0")
    if head.chunked or value.lower() != b"chunked":
        raise bad_request("transfer-encoding: only chunked, once, is allowed")
    head.chunked = True
