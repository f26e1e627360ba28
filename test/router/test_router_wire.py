"""Message heads and body framing, against their grammar and against other parsers."""

from __future__ import annotations

import contextlib

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_router.wire.body import ChunkedBody, SizedBody, frame
from sgl_router.wire.errors import MessageError
from sgl_router.wire.heads import cut_length
from sgl_router.wire.request import RequestParser
from sgl_router.wire.response import ResponseError, parse_response

PARSER = RequestParser(["x-smg-routing-key", "x-session-id"])


def head(
    *lines: str, first: str = "POST /generate HTTP/1.1", host: bool = True
) -> bytes:
    given = [first, *(["Host: h"] if host else []), *lines, "", ""]
    return "\r\n".join(given).encode("latin-1")


def test_head_is_split_into_what_is_passed_on_and_what_is_not():
    parsed, length = PARSER.parse(
        head(
            "Content-Length: 12",
            "X-Custom: Kept As Is",
            "Connection: keep-alive, X-Gone",
            "X-Gone: hop",
            "TE: trailers",
            "Keep-Alive: timeout=5",
            "X-SMG-Routing-Key: label",
            "x-session-id: session",
            "Authorization: Bearer t",
            "Proxy-Authorization: secret",
        )
    )
    assert parsed.lines == (
        b"X-Custom: Kept As Is\r\nx-session-id: session\r\nAuthorization: Bearer t\r\n"
    )
    assert parsed.labels == {
        b"x-smg-routing-key": b"label",
        b"x-session-id": b"session",
    }
    assert (length, parsed.chunked) == (12, False)
    assert parsed.authorized
    assert parsed.keep_alive


@pytest.mark.parametrize(
    ("lines", "keep_alive"),
    [((), True), (("Connection: close",), False), (("Connection: Keep-Alive",), True)],
)
def test_keep_alive_of_http_11(lines, keep_alive):
    assert PARSER.parse(head(*lines))[0].keep_alive is keep_alive


def test_http_10_is_not_kept_unless_it_asks():
    first = "GET / HTTP/1.0"
    assert not PARSER.parse(head(first=first, host=False))[0].keep_alive
    assert PARSER.parse(head("Connection: keep-alive", first=first))[0].keep_alive


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v1/models?x=1", b"/v1/models"),
        ("http://other:80/generate?a=b", b"/generate"),
        ("http://other", b"/"),
        ("*", b"*"),
    ],
)
def test_target_forms(target, path):
    assert PARSER.parse(head(first=f"OPTIONS {target} HTTP/1.1"))[0].path == path


REFUSED_HEADS = {
    "two lengths": (400, head("Content-Length: 1", "Content-Length: 2")),
    "the same length twice": (400, head("Content-Length: 1", "Content-Length: 1")),
    "list of lengths": (400, head("Content-Length: 1, 1")),
    "signed length": (400, head("Content-Length: +1")),
    "negative length": (400, head("Content-Length: -1")),
    "hex length": (400, head("Content-Length: 0x1")),
    "empty length": (400, head("Content-Length:")),
    "length with inner space": (400, head("Content-Length: 1 0")),
    "enormous length": (400, head("Content-Length: " + "9" * 30)),
    "length beside chunked": (
        400,
        head("Content-Length: 1", "Transfer-Encoding: chunked"),
    ),
    "chunked beside length": (
        400,
        head("Transfer-Encoding: chunked", "Content-Length: 1"),
    ),
    "chunked twice": (
        400,
        head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    ),
    "chunked not last": (400, head("Transfer-Encoding: chunked, gzip")),
    "two codings": (400, head("Transfer-Encoding: gzip, chunked")),
    "identity": (400, head("Transfer-Encoding: identity")),
    "quoted chunked": (400, head('Transfer-Encoding: "chunked"')),
    "chunked with vertical tab": (400, head("Transfer-Encoding: \x0bchunked")),
    "xchunked": (400, head("Transfer-Encoding: xchunked")),
    "space before colon": (400, head("Transfer-Encoding : chunked")),
    "tab before colon": (400, head("Content-Length\t: 1")),
    "folded header": (400, head("Transfer-Encoding:\r\n chunked")),
    "folded by tab": (400, head("X: a\r\n\tb")),
    "first header folded": (400, head(" X: a", host=False) + b""),
    "bare LF": (400, b"POST / HTTP/1.1\nHost: h\r\n\r\n"),
    "bare LF in header": (400, head("X: a\nTransfer-Encoding: chunked")),
    "bare CR in header": (400, head("X: a\rTransfer-Encoding: chunked")),
    "NUL in header": (400, head("X: a\0b")),
    "no Host": (400, head(host=False)),
    "two Hosts": (400, head("Host: other")),
    "no header name": (400, head(": x")),
    "name with a space": (400, head("Content Length: 1")),
    "name not ASCII": (400, head("X-\xe9: 1")),
    "header without colon": (400, head("garbage")),
    "chunked in HTTP/1.0": (
        400,
        head("Transfer-Encoding: chunked", first="POST / HTTP/1.0"),
    ),
    "HTTP/0.9": (505, b"GET /\r\n\r\n"),
    "HTTP/2 preface": (505, b"PRI * HTTP/2.0\r\n\r\n"),
    "HTTP/1.2": (400, head(first="GET / HTTP/1.2")),
    "lower-case http": (400, head(first="GET / http/1.1")),
    "space in target": (400, head(first="GET /a b HTTP/1.1")),
    "fragment in target": (400, head(first="GET /a#b HTTP/1.1")),
    "control byte in target": (400, head(first="GET /\x01 HTTP/1.1")),
    "high byte in target": (400, head(first="GET /\xff HTTP/1.1")),
    "relative target": (400, head(first="GET a HTTP/1.1")),
    "other scheme": (400, head(first="GET ftp://a/ HTTP/1.1")),
    "CONNECT": (501, head(first="CONNECT a:80 HTTP/1.1")),
    "TRACE": (501, head(first="TRACE / HTTP/1.1")),
    "unknown method": (400, head(first="BREW / HTTP/1.1")),
    "lower-case method": (400, head(first="post / HTTP/1.1")),
    "websocket": (501, head("Connection: upgrade", "Upgrade: websocket")),
    "other expectation": (417, head("Expect: 200-maybe")),
    "too many headers": (431, head(*(f"x-{i}: 1" for i in range(200)))),
}


