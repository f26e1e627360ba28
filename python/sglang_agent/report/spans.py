"""Arithmetic on values and on time spans; a span is (start, end) in seconds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from sglang_agent.report.model import Concurrency, Spread

Span = tuple[float, float]


def spread(values: Iterable[float]) -> Spread:
    """Mean and percentiles; all zero when there is no value."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    total = math.fsum(ordered)
    return Spread(
        count=len(ordered),
        mean=total / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
        max=ordered[-1],
        total=total,
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of sorted values, linear between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def time_to(percent: float, ends: Sequence[float]) -> float:
    """t_q: when the share of ended samples first reaches ``percent``.

    ``ends`` are sorted end times counted from the first admission.
    """
    if not ends:
        return 0.0
    # Rounding first keeps 95% of 100 at the 95th and not, by a hair, the 96th.
    needed = math.ceil(round(len(ends) * percent / 100, 9))
    return ends[max(needed, 1) - 1]


def concurrency(spans: Sequence[Span], duration_s: float) -> Concurrency:
    """Time average over ``duration_s`` and peak of how many spans are open."""
    busy = math.fsum(end - start for start, end in spans)
    peak = max((count for _, count in counts(spans)), default=0)
    return Concurrency(busy / duration_s if duration_s > 0 else 0.0, peak)


def counts(spans: Iterable[Span]) -> list[tuple[float, int]]:
    """How many spans are open from each instant on; ends come before starts."""
    change: dict[float, int] = defaultdict(int)
    for start, end in spans:
        if end > start:
            change[start] += 1
            change[end] -= 1
    open_now = 0
    steps = []
    for instant in sorted(change):
        open_now += change[instant]
        steps.append((instant, open_now))
    return steps
