"""The gateway's settings and the command line that gives them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sgl_router.breaker import BreakerSettings
from sgl_router.label import LABEL_HEADER
from sgl_router.policies import make_policy, policy_names, policy_options
from sgl_router.policies.base import Policy, PolicyError
from sgl_router.workers import WorkerError, parse_worker_url

DEFAULT_LABEL_HEADERS = (LABEL_HEADER, "x-session-id")


class SettingsError(ValueError):
    """A setting that cannot be used; the message names field, value and what may be."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """PEM files: the gateway's own identity, its client identity, and trusted CAs."""

    cert_path: str | None = None
    key_path: str | None = None
    client_cert_path: str | None = None
    client_key_path: str | None = None
    ca_cert_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """How workers are probed."""

    endpoint: str = "/health"
    interval_s: float = 10.0
    timeout_s: float = 5.0
    failure_threshold: int = 3
    success_threshold: int = 2
    startup_interval_s: float = 1.0
    startup_timeout_s: float = 1800.0
    disabled: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a gateway is told at its start; see ``--help`` for the meanings."""

    worker_urls: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 30000
    prometheus_host: str | None = None
    prometheus_port: int = 29000
    policy: str = "lbch"
    policy_options: dict[str, Any] = field(default_factory=dict)
    routing_key_headers: tuple[str, ...] = DEFAULT_LABEL_HEADERS
    require_routing_key: bool = False
    routing_key_from_body: bool = False
    routing_key_from_content: bool = False
    health: HealthSettings = field(default_factory=HealthSettings)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    retry_max_attempts: int = 5
    retry_initial_backoff_s: float = 0.05
    retry_max_backoff_s: float = 30.0
    retry_backoff_multiplier: float = 1.5
    retry_jitter_factor: float = 0.2
    retry_seed: int | None = None
    max_buffered_bytes: int = 1024 * 1024
    max_payload_bytes: int = 512 * 1024 * 1024
    max_concurrent_requests: int = -1
    queue_size: int = 100
    queue_timeout_s: float = 60.0
    rate_limit_per_s: float = 0.0
    request_timeout_s: float = 1800.0
    connect_timeout_s: float = 5.0
    header_read_timeout_s: float = 30.0
    keep_alive_timeout_s: float = 300.0
    body_stall_timeout_s: float = 300.0
    upstream_idle_timeout_s: float = 3.0
    drain_settle_s: float = 0.0
    shutdown_grace_s: float = 180.0
    api_key: str | None = None
    control_plane_api_key: str | None = None
    access_log: bool = True
    log_level: str = "info"
    log_json: bool = False

    def make_policy(self) -> Policy:
        """A fresh policy object without workers."""
        return make_policy(self.policy, **self.policy_options)


def _number(
    kind: Callable[[str], float], least: float, most: float = math.inf
) -> Callable[[str], Any]:
    """An argparse type: a finite number from ``least`` to ``most``."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            name = "whole number" if kind is int else "number"
            upper = f" to {most:g}" if math.isfinite(most) else " or more"
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed; give a {name}, {least:g}{upper}"
            )
        return value

    return parse