@pytest.mark.parametrize("name", REFUSED_HEADS)
def test_refused_heads(name):
    status, data = REFUSED_HEADS[name]
    with pytest.raises(MessageError) as caught:
        PARSER.parse(data)
    assert caught.value.status == status


LINES = [
    "Content-Length: 3",
    "content-length: 3",
    "CONTENT-LENGTH: 3",
    "Content-Length:3",
    "Content-Length:  3",
    "Content-Length: 3 ",
    "Content-Length: 03",
    "Content-Length: x",
    "Content-Length: ",
    " 4",
    "\t4",
    "",
    "Host: h",
    "X-Content-Length: 3",
    "Transfer-Encoding: chunked",
    "Connection: close",
    "Connection: x-a",
    "X-A: 1",
    "x-smg-routing-key: a",
    "Expect: 100-continue",
]


def reading(parser, data):
    """What a parser makes of a head: everything it read, or how it refused it."""
    try:
        parsed, length = parser.parse(data)
    except MessageError as error:
        return error.status, error.code
    names = (name for name in dir(parsed) if not name.startswith("_"))
    return {name: getattr(parsed, name) for name in names}, length


@given(st.lists(st.lists(st.sampled_from(LINES), max_size=5), max_size=8), st.data())
def test_a_head_met_before_is_read_as_for_the_first_time(heads, data):
    first = data.draw(st.sampled_from(["POST / HTTP/1.1", "POST / HTTP/1.0"]))
    parser = RequestParser(["x-smg-routing-key"])
    for lines in heads:
        message = head(*lines, first=first, host=data.draw(st.booleans()))
        message = message[: message.find(b"\r\n\r\n") + 4]
        fresh = reading(RequestParser(["x-smg-routing-key"]), message)
        assert reading(parser, message) == fresh
        assert reading(parser, message) == fresh


@pytest.mark.parametrize("name", REFUSED_HEADS)
def test_a_refused_head_is_refused_again(name):
    parser = RequestParser()
    for _ in range(2):
        with pytest.raises(MessageError):
            parser.parse(REFUSED_HEADS[name][1])


@given(st.lists(st.sampled_from(LINES), max_size=6))
def test_cutting_the_length_out_hides_nothing(lines):
    message = head(*lines)
    message = message[: message.find(b"\r\n\r\n") + 4]
    rest, length = cut_length(message)
    if length is None:
        assert rest == message
        return
    removed = next(
        line
        for line in message.split(b"\r\n")
        if line not in rest.split(b"\r\n")
        or message.split(b"\r\n").count(line) > rest.split(b"\r\n").count(line)
    )
    assert removed.lower() == b"content-length: %d" % length or removed.endswith(b"03")
    assert len(rest) == len(message) - len(removed) - 2


token = st.text("abcXYZ019!#$%&'*+-.^_`|~", min_size=1, max_size=12)
value = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30)


@given(st.lists(st.tuples(token, value), max_size=8))
def test_what_is_accepted_is_read_as_h11_reads_it(pairs):
    data = head(*(f"{name}: {text}" for name, text in pairs))
    try:
        parsed, length = PARSER.parse(data)
    except MessageError:
        return
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(data)
    event = peer.next_event()
    assert isinstance(event, h11.Request)
    lengths = [v for n, v in event.headers if n == b"content-length"]
    assert length == (int(lengths[0]) if lengths else None)
    assert parsed.start == b"%b %b HTTP/1.1" % (event.method, event.target)


@given(st.binary(max_size=200))
def test_any_bytes_as_a_head_are_parsed_or_refused(data):
    for candidate in (data, data + b"\r\n\r\n", b"POST / HTTP/1.1\r\n" + data):
        with contextlib.suppress(MessageError):
            PARSER.parse(candidate)


