"""The settings of a run, checked once and written into its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_agent import policies
from sglang_agent.errors import UsageError
from sglang_agent.gate import ServerLimit
from sglang_agent.tasks import TOOL_CHOICES

DEFAULT_JOBS_PER_CORE = 2


class ContentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What changes a sample's content; part of its identity."""

    model: str
    tool_choice: str | None = None
    max_turns: int | None = None
    max_output_tokens: int | None = None
    sampling: dict[str, Any] = {}


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything else; may differ from one attempt to the next. Times in seconds."""

    tasks: str
    output: str
    base_url: str
    content: ContentSettings
    sample_concurrency: int
    sample_concurrency_origin: str
    env_concurrency: int
    env_concurrency_origin: str
    job_order: str = "caas"
    caas_band_s: float = 30.0
    caas_duration_bucket_s: float = 1.0
    server_limits: dict[str, ServerLimit] = {}
    limit: int | None = None
    stream: bool = False
    max_retries: int = 3
    retry_base_s: float = 1.0
    sample_retries: int = 0
    retry_failed: list[str] = []
    request_timeout_s: float | None = None
    sample_timeout_s: float | None = None
    env_queue_timeout_s: float | None = None
    env_timeout_s: float | None = 300.0
    env_executor: str = "local"
    ray_address: str | None = None
    grace_s: float = 10.0
    stall_warning_s: float = 120.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    seed: int = 0


def at_least_one(flag: str, value: int) -> int:
    """Raises UsageError naming ``flag``."""
    if value < 1:
        raise UsageError(f"{flag}: {value}; must be a whole number >= 1")
    return value


def above_zero(flag: str, value: float | None) -> float | None:
    """Raises UsageError naming ``flag``; None means no limit."""
    if value is not None and not 0.0 < value < float("inf"):
        raise UsageError(f"{flag}: {value:g}; must be a number > 0")
    return value


def check(settings: RunSettings) -> RunSettings:
    """Check what the argument parser cannot. Raises UsageError."""
    at_least_one("--sample-concurrency", settings.sample_concurrency)
    at_least_one("--env-concurrency", settings.env_concurrency)
    if settings.job_order not in policies.names():
        raise UsageError(
            f"--job-order: {settings.job_order!r}; must be one of"
            f" {', '.join(policies.names())}"
        )
    choice = settings.content.tool_choice
    if choice is not None and choice not in TOOL_CHOICES:
        raise UsageError(
            f"--tool-choice: {choice!r}; must be one of {', '.join(TOOL_CHOICES)}"
        )
    for flag, value in (
        ("--caas-band-s", settings.caas_band_s),
        ("--caas-duration-bucket-s", settings.caas_duration_bucket_s),
        ("--request-timeout-s", settings.request_timeout_s),
        ("--sample-timeout-s", settings.sample_timeout_s),
        ("--env-queue-timeout-s", settings.env_queue_timeout_s),
        ("--env-timeout-s", settings.env_timeout_s),
        ("--retry-base-s", settings.retry_base_s),
        ("--grace-s", settings.grace_s),
        ("--stall-warning-s", settings.stall_warning_s),
    ):
        above_zero(flag, value)
    port = settings.metrics_port
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"--metrics-port: {port}; must be from 0 to 65535")
    for flag, count in (
        ("--max-retries", settings.max_retries),
        ("--sample-retries", settings.sample_retries),
    ):
        if count < 0:
            raise UsageError(f"{flag}: {count}; must be a whole number >= 0")
    return settings


def default_env_concurrency() -> int:
    """Return a finite default for CE from the CPUs this process may use."""
    return DEFAULT_JOBS_PER_CORE * len(os.sched_getaffinity(0))


def parse_server_limits(texts: Sequence[str]) -> dict[str, ServerLimit]:
    """Read ``NAME=JOBS``, ``NAME=JOBS,RATE/s`` or ``NAME=RATE/s``.

    Raises UsageError naming the text.
    """
    limits = {}
    for text in texts:
        name, _, rest = text.partition("=")
        concurrency: int | None = None
        rate: float | None = None
        try:
            if not name or not rest:
                raise ValueError
            for part in rest.split(","):
                if part.endswith("/s"):
                    rate = float(part[:-2])
                else:
                    concurrency = int(part)
            if (concurrency is not None and concurrency < 1) or (
                rate is not None and not 0.0 < rate < float("inf")
            ):
                raise ValueError
        except ValueError:
            raise UsageError(
                f"--server-limit: {text!r}; must be NAME=JOBS, NAME=RATE/s or"
                " NAME=JOBS,RATE/s with JOBS >= 1 and RATE > 0"
            ) from None
        limits[name] = ServerLimit(concurrency, rate)
    return limits


def parse_base_url(text: str) -> str:
    """Return the URL without a trailing slash or ``/v1``. Raises UsageError."""
    url = text.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--base-url: {text!r}; must start with http:// or https://")
    return url