_COUNT = _number(int, 0)
_POSITIVE = _number(int, 1)
_SECONDS = _number(float, 0)
_PORT = _number(int, 0, 65535)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the long usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line, spelled as smg spells it."""
    parser = _Parser(
        prog="python -m sgl_router.launch_router",
        description="Route the turns of agent trajectories to SGLang workers: home "
        "worker first, within a bound on its load.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_serving(parser.add_argument_group("Serving"))
    _add_routing(parser.add_argument_group("Routing"))
    _add_workers(parser.add_argument_group("Workers"))
    _add_limits(parser.add_argument_group("Limits and time-outs"))
    _add_retries(parser.add_argument_group("Retries and circuit breaker"))
    _add_security(parser.add_argument_group("TLS and keys"))
    _add_logging(parser.add_argument_group("Logs and metrics"))
    return parser


_Group = Any  # argparse's group type is private


def _add_serving(group: _Group) -> None:
    add = group.add_argument
    add("--worker-urls", nargs="*", default=[], metavar="URL",
        help="workers to register at the start; more with POST /workers")  # fmt: skip
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_PORT, default=30000, help="port to listen on; 0 picks one")
    add("--drain-settle-secs", type=_SECONDS, default=0.0,
        help="seconds that requests are still taken after SIGTERM, with /readiness at "
        "503, so that load balancers can look elsewhere")  # fmt: skip
    add("--shutdown-grace-period-secs", type=_SECONDS, default=180.0,
        help="seconds that running requests get to end after that")  # fmt: skip


def _add_routing(group: _Group) -> None:
    add = group.add_argument
    add("--policy", default="lbch", choices=policy_names(),
        help="how a worker is picked; lbch is bounded_consistent_hashing")  # fmt: skip
    add("--lbch-load-factor", type=float, default=1.25,
        help="alpha: multiple of the mean load up to which a worker is eligible; at "
        "least 1.0")  # fmt: skip
    add("--lbch-balance-abs-threshold", type=float, default=0.0,
        help="requests above the mean that never count as overload")  # fmt: skip
    add("--routing-key-headers", nargs="*", default=list(DEFAULT_LABEL_HEADERS),
        metavar="HEADER",
        help="headers that carry the label, in order; the first valid value wins and "
        f"goes on as {LABEL_HEADER}")  # fmt: skip
    add("--require-routing-key", action="store_true",
        help="answer 400 to inference requests without a valid label")  # fmt: skip
    add("--routing-key-from-body", action="store_true",
        help="without a header, read the field routing_key of /generate bodies (the "
        "body is then held in full)")  # fmt: skip
    add("--routing-key-from-content", action="store_true",
        help="without a label, derive one from the messages up to the first user "
        "message (the body is then held in full)")  # fmt: skip
    add("--cache-threshold", type=_number(float, 0, 1), default=0.3,
        help="cache_aware: share of the prompt that must match")  # fmt: skip
    add("--balance-abs-threshold", type=_COUNT, default=64,
        help="cache_aware: load difference above which affinity is given up")  # fmt: skip
    add("--balance-rel-threshold", type=_number(float, 1), default=1.5,
        help="cache_aware: multiple of the least load that must be exceeded too")  # fmt: skip
    add("--max-tree-size", type=_number(int, 64), default=2**26,
        help="cache_aware: characters of prompts remembered")  # fmt: skip
    add("--policy-seed", type=int, default=0,
        help="random, power_of_two: seed of the draws")  # fmt: skip


def _add_workers(group: _Group) -> None:
    add = group.add_argument
    add("--health-check-endpoint", default="/health", help="path that probes ask for")
    add("--health-check-interval-secs", type=_number(float, 0.01), default=10.0,
        help="seconds between probes of a healthy worker")  # fmt: skip
    add("--health-check-timeout-secs", type=_number(float, 0.01), default=5.0,
        help="seconds a probe may take")  # fmt: skip
    add("--health-failure-threshold", type=_POSITIVE, default=3,
        help="failed probes in a row that take a worker out")  # fmt: skip
    add("--health-success-threshold", type=_POSITIVE, default=2,
        help="good probes in a row that bring it back (a new worker needs one)")  # fmt: skip
    add("--disable-health-check", action="store_true",
        help="take every worker as healthy and never probe")  # fmt: skip
    add("--worker-startup-check-interval", type=_number(float, 0.01), default=1.0,
        help="seconds between probes of a worker that is not up yet")  # fmt: skip
    add("--worker-startup-timeout-secs", type=_SECONDS, default=1800.0,
        help="seconds a worker may take to come up; 0: a worker that cannot be "
        "reached at the start ends the gateway")  # fmt: skip
    add("--upstream-pool-idle-timeout-secs", type=_SECONDS, default=3.0,
        help="seconds an idle connection to a worker is kept; SGLang closes them "
        "after 5")  # fmt: skip


def _add_limits(group: _Group) -> None:
    add = group.add_argument
    add("--max-concurrent-requests", type=_number(int, -1), default=-1,
        help="requests served at once; -1 for no limit")  # fmt: skip
    add("--queue-size", type=_COUNT, default=100,
        help="requests that wait for that limit; more get 429")  # fmt: skip
    add("--queue-timeout-secs", type=_SECONDS, default=60.0,
        help="seconds a request waits there; then 503")  # fmt: skip
    add("--rate-limit-tokens-per-second", type=_SECONDS, default=0.0,
        help="requests started per second; 0 for no limit")  # fmt: skip
    add("--max-payload-size", type=_POSITIVE, default=512 * 1024 * 1024,
        help="largest request body, in bytes; larger get 413")  # fmt: skip
    add("--request-timeout-secs", type=_number(float, 0.01), default=1800.0,
        help="seconds a request may take, answer included; then 504")  # fmt: skip
    add("--connect-timeout-secs", type=_number(float, 0.01), default=5.0,
        help="seconds a connection to a worker may take")  # fmt: skip
    add("--header-read-timeout-secs", type=_number(float, 0.01), default=30.0,
        help="seconds a client may take for a request's head")  # fmt: skip
    add("--keep-alive-timeout-secs", type=_SECONDS, default=300.0,
        help="seconds an idle client connection is kept")  # fmt: skip
    add("--stream-body-stall-timeout-secs", type=_number(float, 0.01), default=300.0,
        help="seconds without a byte while a client sends or takes a body")  # fmt: skip


def _add_retries(group: _Group) -> None:
    add = group.add_argument
    add("--retry-max-retries", type=_POSITIVE, default=5,
        help="attempts per request, the first included (as smg counts); every one "
        "goes to a worker not tried yet; 1 disables")  # fmt: skip
    add("--retry-initial-backoff-ms", type=_SECONDS, default=50.0,
        help="milliseconds before the first retry")  # fmt: skip
    add("--retry-max-backoff-ms", type=_SECONDS, default=30000.0,
        help="most milliseconds before a retry")  # fmt: skip
    add("--retry-backoff-multiplier", type=_number(float, 1), default=1.5,
        help="growth of that delay from retry to retry")  # fmt: skip
    add("--retry-jitter-factor", type=_number(float, 0, 1), default=0.2,
        help="share by which a delay is varied")  # fmt: skip
    add("--disable-retries", action="store_true", help="same as --retry-max-retries 1")
    add("--max-buffered-request-bytes", type=_COUNT, default=1024 * 1024,
        help="body bytes held so that a request can be retried; 0 holds none")  # fmt: skip
    add("--cb-failure-threshold", type=_POSITIVE, default=10,
        help="failures in a row that open a worker's circuit (429 is none)")  # fmt: skip
    add("--cb-success-threshold", type=_POSITIVE, default=3,
        help="good answers on trial that close it")  # fmt: skip
    add("--cb-timeout-duration-secs", type=_SECONDS, default=60.0,
        help="seconds until an open circuit takes trial requests")  # fmt: skip
    add("--cb-window-duration-secs", type=_SECONDS, default=120.0,
        help="failures further apart do not add up")  # fmt: skip
    add("--disable-circuit-breaker", action="store_true", help="never open a circuit")


def _add_security(group: _Group) -> None:
    add = group.add_argument
    add("--tls-cert-path", help="PEM certificate chain to serve https with")
    add("--tls-key-path", help="PEM key of that certificate")
    add("--client-cert-path", help="PEM certificate shown to https workers")
    add("--client-key-path", help="PEM key of that certificate")
    add("--ca-cert-paths", nargs="*", default=[], metavar="FILE",
        help="PEM certificates to trust for https workers instead of the system's")  # fmt: skip
    add("--api-key", help="bearer token for workers where the client sends none")
    add("--control-plane-api-key",
        help="bearer token needed to change workers, flush caches or abort")  # fmt: skip


def _add_logging(group: _Group) -> None:
    add = group.add_argument
    add("--log-level", default="info", choices=["debug", "info", "warn", "error"],
        help="least severe lines shown")  # fmt: skip
    add("--log-json", action="store_true", help="log lines as JSON")
    add("--disable-access-log", action="store_true",
        help="no line per request (prompts are never logged)")  # fmt: skip
    add("--prometheus-port", type=_PORT, default=29000,
        help="port of GET /metrics; 0 picks one")  # fmt: skip
    add("--prometheus-host", help="address of GET /metrics (default: --host)")


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Settings from command-line ``arguments``; bad ones end with one line, code 2."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    try:
        return _settings(given)
    except (SettingsError, PolicyError, WorkerError) as error:
        parser.error(str(error))


def _settings(given: argparse.Namespace) -> Settings:
    settings = Settings(
        worker_urls=_worker_urls(given.worker_urls),
        host=given.host,
        port=given.port,
        prometheus_host=given.prometheus_host,
        prometheus_port=given.prometheus_port,
        policy=given.policy,
        policy_options=_policy_options(given),
        routing_key_headers=_label_headers(given.routing_key_headers),
        require_routing_key=given.require_routing_key,
        routing_key_from_body=given.routing_key_from_body,
        routing_key_from_content=given.routing_key_from_content,
        health=_health(given),
        breaker=_breaker(given),
        tls=_tls(given),
        retry_max_attempts=1 if given.disable_retries else given.retry_max_retries,
        retry_initial_backoff_s=given.retry_initial_backoff_ms / 1000,
        retry_max_backoff_s=given.retry_max_backoff_ms / 1000,
        retry_backoff_multiplier=given.retry_backoff_multiplier,
        retry_jitter_factor=given.retry_jitter_factor,
        max_buffered_bytes=given.max_buffered_request_bytes,
        max_payload_bytes=given.max_payload_size,
        max_concurrent_requests=given.max_concurrent_requests,
        queue_size=given.queue_size,
        queue_timeout_s=given.queue_timeout_secs,
        rate_limit_per_s=given.rate_limit_tokens_per_second,
        request_timeout_s=given.request_timeout_secs,
        connect_timeout_s=given.connect_timeout_secs,
        header_read_timeout_s=given.header_read_timeout_secs,
        keep_alive_timeout_s=given.keep_alive_timeout_secs,
        body_stall_timeout_s=given.stream_body_stall_timeout_secs,
        upstream_idle_timeout_s=given.upstream_pool_idle_timeout_secs,
        drain_settle_s=given.drain_settle_secs,
        shutdown_grace_s=given.shutdown_grace_period_secs,
        api_key=given.api_key,
        control_plane_api_key=given.control_plane_api_key,
        access_log=not given.disable_access_log,
        log_level=given.log_level,
        log_json=given.log_json,
    )
    settings.make_policy()  # a bad option is told before anything starts
    return settings


def _worker_urls(given: Sequence[str]) -> tuple[str, ...]:
    urls = tuple(parse_worker_url(url) for url in given)
    for url in urls:
        if urls.count(url) > 1:
            raise SettingsError(f"--worker-urls: {url} is given more than once")
    return urls


def _policy_options(given: argparse.Namespace) -> dict[str, Any]:
    offered = {
        "load_factor": given.lbch_load_factor,
        "cache_threshold": given.cache_threshold,
        "balance_rel_threshold": given.balance_rel_threshold,
        "max_tree_size": given.max_tree_size,
        "seed": given.policy_seed,
        "balance_abs_threshold": (
            given.balance_abs_threshold
            if given.policy == "cache_aware"
            else given.lbch_balance_abs_threshold
        ),
    }
    wanted = policy_options(given.policy)
    return {name: value for name, value in offered.items() if name in wanted}


def _label_headers(given: Sequence[str]) -> tuple[str, ...]:
    if not given:
        raise SettingsError("--routing-key-headers: empty; name at least one header")
    for name in given:
        if not name or not name.replace("-", "").replace("_", "").isalnum():
            raise SettingsError(
                f"--routing-key-headers: {name!r} is not allowed; give header names "
                "of letters, digits, - and _"
            )
    return tuple(name.lower() for name in given)


def _health(given: argparse.Namespace) -> HealthSettings:
    return HealthSettings(
        endpoint=given.health_check_endpoint,
        interval_s=given.health_check_interval_secs,
        timeout_s=given.health_check_timeout_secs,
        failure_threshold=given.health_failure_threshold,
        success_threshold=given.health_success_threshold,
        startup_interval_s=given.worker_startup_check_interval,
        startup_timeout_s=given.worker_startup_timeout_secs,
        disabled=given.disable_health_check,
    )


def _breaker(given: argparse.Namespace) -> BreakerSettings:
    disabled = given.disable_circuit_breaker
    return BreakerSettings(
        failure_threshold=0 if disabled else given.cb_failure_threshold,
        success_threshold=given.cb_success_threshold,
        open_s=given.cb_timeout_duration_secs,
        window_s=given.cb_window_duration_secs,
    )


def _tls(given: argparse.Namespace) -> TlsSettings:
    for cert, key, name in (
        (given.tls_cert_path, given.tls_key_path, "tls"),
        (given.client_cert_path, given.client_key_path, "client"),
    ):
        if bool(cert) != bool(key):
            raise SettingsError(
                f"--{name}-cert-path: give it together with --{name}-key-path"
            )
    return TlsSettings(
        cert_path=given.tls_cert_path,
        key_path=given.tls_key_path,
        client_cert_path=given.client_cert_path,
        client_key_path=given.client_key_path,
        ca_cert_paths=tuple(given.ca_cert_paths),
    )
