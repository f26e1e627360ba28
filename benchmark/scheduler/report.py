"""What the runs of ``bench.py`` say: a table, the goals, a picture.

``python benchmark/scheduler/report.py RESULTS...`` rewrites the tables of README.md and
draws ``results/priority.png``.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

POLICIES = [
    "fcfs",
    "lpm",
    "dfs-weight",
    "hrrn",
    "routing-key",
    "shortest-prefill-first",
    "routing-prefix",
]
OURS = "routing-prefix"
MARK_BEGIN, MARK_END = "<!-- measured -->", "<!-- end of measured -->"


class Case(NamedTuple):
    """A workload at its highest concurrency, and the goals as RP / other."""

    sample_concurrency: int
    ratio: float
    goals: dict[str, float]
    paper: dict[str, float]


CASES = {
    "swe": Case(
        289, 0.09, {"lpm": 0.25, "dfs-weight": 0.10}, {"lpm": 0.41, "dfs-weight": 0.18}
    ),
    "bfcl": Case(
        1950, 2.26, {"lpm": 1.0, "dfs-weight": 0.04}, {"lpm": 1.43, "dfs-weight": 0.063}
    ),
    "widesearch": Case(
        200, 0.10, {"lpm": 0.40, "dfs-weight": 0.15}, {"lpm": 0.64, "dfs-weight": 0.28}
    ),
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated batch and what it cost; ``scale`` 1 is a whole one.

    ``engine`` and the peak are missing from runs that did not record them.
    """

    workload: str
    scale: float
    policy: str
    refresh: bool
    seed: int
    trajectories: int
    requests: int
    passes: int
    priority_cpu_s: float
    scheduler_cpu_s: float
    peak_memory_bytes: int | None
    waiting_peak: int
    reuse: float
    virtual_makespan_s: float
    engine: dict[str, Any]
    date: str
    machine: str


class Group(NamedTuple):
    """The seeds of one workload, scale, refresh setting and policy."""

    workload: str
    scale: float
    refresh: bool
    policy: str


Groups = dict[Group, list[Run]]


def group(runs: Iterable[Run]) -> Groups:
    """Runs by everything but the seed: whole batches first, policies in our order."""
    found: Groups = {}
    for run in runs:
        key = Group(run.workload, run.scale, run.refresh, run.policy)
        found.setdefault(key, []).append(run)
    order = list(CASES)

    def place(key: Group) -> tuple[Any, ...]:
        policy = POLICIES.index(key.policy)
        return (-key.scale, order.index(key.workload), not key.refresh, policy)

    return {key: found[key] for key in sorted(found, key=place)}


def summary(runs: Iterable[Run]) -> list[str]:
    """The tables, in Markdown."""
    groups = group(runs)
    return [*goals(groups), "", *costs(groups), "", *queries(groups)]


def goals(groups: Groups) -> Iterator[str]:
    """Routing-prefix against the others: ratios, seed by seed."""
    yield "| batch | refresh | ratio | here: median (min to max) | goal | | paper |"
    yield "|---|---|---|---|---|---|---|"
    for ours, runs in groups.items():
        if ours.policy != OURS:
            continue
        case = CASES[ours.workload]
        for other, goal in case.goals.items():
            ratios = paired(runs, groups.get(ours._replace(policy=other), []))
            if ratios:
                met = "met" if statistics.median(ratios) <= goal else "**not met**"
                compared = batch(ours, runs[: len(ratios)])
                yield (
                    f"| {compared} | {on_off(ours.refresh)} | RP / {other} | "
                    f"{spread(ratios)} | {goal} | {met} | {case.paper[other]} |"
                )


def paired(ours: Sequence[Run], theirs: Sequence[Run]) -> list[float]:
    """Ratios of priority seconds, of runs with the same seed."""
    by_seed = {run.seed: run.priority_cpu_s for run in theirs}
    return [r.priority_cpu_s / by_seed[r.seed] for r in ours if r.seed in by_seed]


