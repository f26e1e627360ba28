"""Many simulations of one trace: a grid of settings, in parallel processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import msgspec

from sglang_agent.errors import UsageError
from sglang_agent.report import Report, build_report
from sglang_agent.simulate.batch import SimulationResult, simulate
from sglang_agent.simulate.fleet import RoutingPolicy
from sglang_agent.simulate.script import TrajectoryScript
from sglang_agent.simulate.settings import SimulationSettings
from sglang_agent.simulate.workers import WorkerPool

AXES: dict[str, Callable[[str], Any]] = {
    "ratio": float,
    "sample_concurrency": int,
    "env_concurrency": int,
    "workers": int,
    "schedule_policy": str,
    "routing_prefix_capacity": int,
    "router_policy": str,
    "lbch_load_factor": float,
    "job_order": str,
}
"""What a sweep may vary, with the type of its values."""


class Point(NamedTuple):
    """One cell of a sweep: what was varied and what came out."""

    varied: dict[str, Any]
    timed_out: bool
    report: Report
    workers: list[Any]


def shown(value: Any) -> str:
    """A value of an axis for people; four digits of a derived ratio are enough."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse_axes(
    words: Sequence[str], ratios: Mapping[str, float]
) -> dict[str, list[Any]]:
    """Read ``name=value,value`` words; dashes and underscores are the same.

    ``ratios`` are the ratios that have a name. Raises :class:`UsageError` naming the
    word.
    """
    axes: dict[str, list[Any]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.replace("-", "_")
        if name not in AXES or not equals:
            allowed = ", ".join(axis.replace("_", "-") for axis in AXES)
            raise UsageError(f"sweep: {word!r}; allowed: NAME=V1,V2 with {allowed}")
        named = ratios if name == "ratio" else {}
        try:
            axes[name] = [
                named[value] if value in named else AXES[name](value)
                for value in values.split(",")
            ]
        except ValueError as error:
            allowed = ", ".join(["numbers", *named])
            raise UsageError(f"sweep: {word!r}; allowed: {allowed}") from error
    return axes


def grid(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination, the last axis fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def sweep(
    scripts: Sequence[TrajectoryScript],
    settings: SimulationSettings,
    cells: Sequence[dict[str, Any]],
    policy_factory: Callable[[SimulationSettings], RoutingPolicy],
    pool: WorkerPool,
    *,
    scale: float = 1.0,
    parallel: int | None = None,
    on_point: Callable[[Point], None] = lambda _: None,
) -> list[Point]:
    """Simulate every cell; points come back in the order of ``cells``.

    ``settings`` and ``cells`` are of the whole deployment, of which ``scale`` is
    simulated with ``scripts``.

    ``parallel`` cells run at once (default: one per CPU). The schedulers are processes
    of their own; only the light agent side shares this one. ``policy_factory`` makes
    the routing policy of a cell's settings. The first failure ends the sweep.
    """

    def run(varied: dict[str, Any]) -> Point:
        chosen = msgspec.structs.replace(settings, **varied).scaled(scale)
        result = simulate(scripts, chosen, lambda _: policy_factory(chosen), pool)
        return point_of(varied, result, chosen.names)

    with ThreadPoolExecutor(parallel or os.cpu_count() or 1) as threads:
        futures = [threads.submit(run, varied) for varied in cells]
        for future in as_completed(futures):
            if future.exception() is not None:
                threads.shutdown(cancel_futures=True)
            on_point(future.result())
    return [future.result() for future in futures]


def point_of(
    varied: dict[str, Any], result: SimulationResult, workers: Sequence[str]
) -> Point:
    """Reduce a result to its report and counters; ``workers`` are names."""
    report = build_report(result.records, {"workers": list(workers)})
    counters = [msgspec.to_builtins(worker) for worker in result.workers]
    return Point(varied, result.timed_out, report, counters)


def best(points: Sequence[Point]) -> Point | None:
    """The shortest makespan among the cells that finished; earlier cells win ties."""
    done = [point for point in points if not point.timed_out]
    return min(done, key=lambda point: point.report.makespan_s, default=None)
