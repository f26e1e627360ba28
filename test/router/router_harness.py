"""A scripted worker, a raw HTTP client, and a gateway to put between them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sgl_router.config import HealthSettings, Settings
from sgl_router.gateway import Gateway
from sgl_router.server import running

Answer = Callable[["Seen", "Wire"], Awaitable[None]]

QUICK_HEALTH = HealthSettings(
    interval_s=30.0, startup_interval_s=0.02, success_threshold=1
)


@dataclasses.dataclass
class Seen:
    """A request as the worker saw it."""

    method: str
    target: str
    version: str
    headers: list[tuple[str, str]]
    body: bytes
    gone: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def header(self, name: str) -> str | None:
        """The header's value; None when absent."""
        values = [v for n, v in self.headers if n.lower() == name]
        assert len(values) < 2, f"{name} sent twice: {values}"
        return values[0] if values else None

    @property
    def label(self) -> str | None:
        return self.header("x-smg-routing-key")


class Wire:
    """The worker's end of a connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def respond(
        self, body: bytes = b"{}", status: int = 200, *headers: bytes
    ) -> None:
        """A whole answer with a length."""
        lines = [b"HTTP/1.1 %d Status" % status, b"Content-Length: %d" % len(body)]
        await self.send(b"\r\n".join([*lines, *headers, b"", body]))

    async def start_chunked(self) -> None:
        await self.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_chunked(self) -> None:
        await self.send(b"0\r\n\r\n")

    def cut(self) -> None:
        """Close without another byte."""
        self.writer.transport.abort()


class EndingReader(asyncio.StreamReader):
    """A reader that tells when its connection has ended."""

    def __init__(self) -> None:
        super().__init__(limit=2**22, loop=asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.ended.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.ended.set()


class StubWorker:
    """An HTTP worker whose answers a test scripts; probes are answered by itself."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.probes = 0
        self.running = 0
        self.peak = 0
        self.connections = 0
        self.healthy = True
        self.info: dict[str, Any] = {}
        self.key: str | None = None  # what all but /health asks for, like --api-key
        self.answer: Answer = echo
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, ssl: Any = None) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: asyncio.StreamReaderProtocol(EndingReader(), self._serve),
            "127.0.0.1",
            self.port,
            ssl=ssl,
            backlog=4096,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in tuple(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: EndingReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._open.discard(task)
            writer.close()

    async def _one(self, reader: EndingReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        seen = parse_head(head)
        if seen.target in ("/health", "/server_info", "/get_server_info", "/v1/models"):
            self.probes += 1
            body = json.dumps(self.info).encode()
            status = 200 if self.healthy else 503
            if self.key is not None and seen.target != "/health":
                given = seen.header("authorization")
                status = status if given == f"Bearer {self.key}" else 401
            await Wire(reader, writer).respond(body, status)
            return True
        seen.body = await read_body(reader, seen.headers)
        self.seen.append(seen)
        self.running += 1
        self.peak = max(self.peak, self.running)
        watcher = asyncio.create_task(self._watch(reader, seen))
        try:
            await self.answer(seen, Wire(reader, writer))
        finally:
            self.running -= 1
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        return not writer.transport.is_closing()

    async def _watch(self, reader: EndingReader, seen: Seen) -> None:
        await reader.ended.wait()
        seen.gone.set()


async def echo(seen: Seen, wire: Wire) -> None:
    """Answer with the request's body."""
    await wire.respond(seen.body)


def parse_head(head: bytes) -> Seen:
    lines = head.decode("latin-1").split("\r\n")
    method, target, version = lines[0].split(" ")
    pairs = [line.split(":", 1) for line in lines[1:] if line]
    headers = [(name, value.strip()) for name, value in pairs]
    return Seen(method, target, version, headers, b"")


async def read_body(
    reader: asyncio.StreamReader, headers: list[tuple[str, str]]
) -> bytes:
    named = {name.lower(): value for name, value in headers}
    if named.get("transfer-encoding") == "chunked":
        return await read_chunks(reader)
    return await reader.readexactly(int(named.get("content-length", "0")))


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        if size == 0:
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
            return body
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"


@dataclasses.dataclass
class Reply:
    """An answer as the client saw it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def worker(self) -> str | None:
        return self.headers.get("x-smg-routed-worker-id")


class RawClient:
    """One client connection, byte by byte."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(
        self,
        body: bytes = b"{}",
        *headers: str,
        path: str = "/v1/chat/completions",
        method: str = "POST",
    ) -> None:
        """Send a request with a length."""
        lines = [f"{method} {path} HTTP/1.1", "Host: gateway", *headers]
        lines.append(f"Content-Length: {len(body)}")
        await self.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    async def head(self) -> Reply:
        """An answer's head."""
        async with asyncio.timeout(10):
            data = await self.reader.readuntil(b"\r\n\r\n")
        lines = data.decode("latin-1").split("\r\n")
        pairs = [line.split(":", 1) for line in lines[1:] if line]
        headers = {}
        for name, value in pairs:
            assert name.lower() not in headers, f"{name} sent twice"
            headers[name.lower()] = value.strip()
        return Reply(int(lines[0].split(" ")[1]), headers, b"")

    async def reply(self, *, bodyless: bool = False) -> Reply:
        """A whole answer."""
        async with asyncio.timeout(10):
            return await self._reply(bodyless)

    async def _reply(self, bodyless: bool) -> Reply:
        reply = await self.head()
        if bodyless:
            return reply
        if reply.headers.get("transfer-encoding") == "chunked":
            reply.body = await read_chunks(self.reader)
        elif "content-length" in reply.headers:
            length = int(reply.headers["content-length"])
            reply.body = await self.reader.readexactly(length)
        else:
            reply.body = await self.reader.read()
        return reply

    async def closed(self) -> bytes:
        """What comes before the gateway closes."""
        async with asyncio.timeout(5):
            return await self.reader.read()

    def leave(self) -> None:
        """Close like a client that gave up."""
        self.writer.transport.abort()


class Bench:
    """A gateway with its workers, and clients on demand."""

    def __init__(
        self,
        gateway: Gateway,
        port: int,
        prometheus_port: int,
        workers: list[StubWorker],
    ) -> None:
        self.gateway = gateway
        self.port = port
        self.prometheus_port = prometheus_port
        self.workers = workers
        self._clients: list[RawClient] = []

    @property
    def loads(self) -> list[int]:
        """In-flight count of each worker, in order of registration."""
        return [worker.in_flight for worker in self.gateway.pool.by_url.values()]

    async def client(self, **options: Any) -> RawClient:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=2**22, **options
        )
        client = RawClient(reader, writer)
        self._clients.append(client)
        return client

    async def ask(self, body: bytes = b"{}", *headers: str, **where: str) -> Reply:
        """One request on a connection of its own."""
        client = await self.client()
        await client.post(body, *headers, **where)
        reply = await client.reply(bodyless=where.get("method") == "HEAD")
        client.writer.close()
        return reply

    async def hold(self, label: str, count: int = 1) -> list[RawClient]:
        """``count`` requests of ``label``, sent one after the other and left open."""
        clients = []
        for _ in range(count):
            client = await self.client()
            before = sum(self.loads)
            await client.post(b"{}", f"x-smg-routing-key: {label}")
            await until(lambda before=before: sum(self.loads) > before)
            await until(lambda: sum(self.loads) <= sum(w.running for w in self.workers))
            clients.append(client)
        return clients

    async def settled(self) -> None:
        """Wait until every count is zero."""
        await until(lambda: not self.gateway.exchanges)
        assert all(worker.in_flight == 0 for worker in self.gateway.pool)

    def home(self, label: str) -> int:
        """Index of the label's home worker."""
        urls = list(self.gateway.pool.by_url)
        return urls.index(self.gateway.pool.policy.pick(label, dict.fromkeys(urls, 0)))

    def label_at(self, index: int, start: int = 0) -> str:
        """A label whose home is the worker at ``index``."""
        return next(
            label
            for label in (f"label-{i}" for i in range(start, 10_000))
            if self.home(label) == index
        )

    def close(self) -> None:
        for client in self._clients:
            client.leave()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for ``condition``, looking every millisecond."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def bench(
    workers: int | list[StubWorker] = 2, **settings: Any
) -> AsyncIterator[Bench]:
    """A running gateway before ``workers`` stubs, all of them healthy."""
    stubs = (
        [StubWorker() for _ in range(workers)] if isinstance(workers, int) else workers
    )
    for stub in stubs:
        if not stub.port:
            await stub.start()
    defaults: dict[str, Any] = {
        "port": 0,
        "prometheus_port": 0,
        "access_log": False,
        "health": QUICK_HEALTH,
        "retry_initial_backoff_s": 0.001,
        "shutdown_grace_s": 0.05,
        "worker_urls": tuple(stub.url for stub in stubs),
    }
    try:
        async with running(Settings(**(defaults | settings))) as served:
            made = Bench(served.gateway, served.port, served.prometheus_port, stubs)
            healthy = sum(stub.healthy for stub in stubs)
            await until(lambda: len(served.gateway.pool.loads) == healthy)
            yield made
        made.close()
    finally:
        for stub in stubs:
            await stub.stop()
        await asyncio.sleep(0.001)  # transports close in the loop's next turn