@st.composite
def chunked_messages(draw):
    """A chunked body: its wire bytes and its payload."""
    wire, payload = b"", b""
    for data in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6)):
        size = b"%x" % len(data)
        size = draw(st.sampled_from([size, size.upper(), b"000" + size]))
        extension = draw(st.sampled_from([b"", b";a=b", b"; x", b';q="s"']))
        wire += size + extension + b"\r\n" + data + b"\r\n"
        payload += data
    trailer = draw(st.sampled_from([b"", b"x-sum: 1\r\n", b"a: b\r\nc:\r\n"]))
    return wire + b"0\r\n" + trailer + b"\r\n", payload


@given(chunked_messages(), st.binary(max_size=20), st.data())
def test_chunked_end_is_found_however_the_bytes_arrive(message, rest, data):
    wire, payload = message
    stream = wire + rest
    body, spans, used, position = ChunkedBody(), [], 0, 0
    while position < len(stream) and not body.done:
        step = data.draw(st.integers(1, len(stream) - position))
        used += body.feed(stream[position : position + step], spans)
        position += step
    assert body.done
    assert used == len(wire)
    assert b"".join(spans) == payload


@given(chunked_messages())
def test_chunked_bodies_are_read_as_h11_reads_them(message):
    wire, payload = message
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(head("Transfer-Encoding: chunked") + wire)
    peer.next_event()
    read = b""
    while isinstance(event := peer.next_event(), h11.Data):
        read += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert read == payload


REFUSED_CHUNKS = {
    "no size": b"\r\n",
    "not hex": b"g\r\n",
    "signed": b"+1\r\na\r\n0\r\n\r\n",
    "negative": b"-1\r\n",
    "0x": b"0x1\r\na\r\n0\r\n\r\n",
    "underscore": b"1_0\r\n",
    "leading space": b" 1\r\na\r\n",
    "trailing space": b"1 \r\na\r\n",
    "space before extension": b"1 ;a\r\na\r\n",
    "bare LF after size": b"1\na\r\n0\r\n\r\n",
    "bare CR in extension": b"1;a\rb\r\na\r\n0\r\n\r\n",
    "NUL in extension": b"1;\0\r\na\r\n",
    "data longer than size": b"1\r\nab\r\n0\r\n\r\n",
    "LF after data": b"1\r\na\n0\r\n\r\n",
    "no CRLF after data": b"1\r\na0\r\n\r\n",
    "size overflow": b"11111111111111111\r\n",
    "endless line": b"1;" + b"a" * 2000,
    "trailer without colon": b"0\r\nx\r\n\r\n",
    "length in trailer": b"0\r\nContent-Length: 1\r\n\r\n",
    "coding in trailer": b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "folded trailer": b"0\r\na: b\r\n c\r\n\r\n",
    "bare LF end": b"0\r\n\n",
    "endless trailers": b"0\r\n" + b"a: b\r\n" * 3000,
}


@pytest.mark.parametrize("name", REFUSED_CHUNKS)
def test_refused_chunks(name):
    data = REFUSED_CHUNKS[name]
    with pytest.raises(MessageError):
        ChunkedBody().feed(data)
    with pytest.raises(MessageError):
        feed_bytewise(data)


def feed_bytewise(data):
    body = ChunkedBody()
    for i in range(len(data)):
        body.feed(data[i : i + 1])


@given(st.binary(max_size=300))
def test_any_bytes_as_chunks_end_or_are_refused(data):
    body = ChunkedBody()
    try:
        used = body.feed(data)
    except MessageError:
        return
    assert used <= len(data)
    assert body.done or used == len(data)


@given(st.integers(0, 100), st.lists(st.integers(1, 40), max_size=10))
def test_sized_body_takes_exactly_its_length(length, steps):
    body = SizedBody(length)
    taken = sum(body.feed(b"x" * step) for step in steps)
    assert taken == min(length, sum(steps))
    assert body.done == (sum(steps) >= length)


def test_no_framing_means_no_body():
    assert frame(chunked=False, content_length=None).done
    assert frame(chunked=False, content_length=0).done


def test_response_head_is_read():
    parsed, length = parse_response(
        b"HTTP/1.1 200 All Right\r\nServer: s\r\nx-smg-routed-worker-id: forged\r\n"
        b"x-smg-error-code: forged\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
    )
    assert (parsed.status, parsed.start) == (200, b"HTTP/1.1 200 All Right")
    assert parsed.lines == b"Server: s\r\n"
    assert length == 3
    assert not parsed.keep_alive


@pytest.mark.parametrize(
    ("status", "bodyless"), [(200, False), (204, True), (304, True), (103, True)]
)
def test_answers_without_a_body(status, bodyless):
    parsed, _ = parse_response(b"HTTP/1.1 %d X\r\nContent-Length: 3\r\n\r\n" % status)
    assert parsed.bodyless is bodyless


@given(st.binary(max_size=200))
def test_any_bytes_as_an_answer_are_parsed_or_refused(data):
    for candidate in (data + b"\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + data + b"\r\n\r\n"):
        with contextlib.suppress(ResponseError):
            parse_response(candidate)
