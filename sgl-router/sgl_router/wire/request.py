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
    """A request's head, checked.

    Attributes:
        method: as sent.
        start: the request line as the worker gets it, without its CRLF.
        path: the target without its query.
        lines: header lines to pass on, each ending in CRLF; no Host, no framing.
        labels: values of the label headers by lower-case name; None without any.
        content_length: bytes of the body when a length was given.
        chunked: whether the body is chunked.
        keep_alive: whether the client wants the connection kept.
        http_10: whether the client speaks HTTP/1.0.
    """

    method: bytes
    start: bytes
    path: bytes
    lines: bytes
    labels: dict[bytes, bytes] | None = None
    content_length: int | None = None
    chunked = False
    keep_alive = True
    http_10 = False
    expect_continue = False
    request_id: bytes | None = None
    authorized = False
    target_worker: bytes | None = None

    @property
    def has_body(self) -> bool:
        """Whether body bytes follow the head."""
        return self.chunked or bool(self.content_length)

    @property
    def framing(self) -> bytes:
        """The header line that frames the body for the worker."""
        if self.content_length is not None:
            return b"content-length: %d\r\n" % self.content_length
        return b"transfer-encoding: chunked\r\n" if self.chunked else b""


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

    def parse(self, data: bytes) -> RequestHead:
        """Parse ``data``, one whole head with its empty line.

        Raises:
            MessageError: the head breaks a rule; ``status`` says which answer it gets.
        """
        parser = httptools.HttpRequestParser(_SILENT)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # decided below, from the header itself
        except httptools.HttpParserError as error:
            raise bad_request(f"request head: {error}") from None
        first, *lines = data.split(b"\r\n")
        del lines[-2:]  # the empty line, and nothing after it
        if not first:
            raise bad_request("request head: empty lines before it")
        head = RequestHead()
        head.method, _, rest = first.partition(b" ")
        target, _, version = rest.rpartition(b" ")
        if version == b"HTTP/1.0":
            head.http_10 = True
            head.keep_alive = False
        elif version != b"HTTP/1.1":
            text = first.decode("ascii", "replace")[-20:]
            raise MessageError(505, "http_version", f"http version: {text!r} refused")
        if head.method not in METHODS:
            name = head.method.decode("ascii", "replace")
            raise MessageError(501, "method", f"method: {name} is not served")
        if target[:1] != b"/" and target != b"*":
            target = _origin_form(target)
            first = b" ".join((head.method, target, version))
        if not _TARGET.fullmatch(target):
            raise bad_request("request target: bytes that a URL may not hold")
        head.start = first
        head.path = target.partition(b"?")[0]
        self._read_headers(head, lines)
        return head

    def _read_headers(self, head: RequestHead, lines: list[bytes]) -> None:
        if len(lines) > MAX_HEADERS:
            raise MessageError(
                431, "too_many_headers", f"headers: more than {MAX_HEADERS}"
            )
        kept: list[bytes] = []
        kinds = self._kinds
        nominated: set[bytes] | None = None
        hosts = 0
        for line in lines:
            name, _, value = line.partition(b":")
            kind = kinds.get(name.lower())
            if kind is None:
                kept.append(line)
            elif kind == _HOST:
                hosts += 1
            elif kind == _CONNECTION:
                nominated = _connection_tokens(head, value.strip(), nominated)
            elif kind != _DROP:
                _read_special(head, kind, name, value.strip(b" \t"))
                if kind in _PASSED_ON:
                    kept.append(line)
        if hosts != 1 and not (head.http_10 and hosts == 0):
            raise bad_request(f"host: {hosts} Host headers; exactly one is needed")
        if head.chunked and head.content_length is not None:
            raise bad_request("content-length: given beside transfer-encoding")
        if nominated:
            kept = [
                line for line in kept if line.split(b":", 1)[0].lower() not in nominated
            ]
        kept.append(b"")
        head.lines = b"\r\n".join(kept)


def _read_special(head: RequestHead, kind: int, name: bytes, value: bytes) -> None:
    """Take what a header says about the message itself."""
    if kind == _LENGTH:
        _read_length(head, value)
    elif kind in (_LABEL, _LABEL_KEPT):
        head.labels = head.labels or {}
        head.labels.setdefault(name.lower(), value)
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


def _connection_tokens(
    head: RequestHead, value: bytes, nominated: set[bytes] | None
) -> set[bytes] | None:
    """Read Connection: keep-alive, close, and headers it makes hop-by-hop."""
    lowered = value.lower()
    if lowered == b"keep-alive":
        head.keep_alive = True
        return nominated
    for token in (token.strip() for token in lowered.split(b",")):
        if token == b"close":
            head.keep_alive = False
        elif token == b"keep-alive":
            head.keep_alive = True
        elif token:
            nominated = nominated or set()
            nominated.add(token)
    return nominated


def _read_length(head: RequestHead, value: bytes) -> None:
    if head.content_length is not None:
        raise bad_request("content-length: given more than once")
    if not _DIGITS.fullmatch(value):
        raise bad_request("content-length: not a plain number")
    head.content_length = int(value)


def _read_coding(head: RequestHead, value: bytes) -> None:
    if head.http_10:
        raise bad_request("transfer-encoding: not part of HTTP/1.0")
    if head.chunked or value.lower() != b"chunked":
        raise bad_request("transfer-encoding: only chunked, once, is allowed")
    head.chunked = True
