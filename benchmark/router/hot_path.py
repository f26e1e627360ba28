"""What the gateway's own code costs per request: no sockets, no kernel, no event loop.

A client's and a worker's connection are driven by hand with transports that drop what
is written, so that only our code and the parsers run. The best of many short rounds is
quite repeatable, also on a busy machine; use it to see whether a change helps.

    python benchmark/router/hot_path.py
    PYTHONPATH=build/bench-router/compiled python benchmark/router/hot_path.py
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import time

from sgl_router import exchange
from sgl_router.access_log import AccessLog
from sgl_router.client import ClientConnection
from sgl_router.config import parse_settings
from sgl_router.gateway import Gateway
from sgl_router.upstream import Backend, UpstreamConnection

WORKERS = ("http://127.0.0.1:1", "http://127.0.0.1:2")
LABELS = 1000
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 318\r\n\r\n"
    + b" " * 318
)


class Nowhere:
    """A transport whose other side takes everything and says nothing."""

    def write(self, data: bytes) -> None:
        pass

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, name: str) -> None:
        return None


def request(number: int) -> bytes:
    """A request of about 1 kB; labels repeat, lengths differ."""
    body = b'{"model":"stub","messages":[]}'.ljust(1000 + number % 64)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        "Content-Type: application/json\r\nAccept: */*\r\nUser-Agent: load\r\n"
        f"Authorization: Bearer none\r\nx-smg-routing-key: label-{number:03d}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def gateway_without_sockets() -> tuple[Gateway, ClientConnection, AccessLog]:
    """A gateway with everything on, one client and an idle connection to each worker."""
    settings = parse_settings(["--worker-urls", *WORKERS, "--policy", "lbch"])
    log = AccessLog(io.StringIO())
    gateway = Gateway(settings, Backend("http://control"), access_log=log)
    for url in WORKERS:
        worker = gateway.add_worker(url)
        worker.set_healthy(True)
        connection = UpstreamConnection(worker.backend)
        connection.connection_made(Nowhere())
        worker.backend.give_back(connection, 0.0)
    client = ClientConnection(gateway)
    client.connection_made(Nowhere())
    return gateway, client, log


def serve(client: ClientConnection, data: bytes) -> None:
    """One request and its answer."""
    client.data_received(data)
    under_way = client.exchange
    assert under_way is not None
    connection = under_way.connection
    assert connection is not None
    connection.data_received(ANSWER)
    assert client.exchange is None


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="of 1,000 requests each")
    rounds = parser.parse_args().rounds
    gateway, client, log = gateway_without_sockets()
    requests = [request(number) for number in range(LABELS)]
    gc.freeze()
    gc.disable()
    best_s = float("inf")
    for _ in range(rounds):
        start_s = time.process_time()
        for data in requests:
            serve(client, data)
        best_s = min(best_s, time.process_time() - start_s)
        gateway.sweep(time.monotonic())
    log.close()
    kind = "interpreted" if exchange.__file__.endswith(".py") else "compiled"
    print(f"{best_s / LABELS * 1e6:.1f} microseconds a request, {kind}")


if __name__ == "__main__":
    asyncio.run(main())
