"""The workers and their in-flight counts.

One :class:`Worker` object is one registration: its count lives and dies with it. A URL
that is removed and added again gets a new object, so a late release of the old one
cannot touch the new count.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from sgl_router.breaker import BreakerSettings, CircuitBreaker, CircuitState
from sgl_router.policies import Loads, Policy
from sgl_router.upstream import Backend


class WorkerError(ValueError):
    """A worker URL that cannot be registered; the message names field and value."""


@dataclass(slots=True)
class WorkerReport:
    """What a worker says about itself (GET /server_info and /v1/models)."""

    reference_concurrency: int | None = None
    max_running_requests: int | None = None
    models: tuple[dict[str, object], ...] = ()


class Worker:
    """One registered worker: its connections, its health and its in-flight count."""

    __slots__ = (
        "backend",
        "breaker",
        "draining",
        "eligible",
        "errors",
        "health_checks",
        "healthy",
        "id",
        "in_flight",
        "pool",
        "report",
        "responses",
        "selections",
        "troubled",
        "url",
    )

    def __init__(
        self, worker_id: str, url: str, pool: WorkerPool, backend: Backend
    ) -> None:
        self.id = worker_id
        self.url = url
        self.pool = pool
        self.backend = backend
        self.in_flight = 0
        self.healthy = False
        self.draining = False
        self.eligible = False  # whether it is among the pool's loads
        self.breaker = CircuitBreaker(pool.breaker_settings)
        self.troubled = False  # whether the breaker wants to hear of good answers
        self.report = WorkerReport()
        self.selections = 0
        self.errors: Counter[str] = Counter()
        self.responses: Counter[int] = Counter()  # by hundreds: 2 for 2xx
        self.health_checks: Counter[str] = Counter()

    @property
    def registered(self) -> bool:
        """Whether this object is (still) the one that stands for its URL."""
        return self.pool.by_url.get(self.url) is self

    def acquire(self) -> None:
        """Count one request, at its selection."""
        self.selections += 1
        self.in_flight = load = self.in_flight + 1
        if self.eligible:
            loads = self.pool.loads
            loads[self.url] = load
            loads.total += 1

    def release(self) -> None:
        """Take one request off the count; the caller does so exactly once."""
        if self.in_flight <= 0:
            raise AssertionError(f"worker {self.url}: released more than was acquired")
        self.in_flight = load = self.in_flight - 1
        if self.eligible:
            loads = self.pool.loads
            loads[self.url] = load
            loads.total -= 1
        elif self.draining and not self.in_flight:
            self.pool.forget(self)

    def set_healthy(self, healthy: bool) -> None:
        """Take the verdict of a probe; counts are never touched by probes."""
        if healthy and not self.healthy:
            self.breaker.reset()
        self.healthy = healthy
        self.pool.refresh(self)


class WorkerPool:
    """All workers, the loads of those that may be picked, and the policy."""

    def __init__(
        self,
        policy: Policy,
        breaker_settings: BreakerSettings | None = None,
    ) -> None:
        self.policy = policy
        self.breaker_settings = breaker_settings or BreakerSettings()
        self.by_url: dict[str, Worker] = {}
        self.loads = Loads()
        """URL -> in-flight requests of every worker that may be picked now."""
        self.draining: list[Worker] = []
        """Removed workers whose last requests are still running."""
        self.branches: Counter[str] = Counter()
        self._ids = itertools.count(1)
        self._tripped: set[Worker] = set()
        self._now_s = 0.0

    def __iter__(self) -> Iterator[Worker]:
        """Every worker in order of arrival, those being drained last."""
        yield from self.by_url.values()
        yield from self.draining

    def __len__(self) -> int:
        return len(self.by_url)

    def get(self, worker_id: str) -> Worker | None:
        """The worker with this id, draining or not."""
        return next((worker for worker in self if worker.id == worker_id), None)

    def add(self, url: str, backend: Backend) -> Worker:
        """Register ``url``; it takes no request until it is healthy.

        Raises:
            WorkerError: the URL is registered already.
        """
        if url in self.by_url:
            raise WorkerError(f"url: {url} is registered already")
        worker = Worker(f"worker-{next(self._ids)}", url, self, backend)
        self.by_url[url] = worker
        self.policy.update_workers(self.by_url)
        return worker

    def remove(self, worker: Worker) -> None:
        """Stop picking ``worker`` at once; it goes when its last request ends."""
        if not worker.registered:
            return
        del self.by_url[worker.url]
        self.loads.drop(worker.url)
        worker.eligible = False
        self._tripped.discard(worker)
        worker.draining = True
        self.policy.update_workers(self.by_url)
        if worker.in_flight:
            self.draining.append(worker)
        else:
            worker.backend.close()

    def forget(self, worker: Worker) -> None:
        """Drop a drained worker and its connections."""
        if worker in self.draining:
            self.draining.remove(worker)
        worker.backend.close()

    def refresh(self, worker: Worker) -> None:
        """Put ``worker`` among the loads if it may be picked, else take it out."""
        if not worker.registered:
            return
        circuit = worker.breaker.state(self._now_s)
        worker.eligible = worker.healthy and circuit is not CircuitState.OPEN
        if worker.eligible:
            self.loads.put(worker.url, worker.in_flight)
        else:
            self.loads.drop(worker.url)

    def record_success(self, worker: Worker, now_s: float) -> None:
        """Tell the breaker of a good answer; of use for a troubled worker only."""
        worker.breaker.record_success(now_s)
        self._watch(worker, now_s)
        worker.troubled = worker in self._tripped

    def record_failure(self, worker: Worker, now_s: float) -> None:
        """Tell the breaker of a failed request; an open circuit leaves the loads."""
        worker.troubled = True
        worker.breaker.record_failure(now_s)
        self._watch(worker, now_s)

    def tick(self, now_s: float) -> None:
        """Let open circuits whose wait is over take trial requests."""
        self._now_s = now_s
        for worker in tuple(self._tripped):
            self._watch(worker, now_s)

    def _watch(self, worker: Worker, now_s: float) -> None:
        self._now_s = now_s
        if worker.breaker.state(now_s) is CircuitState.CLOSED:
            self._tripped.discard(worker)
        elif worker.registered:
            self._tripped.add(worker)
        self.refresh(worker)

    def select(
        self, label: str | None, tried: Collection[str] = (), text: str | None = None
    ) -> Worker | None:
        """Pick a worker outside ``tried`` and count the request on it.

        None when no worker may take it.
        """
        loads: Mapping[str, int] = self.loads
        if tried:
            loads = {url: load for url, load in loads.items() if url not in tried}
        if not loads:
            return None
        url, branch = self.policy.choose(label, loads, text)
        self.branches[branch] += 1
        worker = self.by_url[url]
        worker.acquire()
        return worker

    def select_index(self, index: int) -> Worker | None:
        """Pick the worker at ``index`` in order of arrival, when it may be picked."""
        workers = list(self.by_url.values())
        if not 0 <= index < len(workers) or workers[index].url not in self.loads:
            return None
        self.branches["target"] += 1
        workers[index].acquire()
        return workers[index]


def parse_worker_url(text: str) -> str:
    """The worker URL as registered: ``http(s)://host[:port]``, no trailing slash.

    Raises:
        WorkerError: naming what is wrong.
    """
    url = text.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise WorkerError(f"worker url: {text!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise WorkerError(
            f"worker url: {text!r} is not allowed; give http://HOST[:PORT] or https://..."
        )
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise WorkerError(
            f"worker url: {text!r} is not allowed; give scheme, host and port only"
        )
    return url
