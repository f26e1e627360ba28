"""A plain ASGI + aiohttp proxy: slow, short, and the oracle of the contract tests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvicorn
from yarl import URL

HOP = {b"connection", b"keep-alive", b"te", b"transfer-encoding", b"upgrade", b"host"}


class OracleProxy:
    """Sends every request to one worker and streams the answer back."""

    def __init__(self, worker_url: str, session: aiohttp.ClientSession) -> None:
        self._worker_url = worker_url
        self._session = session

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        gone = asyncio.Event()
        ended = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            while (message := await receive())["type"] == "http.request":
                yield message.get("body", b"")
                if not message.get("more_body"):
                    ended.set()
                    return
            gone.set()

        async def watch() -> None:
            await ended.wait()
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        proxied = asyncio.create_task(self._proxy(scope, body(), send))
        watching = asyncio.create_task(watch())
        leaving = asyncio.create_task(gone.wait())
        await asyncio.wait({proxied, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (proxied, watching, leaving):
            if not task.done():
                task.cancel()
        await asyncio.gather(proxied, watching, leaving, return_exceptions=True)

    async def _proxy(self, scope: Any, body: AsyncIterator[bytes], send: Any) -> None:
        headers = [
            (n.decode(), v.decode("latin-1"))
            for n, v in scope["headers"]
            if n not in HOP
        ]
        target = scope["raw_path"].decode()
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode()
        has_body = any(
            n in (b"content-length", b"transfer-encoding") for n, _ in scope["headers"]
        )
        async with self._session.request(
            scope["method"],
            URL(self._worker_url + target, encoded=True),
            headers=headers,
            data=body if has_body else None,
        ) as answer:
            kept = [
                (n.lower(), v) for n, v in answer.raw_headers if n.lower() not in HOP
            ]
            await send(
                {
                    "type": "http.response.start",
                    "status": answer.status,
                    "headers": kept,
                }
            )
            async for data in answer.content.iter_any():
                await send(
                    {"type": "http.response.body", "body": data, "more_body": True}
                )
            await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def oracle(worker_url: str) -> AsyncIterator[int]:
    """The port of a running oracle before one worker."""
    sock = socket.create_server(("127.0.0.1", 0))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, auto_decompress=False
    ) as session:
        config = uvicorn.Config(
            OracleProxy(worker_url, session),
            lifespan="off",
            log_config=None,
            access_log=False,
            date_header=False,
            server_header=False,
            ws="none",
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield sock.getsockname()[1]
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for listener in server.servers:
                listener.close()
            for connection in tuple(server.server_state.connections):
                connection.transport.abort()
