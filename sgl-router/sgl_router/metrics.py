"""Prometheus metrics in smg's spelling.

The data path counts in plain integers; :class:`GatewayCollector` turns them into
metric families when somebody scrapes. No series carries a value that a client chooses:
routes, codes and branches come from fixed sets, workers from the registration.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from sgl_router.breaker import CircuitState
from sgl_router.labels import SOURCES

if TYPE_CHECKING:
    from sgl_router.gateway import Gateway

BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Upper bounds of the duration buckets, in seconds."""

_CIRCUIT = {CircuitState.CLOSED: 0, CircuitState.OPEN: 1, CircuitState.HALF_OPEN: 2}


class Histogram:
    """Counts durations by bucket.

    They are noted as they come and sorted into the buckets many at a time, which
    costs less than finding the bucket of each.
    """

    __slots__ = ("_counts", "_noted", "_total_s", "observe")

    def __init__(self) -> None:
        self._noted: list[float] = []
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._total_s = 0.0
        self.observe: Callable[[float], None] = self._noted.append
        """Count one duration, in seconds."""

    @property
    def total_s(self) -> float:
        """Sum of all durations."""
        self.sort_in()
        return self._total_s

    @property
    def counts(self) -> list[int]:
        """Durations in each bucket."""
        self.sort_in()
        return self._counts

    def sort_in(self) -> None:
        """Sort what was noted into the buckets."""
        noted = self._noted
        noted.sort()
        before = 0
        for bucket, bound in enumerate(BUCKETS_S):
            upto = bisect_right(noted, bound, before)
            self._counts[bucket] += upto - before
            before = upto
        self._counts[-1] += len(noted) - before
        self._total_s += sum(noted)
        noted.clear()

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts with their upper bounds as Prometheus writes them."""
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        cumulative = itertools.accumulate(map(float, self.counts))
        return list(zip(bounds, cumulative, strict=True))


class RouteCounts:
    """What is counted for one route."""

    __slots__ = ("duration", "statuses", "to_head")

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.duration = Histogram()
        self.to_head = Histogram()


class Counts:
    """All counters of the data path that belong to no single worker."""

    def __init__(self) -> None:
        self.routes: dict[str, RouteCounts] = {}
        self.errors: Counter[str] = Counter()
        self.retries = 0
        self.retries_exhausted = 0
        self.received_bytes = 0
        self.sent_bytes = 0

    def route(self, name: str) -> RouteCounts:
        """The counts of the route called ``name``."""
        counts = self.routes.get(name)
        if counts is None:
            counts = self.routes[name] = RouteCounts()
        return counts

    def sort_in(self) -> None:
        """Sort noted durations into their buckets, before there are too many."""
        for counts in self.routes.values():
            counts.duration.sort_in()
            counts.to_head.sort_in()


class GatewayCollector(Collector):
    """Reads a gateway's counts at every scrape."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        yield from self._requests()
        yield from self._routing()
        yield from self._workers()
        yield from self._gateway_state()

    def _requests(self) -> Iterator[Metric]:
        routes = self._gateway.counts.routes
        responses = CounterMetricFamily(
            "smg_http_responses", "Answers to clients.", labels=["path", "status_code"]
        )
        duration = HistogramMetricFamily(
            "smg_http_request_duration_seconds",
            "From a request's head to its answer's last byte.",
            labels=["path"],
        )
        to_head = HistogramMetricFamily(
            "smg_router_time_to_head_seconds",
            "From a request's head to its answer's head, queueing included.",
            labels=["path"],
        )
        for name, counts in routes.items():
            for status, count in counts.statuses.items():
                responses.add_metric([name, str(status)], count)
            duration.add_metric(
                [name], counts.duration.buckets(), counts.duration.total_s
            )
            to_head.add_metric([name], counts.to_head.buckets(), counts.to_head.total_s)
        yield from (responses, duration, to_head)
        counts_ = self._gateway.counts
        yield _counter(
            "smg_router_request_errors",
            "Requests that did not end with a worker's whole answer.",
            "error_type",
            counts_.errors.items(),
        )
        for name, value in (
            ("received", counts_.received_bytes),
            ("sent", counts_.sent_bytes),
        ):
            yield CounterMetricFamily(
                f"smg_http_body_{name}_bytes", f"Body bytes {name}.", value=value
            )

    def _routing(self) -> Iterator[Metric]:
        gateway = self._gateway
        policy = gateway.pool.policy
        branches = dict.fromkeys((*policy.branches, "target"), 0)
        branches.update(gateway.pool.branches)
        yield _counter(
            f"smg_{policy.name}_policy_branch",
            "Selections by the branch of the policy that made them.",
            "branch",
            branches.items(),
        )
        sources = {source: gateway.labels.sources[source] for source in SOURCES}
        yield _counter(
            "smg_routing_key_source",
            "Requests by where their routing key came from.",
            "source",
            sources.items(),
        )
        yield CounterMetricFamily(
            "smg_worker_retries",
            "Requests sent again to another worker.",
            value=gateway.counts.retries,
        )
        yield CounterMetricFamily(
            "smg_worker_retries_exhausted",
            "Requests that failed on their last worker.",
            value=gateway.counts.retries_exhausted,
        )

    def _workers(self) -> Iterator[Metric]:
        gateway = self._gateway
        workers = list(gateway.pool.by_url.values())
        gauges: tuple[tuple[str, str, list[float]], ...] = (
            (
                "smg_worker_requests_active",
                "Requests in flight, counted at selection.",
                [worker.in_flight for worker in workers],
            ),
            (
                "smg_worker_connections_active",
                "Open connections to the worker.",
                [worker.backend.connections for worker in workers],
            ),
            (
                "smg_worker_health",
                "1 when the last probes succeeded.",
                [worker.healthy for worker in workers],
            ),
            (
                "smg_worker_cb_state",
                "Circuit: 0 closed, 1 open, 2 half open.",
                [_CIRCUIT[w.breaker.state(gateway.now_s())] for w in workers],
            ),
        )
        urls = [worker.url for worker in workers]
        for name, text, values in gauges:
            family = GaugeMetricFamily(name, text, labels=["worker"])
            for url, value in zip(urls, values, strict=True):
                family.add_metric([url], value)
            yield family
        selections = [(worker.url, worker.selections) for worker in workers]
        yield _counter(
            "smg_worker_selection",
            "Requests given to the worker.",
            "worker",
            selections,
        )
        for attribute, name, text, label in (
            ("errors", "smg_worker_errors", "Failed attempts by stage.", "error_type"),
            ("responses", "smg_router_upstream_responses", "Answers.", "status_class"),
            ("health_checks", "smg_worker_health_checks", "Probes.", "result"),
        ):
            family_ = CounterMetricFamily(name, text, labels=["worker", label])
            for worker in workers:
                for key, count in getattr(worker, attribute).items():
                    shown = f"{key}xx" if attribute == "responses" else key
                    family_.add_metric([worker.url, shown], count)
            yield family_

    def _gateway_state(self) -> Iterator[Metric]:
        gateway = self._gateway
        admission = gateway.admission
        for name, text, value in (
            ("smg_worker_pool_size", "Registered workers.", len(gateway.pool)),
            ("smg_workers_draining", "Removed workers still answering.",
             len(gateway.pool.draining)),
            ("smg_http_connections_active", "Client connections.",
             len(gateway.clients)),
            ("smg_http_requests_active", "Requests being served.",
             len(gateway.exchanges)),
            ("smg_http_requests_queued", "Requests waiting for a slot.",
             admission.waiting),
        ):  # fmt: skip
            yield GaugeMetricFamily(name, text, value=value)
        yield _counter(
            "smg_http_rate_limit",
            "Decisions of the concurrency and rate limit.",
            "result",
            admission.outcomes.items(),
        )
        if gateway.access_log is not None:
            yield CounterMetricFamily(
                "smg_access_log_dropped_lines",
                "Log lines dropped because their reader is too slow.",
                value=gateway.access_log.dropped,
            )


def _counter(
    name: str, text: str, label: str, values: Iterable[tuple[str, float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values:
        family.add_metric([value], count)
    return family


def render(gateway: Gateway) -> bytes:
    """The exposition text of ``gateway``'s metrics."""
    registry = CollectorRegistry()
    registry.register(GatewayCollector(gateway))
    return generate_latest(registry)
