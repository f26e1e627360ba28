"""The state that all connections share, and the housekeeping around it."""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from sgl_router.access_log import AccessLog
from sgl_router.admission import Admission
from sgl_router.config import Settings
from sgl_router.exchange import BUSY, Exchange
from sgl_router.labels import LabelReader
from sgl_router.metrics import Counts
from sgl_router.routes import Routes
from sgl_router.upstream import Backend
from sgl_router.wire.errors import MessageError
from sgl_router.wire.request import RequestParser
from sgl_router.workers import Worker, WorkerPool

if TYPE_CHECKING:
    from sgl_router.client import ClientConnection
    from sgl_router.probes import Prober

SWEEP_S = 0.1
"""Seconds between looks at time-outs: their precision."""


class Gateway:
    """One gateway: its workers, limits, counts and live requests.

    Args:
        settings: what the command line gave.
        control_backend: answers the gateway's own routes.
        worker_tls: makes what https workers are spoken to with; called when needed.
        access_log: gets a line per request; None for no lines.
    """

    def __init__(
        self,
        settings: Settings,
        control_backend: Backend,
        *,
        worker_tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        access_log: AccessLog | None = None,
    ) -> None:
        self.settings = settings
        self.control_backend = control_backend
        self.access_log = access_log
        self.pool = WorkerPool(settings.make_policy(), settings.breaker)
        self.parser = RequestParser(settings.routing_key_headers)
        self.routes = Routes()
        self.counts = Counts()
        self.labels = LabelReader(
            settings.routing_key_headers,
            required=settings.require_routing_key,
            from_body=settings.routing_key_from_body,
            from_content=settings.routing_key_from_content,
        )
        self.admission = Admission(
            settings.max_concurrent_requests,
            settings.queue_size,
            settings.queue_timeout_s,
            settings.rate_limit_per_s,
        )
        self.may_read_body = self.pool.policy.needs_text or self.labels.may_read_body
        """Whether any request's body is read before a worker is picked."""
        self.exchanges: set[Exchange] = set()
        self.clients: set[ClientConnection] = set()
        self.prober: Prober | None = None
        self.ready = True
        self.closing = False
        self._idle = asyncio.Event()
        self._worker_tls = worker_tls
        self._random = random.Random(settings.retry_seed)
        self._request_ids = itertools.count(1)
        self._id_prefix = uuid.uuid4().hex[:12].encode() + b"-"

    def now_s(self) -> float:
        """The clock of all durations."""
        return time.monotonic()

    def next_request_id(self) -> bytes:
        """An id for a request that came without one."""
        return b"%b%d" % (self._id_prefix, next(self._request_ids))

    def add_worker(self, url: str, api_key: str | None = None) -> Worker:
        """Register a worker; it is picked once a probe has found it healthy.

        Raises:
            WorkerError: the URL is registered already.
        """
        tls = self._worker_tls() if url.startswith("https:") else None
        backend = Backend(url, tls=tls, api_key=api_key or self.settings.api_key)
        worker = self.pool.add(url, backend)
        if self.prober is not None:
            self.prober.watch(worker)
        return worker

    def reads_body(self, exchange: Exchange) -> bool:
        """Whether the body must be read before a worker can be picked."""
        return self.pool.policy.needs_text or self.labels.reads_body(exchange)

    def backoff_s(self, attempts: int) -> float:
        """Seconds to wait before the retry that follows ``attempts`` attempts."""
        settings = self.settings
        delay_s = settings.retry_initial_backoff_s * (
            settings.retry_backoff_multiplier ** (attempts - 1)
        )
        jitter = self._random.uniform(-1.0, 1.0) * settings.retry_jitter_factor
        self.counts.retries += 1
        return min(delay_s, settings.retry_max_backoff_s) * (1.0 + jitter)

    # What the data path reports.

    def worker_answered(self, worker: Worker, status: int) -> None:
        """A worker gave an answer's head: good, busy (429, 408) or failed (5xx)."""
        worker.responses[status // 100] += 1
        if status >= 500:
            self.pool.record_failure(worker, time.monotonic())
        elif worker.troubled and status not in BUSY:
            self.pool.record_success(worker, time.monotonic())

    def worker_failed(self, worker: Worker, stage: str) -> None:
        """A worker gave no whole answer; ``stage`` says where it stopped."""
        worker.errors[stage] += 1
        self.pool.record_failure(worker, time.monotonic())
        if self.prober is not None and stage in ("connect", "head"):
            self.prober.hurry(worker)

    def head_refused(self, error: MessageError) -> None:
        """A request was refused before it became an exchange."""
        self.counts.errors[error.code] += 1
        self.counts.route("other").statuses[error.status] += 1

    def finished(self, exchange: Exchange, now_s: float) -> None:
        """An exchange has ended: count it and let the next one in."""
        if self.closing and not self.exchanges:
            self._idle.set()
        seconds = now_s - exchange.started_s
        counts = self.counts
        route = counts.route(exchange.route.name)
        route.statuses[exchange.status] += 1
        route.duration.observe(seconds)
        if exchange.answered_s:
            route.to_head.observe(exchange.answered_s - exchange.started_s)
        counts.received_bytes += exchange.received_bytes
        counts.sent_bytes += exchange.sent_bytes
        if exchange.error_code:
            counts.errors[exchange.error_code] += 1
        if not exchange.route.control:
            if self.access_log is not None:
                self.access_log.add(exchange, time.time(), seconds)
            self.admission.leave(exchange, now_s)

    # Housekeeping.

    async def sweep_forever(self) -> None:
        """Look at time-outs, idle connections and open circuits, again and again."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(time.monotonic())

    def sweep(self, now_s: float) -> None:
        """One look, at ``now_s`` of the monotonic clock."""
        settings = self.settings
        for exchange in tuple(self.exchanges):
            exchange.check_time(now_s, settings.body_stall_timeout_s)
        for client in tuple(self.clients):
            self._check_client(client, now_s)
        self.admission.advance(now_s)
        self.pool.tick(now_s)
        for worker in self.pool:
            worker.backend.expire(now_s - settings.upstream_idle_timeout_s)
        self.counts.sort_in()
        if self.access_log is not None:
            self.access_log.flush()

    def _check_client(self, client: ClientConnection, now_s: float) -> None:
        """Close a connection that sends no head, or none in time."""
        if client.exchange is not None or client.lingering:
            return
        waited_s = now_s - client.waiting_since_s
        if client.idle and client.served:
            if self.closing or waited_s >= self.settings.keep_alive_timeout_s:
                client.close()
        elif waited_s >= self.settings.header_read_timeout_s:
            client.head_timed_out()

    def close_idle_clients(self) -> None:
        """Close connections that carry no request."""
        for client in tuple(self.clients):
            if client.exchange is None:
                client.close()

    async def drained(self) -> None:
        """Wait until no request is running; only of use while closing."""
        while self.exchanges:
            self._idle.clear()
            await self._idle.wait()

    def abort_all(self) -> None:
        """Cut every connection, running or not."""
        for client in tuple(self.clients):
            client.abort()
        for worker in self.pool:
            worker.backend.close()