def costs(groups: Groups) -> Iterator[str]:
    """Every policy's cost."""
    yield (
        "| batch | refresh | policy | priority CPU s: median (min to max) | passes | "
        "µs a pass | reuse | makespan (simulated min) |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for key, runs in groups.items():
        yield (
            f"| {batch(key, runs)} | {on_off(key.refresh)} | {key.policy} | "
            f"{spread([r.priority_cpu_s for r in runs])} | "
            f"{median(runs, lambda r: r.passes):.0f} | "
            f"{median(runs, lambda r: r.priority_cpu_s / r.passes * 1e6):.0f} | "
            f"{median(runs, lambda r: r.reuse):.3f} | "
            f"{median(runs, lambda r: r.virtual_makespan_s / 60):.1f} |"
        )


def queries(groups: Groups) -> Iterator[str]:
    """How near routing-prefix is to its floor of one prefix query a labelled request."""
    yield (
        "| batch | refresh | requests in the first tier | prefix queries | saved | "
        "all priority calculation, µs a query |"
    )
    yield "|---|---|---|---|---|---|"
    for key, runs in groups.items():
        counts = [
            run.engine["routing_prefix"]
            for run in runs
            if key.policy == OURS and run.engine
        ]
        if not counts:
            continue
        asked = statistics.median(count["prefix_queries"] for count in counts)
        first = statistics.median(count["admitted_first_tier"] for count in counts)
        saved = statistics.median(count["prefix_queries_saved"] for count in counts)
        each = median(runs, lambda run: run.priority_cpu_s) / max(1, asked) * 1e6
        yield (
            f"| {batch(key, runs)} | {on_off(key.refresh)} | {first:,.0f} | "
            f"{asked:,.0f} | {saved:,.0f} | {each:.0f} |"
        )


def batch(key: Group, runs: Sequence[Run]) -> str:
    """What was run: workload, concurrency, how much of it, how often."""
    part = "whole" if key.scale == 1 else "slice"
    requests = f"{round(median(runs, lambda r: r.requests)):,} requests"
    concurrency = CASES[key.workload].sample_concurrency
    seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"
    return f"{key.workload}, CS {concurrency}, {part}: {requests}, {seeds}"


def on_off(refresh: bool) -> str:
    """The refresh setting as a word."""
    return "on" if refresh else "off"


def median(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
    """Median of a figure over the seeds."""
    return statistics.median(map(of, runs))


def spread(values: Sequence[float]) -> str:
    """Median, and the extremes when there is more than one value."""
    text = f"{statistics.median(values):.3f}"
    if len(values) == 1:
        return text
    return f"{text} ({min(values):.3f} to {max(values):.3f})"


def draw(groups: Groups, path: Path) -> None:
    """Priority seconds by policy: a panel per workload and extent, log scale."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((key.workload, key.scale) for key in groups))
    figure = Figure(figsize=(9, 2.2 * -(-len(panels) // 3)), layout="constrained")
    grid = figure.subplots(-(-len(panels) // 3), 3, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (workload, scale) in zip(grid.flat, panels, strict=False):
        panel = {k: v for k, v in groups.items() if k[:2] == (workload, scale)}
        bars(axes, panel)
        concurrency = CASES[workload].sample_concurrency
        part = "whole batch" if scale == 1 else "slice"
        axes.set_title(f"{workload}, CS {concurrency}, {part}", fontsize=8)
    figure.supxlabel("CPU s in priority calculation; refresh on, off", fontsize=8)
    figure.savefig(path, dpi=120)


def bars(axes: Any, panel: Groups) -> None:
    """One bar for each policy and refresh setting, with the extremes of the seeds."""
    policies = [p for p in POLICIES if any(key.policy == p for key in panel)]
    for key, runs in panel.items():
        values = [run.priority_cpu_s for run in runs]
        middle = statistics.median(values)
        place = policies.index(key.policy) + (-0.2 if key.refresh else 0.2)
        color = "tab:blue" if key.policy == OURS else "tab:gray"
        error = [[middle - min(values)], [max(values) - middle]]
        alpha = 1.0 if key.refresh else 0.5
        axes.barh(place, middle, 0.38, color=color, alpha=alpha, xerr=error)
    seconds = [run.priority_cpu_s for runs in panel.values() for run in runs]
    axes.set_xscale("log")
    # Whole decades, or the length of a bar would say nothing.
    axes.set_xlim(10 ** (math.floor(math.log10(min(seconds))) - 1), 2 * max(seconds))
    axes.minorticks_off()
    axes.set_yticks(range(len(policies)), policies, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.invert_yaxis()


def rewrite(readme: Path, lines: Sequence[str]) -> None:
    """Replace what is between the marks."""
    before, _, rest = readme.read_text().partition(MARK_BEGIN)
    _, _, after = rest.partition(MARK_END)
    body = "\n".join(lines)
    readme.write_text(f"{before}{MARK_BEGIN}\n{body}\n{MARK_END}{after}")


def load(path: Path) -> list[Run]:
    """The runs that a results file holds."""
    return msgspec.convert(json.loads(path.read_text())["runs"], list[Run])


def main(paths: Sequence[str]) -> None:
    """Bring README.md and the picture up to date with the results in ``paths``."""
    here = Path(__file__).parent
    runs = [run for path in paths for run in load(Path(path))]
    rewrite(here / "README.md", summary(runs))
    draw(group(runs), here / "results" / "priority.png")


if __name__ == "__main__":
    main(sys.argv[1:])
