"""From a sweep to what to do: the best cell, the safe concurrency, flags to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_agent.simulate.settings import SimulationSettings
from sglang_agent.simulate.sweep import Point, best, shown

# More new prefill than this times the least means that the cache no longer holds.
SAFE_FACTOR = 1.25

LBCH = ("lbch", "bounded_consistent_hashing")
"""The names of the policy that has a load factor."""


def value_of(point: Point, axis: str, settings: SimulationSettings) -> Any:
    """The point's value on an axis, swept or not."""
    return point.varied.get(axis, getattr(settings, axis))


def advice(points: Sequence[Point], settings: SimulationSettings) -> list[str]:
    """Lines for people; the last ones can be pasted."""
    chosen = best(points)
    if chosen is None:
        return ["no setting finished within the time limit"]
    lines = [
        f"best: {describe(chosen.varied)}: makespan {chosen.report.makespan_s / 60:.1f} min, "
        f"reuse {_percent(chosen.report.reuse)} (simulated)"
    ]
    lines += safe_concurrency(points)
    lines += list(flags(chosen, settings))
    return lines


def describe(varied: Mapping[str, Any]) -> str:
    """Varied settings, as on the command line."""
    return " ".join(f"{k.replace('_', '-')}={shown(v)}" for k, v in varied.items())


def safe_concurrency(points: Sequence[Point]) -> list[str]:
    """Up to which concurrency the cache holds, for each group of other settings.

    The new-prefill tokens of every higher one are given with their factor over the
    least. Nothing is said when concurrency was not varied.
    """
    groups: dict[tuple[tuple[str, Any], ...], list[Point]] = {}
    for point in points:
        if "sample_concurrency" not in point.varied:
            return []
        others = tuple(
            item for item in point.varied.items() if item[0] != "sample_concurrency"
        )
        groups.setdefault(others, []).append(point)
    return [_safe_line(dict(others), group) for others, group in groups.items()]


def _safe_line(others: dict[str, Any], group: list[Point]) -> str:
    group = sorted(group, key=lambda p: int(p.varied["sample_concurrency"]))
    # A batch that was cut short has computed less than it would have to.
    whole = [p.report.new_prefill_tokens for p in group if not p.timed_out]
    least = max(min(whole, default=1), 1)
    safe = None
    for point in group:
        if point.timed_out or point.report.new_prefill_tokens > SAFE_FACTOR * least:
            break
        safe = point.varied["sample_concurrency"]
    where = describe(others)
    head = "sample-concurrency" + (f" at {where}" if where else "")
    listed = "; ".join(_tokens(point, least) for point in group)
    return f"{head}: safe value {safe}; new-prefill tokens by concurrency: {listed}"


def _tokens(point: Point, least: int) -> str:
    tokens = point.report.new_prefill_tokens
    cut = " when the time limit ended it" if point.timed_out else ""
    factor = tokens / least
    return f"{point.varied['sample_concurrency']}: {tokens:,} ({factor:.2f}x{cut})"


def flags(point: Point, settings: SimulationSettings) -> Iterator[str]:
    """What to give to workers, gateway and agent client."""
    ratio = value_of(point, "ratio", settings)
    policy = value_of(point, "schedule_policy", settings)
    worker = [f"--schedule-policy {policy}"]
    capacity = value_of(point, "routing_prefix_capacity", settings)
    if capacity is not None and policy == "routing-prefix":
        worker.append(f"--routing-prefix-capacity {capacity}")
    if ratio is not None:
        worker.append(f"--mamba-full-memory-ratio {shown(ratio)}")
    worker.append(f"--mamba-max-states-per-path {settings.max_states_per_path}")
    yield f"worker flags: {' '.join(worker)}"
    router = value_of(point, "router_policy", settings)
    gateway = [f"--policy {router}"]
    if router in LBCH:
        factor = value_of(point, "lbch_load_factor", settings)
        gateway.append(f"--lbch-load-factor {shown(factor)}")
    yield f"gateway flags: {' '.join(gateway)}"
    client = [f"--sample-concurrency {value_of(point, 'sample_concurrency', settings)}"]
    limit = value_of(point, "env_concurrency", settings)
    if limit is not None:
        client.append(f"--env-concurrency {limit}")
        client.append(f"--job-order {value_of(point, 'job_order', settings)}")
    yield f"agent client flags: {' '.join(client)}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"
