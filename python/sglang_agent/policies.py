"""The orders in which waiting environment jobs may be dispatched.

A policy turns what is known when a job joins the queue into a key; smaller keys go
first and the gate appends a global entry counter, so no two jobs are ever equal. To
add one, write a class with ``key`` and decorate it with :func:`register`; the command
line takes its choices from :func:`names`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar


class QueuedJob(NamedTuple):
    """What a policy may look at; times in seconds on the scheduler's clock."""

    requested_s: float
    turns: int
    mean_turn_s: float


class JobPolicy(Protocol):
    """Gives a job the key it keeps while it waits."""

    def key(self, job: QueuedJob) -> tuple[float, ...]:
        """Return the job's priority, ascending."""


class PolicyFactory(Protocol):
    def __call__(self, *, band_s: float, duration_bucket_s: float) -> JobPolicy: ...


_FACTORIES: dict[str, PolicyFactory] = {}
F = TypeVar("F", bound=PolicyFactory)


def register(name: str) -> Callable[[F], F]:
    """Make a policy known under ``name``."""

    def add(factory: F) -> F:
        _FACTORIES[name] = factory
        return factory

    return add


def names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_FACTORIES)


def create(name: str, *, band_s: float, duration_bucket_s: float) -> JobPolicy:
    """Build the policy ``name``.

    ``band_s`` is B of equation 13 and ``duration_bucket_s`` is Delta_I of equation
    15. Raises ValueError for an unknown name or a value that is not positive.
    """
    if name not in _FACTORIES:
        raise ValueError(f"policy must be one of {', '.join(names())}, got {name!r}")
    for field, value in (
        ("band_s", band_s),
        ("duration_bucket_s", duration_bucket_s),
    ):
        if not 0.0 < value < math.inf:
            raise ValueError(f"{field} must be finite and > 0, got {value!r}")
    return _FACTORIES[name](band_s=band_s, duration_bucket_s=duration_bucket_s)


@register("fcfs")
class FirstComeFirstServed:
    """Order of entry alone."""

    def __init__(self, *, band_s: float, duration_bucket_s: float) -> None:
        del band_s, duration_bucket_s

    def key(self, job: QueuedJob) -> tuple[float, ...]:
        return ()


@register("caas")
class ChainAdvancing:
    """Chain-advancing action scheduling: the key of equation 16.

    Arrival band first, then the deeper chain, then the shorter bucket of the mean
    inference duration.
    """

    def __init__(self, *, band_s: float, duration_bucket_s: float) -> None:
        self._band_s = band_s
        self._duration_bucket_s = duration_bucket_s

    def key(self, job: QueuedJob) -> tuple[float, ...]:
        return (
            math.floor(job.requested_s / self._band_s),
            -job.turns,
            math.floor(job.mean_turn_s / self._duration_bucket_s),
        )


@register("depth")
class DepthOnly:
    """Deeper chains first without bands; for comparison, it can starve."""

    def __init__(self, *, band_s: float, duration_bucket_s: float) -> None:
        del band_s, duration_bucket_s

    def key(self, job: QueuedJob) -> tuple[float, ...]:
        return (-job.turns,)
