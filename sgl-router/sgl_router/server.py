"""Starting and stopping: sockets, TLS, the loop, and the order of a shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import cast

import aiohttp
import uvicorn

from sgl_router import exchange
from sgl_router.access_log import AccessLog
from sgl_router.client import ClientConnection
from sgl_router.config import Settings, SettingsError, TlsSettings
from sgl_router.control import control_app, metrics_app
from sgl_router.gateway import Gateway
from sgl_router.probes import BackgroundTasks, Prober
from sgl_router.upstream import Backend
from sgl_router.workers import Worker

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 4096
"""Connections that may wait to be accepted."""

GC_THRESHOLDS = (50_000, 20, 1000)
"""Requests leave no cycles behind; full collections would only stall streams."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
KEPT_BLOCK_BYTES = 4 * 1024 * 1024
KEPT_FREE_BYTES = 32 * 1024 * 1024


class StartError(Exception):
    """The gateway cannot start; the message is one line for the user."""


class RunningGateway:
    """A gateway that serves: where it listens, and its inner state."""

    def __init__(self, gateway: Gateway, port: int, prometheus_port: int) -> None:
        self.gateway = gateway
        self.port = port
        self.prometheus_port = prometheus_port


class _QuietServer(uvicorn.Server):
    """uvicorn inside our loop: our process owns the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A bound socket.

    Raises:
        StartError: the address is taken or not ours.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartError(f"{flag}: cannot listen on {host}:{port}: {reason}") from None
    sock.setblocking(False)
    return sock


def server_tls(tls: TlsSettings) -> ssl.SSLContext | None:
    """How clients are spoken to; None for plain http."""
    if tls.cert_path is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(context, "--tls-cert-path", tls.cert_path, tls.key_path)
    return context


def worker_tls(tls: TlsSettings) -> ssl.SSLContext:
    """How https workers are spoken to."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    if tls.ca_cert_paths:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for path in tls.ca_cert_paths:
            try:
                context.load_verify_locations(path)
            except (OSError, ssl.SSLError) as error:
                raise SettingsError(f"--ca-cert-paths: {path}: {error}") from None
    if tls.client_cert_path is not None:
        _load(context, "--client-cert-path", tls.client_cert_path, tls.client_key_path)
    return context


def _load(context: ssl.SSLContext, flag: str, cert: str, key: str | None) -> None:
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"{flag}: {cert}: {error}") from None


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[RunningGateway]:
    """Serve for as long as the block runs; then finish what runs and close.

    Raises:
        StartError: an address cannot be listened on, or a worker that must be
            reachable at the start is not.
        SettingsError: a certificate cannot be read.
    """
    client_tls = server_tls(settings.tls)
    tls_to_workers = functools.cache(lambda: worker_tls(settings.tls))
    if any(url.startswith("https:") for url in settings.worker_urls):
        tls_to_workers()  # a bad file is told before anything starts
    async with contextlib.AsyncExitStack() as stack:
        sockets = [listen(settings.host, settings.port, "--port")]
        stack.callback(sockets[0].close)
        prometheus_host = settings.prometheus_host or settings.host
        prometheus = listen(
            prometheus_host, settings.prometheus_port, "--prometheus-port"
        )
        stack.callback(prometheus.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl-router-"))
        control_path = os.path.join(folder, "control.sock")
        access_log = AccessLog(sys.stderr) if settings.access_log else None
        if access_log is not None:
            stack.callback(access_log.close)
        gateway = Gateway(
            settings,
            Backend("http://control", unix_path=control_path),
            worker_tls=tls_to_workers,
            access_log=access_log,
        )
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        prober = Prober(settings.health, session, settings.api_key)
        workers = [gateway.add_worker(url) for url in settings.worker_urls]
        await _require_workers(prober, workers)
        await _serve_control(gateway, session, control_path, prometheus, stack)
        tasks = BackgroundTasks()
        stack.push_async_callback(tasks.stop)
        await tasks.started()
        prober.begin(tasks)
        gateway.prober = prober
        for worker in workers:
            prober.watch(worker)
        tasks.start(gateway.sweep_forever())
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: cast(asyncio.Protocol, ClientConnection(gateway)),
            sock=sockets[0],
            ssl=client_tls,
            backlog=LISTEN_BACKLOG,
        )
        try:
            yield RunningGateway(
                gateway, sockets[0].getsockname()[1], prometheus.getsockname()[1]
            )
        finally:
            await _finish(gateway, server)


async def _require_workers(prober: Prober, workers: list[Worker]) -> None:
    """With no time to come up, a worker that is down now is an error."""
    if prober.settings.startup_timeout_s > 0 or prober.settings.disabled:
        return
    for worker in workers:
        failure = await prober.probe(worker)
        if failure is not None:
            raise StartError(f"--worker-urls: {worker.url} is unreachable ({failure})")
        await prober.read_report(worker)
        worker.set_healthy(True)


async def _serve_control(
    gateway: Gateway,
    session: aiohttp.ClientSession,
    path: str,
    prometheus: socket.socket,
    stack: contextlib.AsyncExitStack,
) -> None:
    """Serve the control app on a private socket and metrics on their port."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stack.callback(control.close)
    control.bind(path)
    control.listen(128)
    control.setblocking(False)
    for app, sock in (
        (control_app(gateway, session), control),
        (metrics_app(gateway), prometheus),
    ):
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=60,
            ws="none",
        )
        server = _QuietServer(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        stack.push_async_callback(_stop_control, server, serving)


async def _stop_control(server: _QuietServer, serving: asyncio.Task[None]) -> None:
    serving.cancel()  # quicker than its own way out, which waits for a tick
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    for listener in getattr(server, "servers", []):
        listener.close()
    for connection in tuple(server.server_state.connections):
        if connection.transport is not None:
            connection.transport.abort()


async def _finish(gateway: Gateway, server: asyncio.Server) -> None:
    """Stop taking requests, let running ones end, then cut what is left."""
    gateway.ready = False
    await asyncio.sleep(gateway.settings.drain_settle_s)
    gateway.closing = True
    server.close()
    gateway.close_idle_clients()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(gateway.settings.shutdown_grace_s):
            await gateway.drained()
    gateway.close_idle_clients()
    await asyncio.sleep(0)
    gateway.abort_all()
    gateway.control_backend.close()
    await asyncio.sleep(0.01)


def keep_freed_memory() -> None:
    """Have malloc reuse the buffers of large bodies instead of returning them.

    Returned and taken again, every page of them would have to be zeroed anew. Does
    nothing where the C library has no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE_BYTES)


def warn_if_open(settings: Settings) -> None:
    """Say so when others on the network may change the workers."""
    local = settings.host == "localhost" or settings.host.startswith(("127.", "::1"))
    if not local and settings.control_plane_api_key is None:
        log.warning(
            "--host %s: whoever reaches this port can add and remove workers; "
            "set --control-plane-api-key",
            settings.host,
        )


async def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    async with running(settings) as running_gateway:
        scheme = "https" if settings.tls.cert_path else "http"
        log.info(
            "gateway on %s://%s:%d, metrics on port %d, policy %s, %d workers, "
            "routing key from %s, data path %s",
            scheme,
            settings.host,
            running_gateway.port,
            running_gateway.prometheus_port,
            settings.policy,
            len(settings.worker_urls),
            ", ".join(settings.routing_key_headers),
            "interpreted" if exchange.__file__.endswith(".py") else "compiled",
        )
        warn_if_open(settings)
        keep_freed_memory()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        await stop.wait()
        log.info(
            "stopping: %d requests are running", len(running_gateway.gateway.exchanges)
        )
