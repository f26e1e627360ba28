"""The paper's statements of order or sign, each with what the simulated results say.

``CHECKS`` holds one function a claim; given a :class:`reproduce.Store` it returns a
:class:`Claim`. A claim whose cells have not been run neither holds nor fails.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from figures import (
    C_REF,
    FIGURE_6,
    FIGURE_8,
    TABLE_2,
    TABLE_3,
    Cell,
    figure_3,
    mcp,
    routed,
    scheduled,
)
from reproduce import Store

WHOLE_BATCHES = (
    Path(__file__).resolve().parents[1] / "scheduler" / "results" / "whole.json"
)


class Claim(NamedTuple):
    """One statement of the paper and what the simulation says."""

    where: str
    text: str
    paper: str
    ours: str
    holds: bool | None


class Missing(Exception):
    """A cell that the claim needs has not been run."""


Check = Callable[[Store], Claim]
CHECKS: list[Check] = []


def check(
    where: str, text: str, paper: str
) -> Callable[[Callable[[Store], tuple[str, bool]]], Check]:
    """Register a claim; the function returns our figure and whether it holds."""

    def register(function: Callable[[Store], tuple[str, bool]]) -> Check:
        def evaluate(store: Store) -> Claim:
            try:
                ours, holds = function(store)
            except Missing:
                return Claim(where, text, paper, "not run", None)
            return Claim(where, text, paper, ours, holds)

        CHECKS.append(evaluate)
        return evaluate

    return register


def result(store: Store, cell: Cell) -> dict[str, Any]:
    """The stored result of a cell."""
    found = store.get(cell)
    if found is None:
        raise Missing
    return found


def minutes(store: Store, cell: Cell) -> float:
    """The makespan; a time-out is longer than anything that finished."""
    found = result(store, cell)
    return float("inf") if found["timed_out"] else float(found["minutes"])


def text_of(value: float) -> str:
    """Minutes for people."""
    return "time-out" if value == float("inf") else f"{value:.1f}"


def add_figure_3(workload: str) -> None:
    """Claims about cache allocation and concurrency."""
    ratio, reference = C_REF[workload]
    at_model = Cell(workload, reference, ratio)

    @check(
        "3", f"{workload}: FCFS at (r_bal, C_ref) is near the best cell", "within 8%"
    )
    def near_best(store: Store) -> tuple[str, bool]:
        cells = [entry.cell for entry in figure_3() if entry.cell.workload == workload]
        best = min(minutes(store, cell) for cell in cells)
        here = minutes(store, at_model)
        return f"{here:.1f} against {best:.1f}", here <= 1.10 * best

    @check("3", f"{workload}: the default ratio 0.9 is worse at C_ref", "worse")
    def default_is_worse(store: Store) -> tuple[str, bool]:
        here, default = (
            minutes(store, at_model),
            minutes(store, Cell(workload, reference, 0.9)),
        )
        return f"{text_of(default)} against {text_of(here)}", default > here

    cliffs = {
        "swe": (0.135, 147, 157, 11),
        "bfcl": (1.13, 644, 859, 3),
        "widesearch": (0.15, 123, 147, 9),
    }
    best_ratio, before, after, factor = cliffs[workload]

    @check(
        "4",
        f"{workload}, r = {best_ratio}: new prefill jumps from CS {before} to {after}",
        f"about {factor}x",
    )
    def cliff(store: Store) -> tuple[str, bool]:
        low, high = (
            result(store, Cell(workload, concurrency, best_ratio))[
                "new_prefill_millions"
            ]
            for concurrency in (before, after)
        )
        return f"{high / low:.1f}x", high > 1.5 * low


def add_figure_6(workload: str) -> None:
    """Claims about in-worker scheduling."""
    highest = FIGURE_6[workload][1][-1]

    @check("6", f"{workload}, CS {highest}: routing-prefix is the shortest", "yes")
    def shortest(store: Store) -> tuple[str, bool]:
        values = {
            p: minutes(store, scheduled(workload, p, highest))
            for p in FIGURE_6[workload][2]
        }
        listed = ", ".join(f"{p} {text_of(v)}" for p, v in values.items())
        least = min(v for p, v in values.items() if p != "routing-prefix")
        return listed, values["routing-prefix"] <= 1.005 * least

    @check("6", f"{workload}, CS {highest}: FCFS is the longest", "yes")
    def longest(store: Store) -> tuple[str, bool]:
        values = {
            p: minutes(store, scheduled(workload, p, highest))
            for p in FIGURE_6[workload][2]
        }
        ours = f"{text_of(values['fcfs'])} against {text_of(max(v for p, v in values.items() if p != 'fcfs'))}"
        return ours, values["fcfs"] >= max(values.values())

    @check("6", f"{workload}: more concurrency costs routing-prefix nothing", "yes")
    def insensitive(store: Store) -> tuple[str, bool]:
        values = [
            minutes(store, scheduled(workload, "routing-prefix", concurrency))
            for concurrency in FIGURE_6[workload][1]
        ]
        return " ".join(map(text_of, values)), values[-1] <= 1.02 * min(values)

    @check(
        "7", f"{workload}, CS {highest}: routing-prefix keeps reuse above FCFS", "yes"
    )
    def reuse(store: Store) -> tuple[str, bool]:
        ours, theirs = (
            result(store, scheduled(workload, p, highest))["reuse"]
            for p in ("routing-prefix", "fcfs")
        )
        return f"{ours:.1%} against {theirs:.1%}", ours > theirs


def add_table_1(workload: str, other: str, paper: float) -> None:
    """Claims about priority-calculation time, of whole batches.

    lpm gives up at 128 waiting requests, so seconds do not scale with the batch.
    """

    @check(
        "table 1",
        f"{workload}: priority calculation, routing-prefix / {other}",
        f"{paper:.3g}",
    )
    def cost(store: Store) -> tuple[str, bool]:
        ours, theirs = (
            whole_batch_seconds(workload, p) for p in ("routing-prefix", other)
        )
        if not (seeds := ours.keys() & theirs):
            raise Missing
        ratio = statistics.median(ours[seed] / theirs[seed] for seed in seeds)
        return f"{ratio:.3g} (measured, scale 1)", (ratio < 1) == (paper < 1)


def whole_batch_seconds(workload: str, policy: str) -> dict[int, float]:
    """CPU seconds that ``make bench-scheduler`` has measured, by seed."""
    return {
        run["seed"]: run["priority_cpu_s"]
        for run in json.loads(WHOLE_BATCHES.read_text())["runs"]
        if (run["workload"], run["policy"]) == (workload, policy)
        and run["refresh"]
        and run["scale"] == 1
    }


def add_figure_8(workload: str) -> None:
    """Claims about routing."""

    @check("8", f"{workload}: LBCH is the shortest", "yes")
    def shortest(store: Store) -> tuple[str, bool]:
        values = {r: minutes(store, routed(workload, r)) for r in FIGURE_8[workload][2]}
        listed = ", ".join(f"{r} {text_of(v)}" for r, v in values.items())
        return listed, values["lbch"] == min(values.values())

    @check("10", f"{workload}: LBCH has the least request imbalance", "yes")
    def balanced(store: Store) -> tuple[str, bool]:
        values = {
            r: result(store, routed(workload, r))["beta"] for r in FIGURE_8[workload][2]
        }
        listed = ", ".join(f"{r} {v:.1%}" for r, v in values.items())
        return listed, values["lbch"] == min(values.values())


def add_figure_11(capacity: int) -> None:
    """Claims about capacity separation and job order."""

    @check(
        "11",
        f"CE {capacity}: CS 10 instead of {capacity} shortens the makespan",
        "about -33%",
    )
    def separated(store: Store) -> tuple[str, bool]:
        unified, ten = (minutes(store, mcp(capacity, c)) for c in (capacity, 10))
        return f"{ten / unified - 1:+.1%}", -0.45 < ten / unified - 1 < -0.2

    @check("11", f"CE {capacity}: CS 25 and 50 add little", "small")
    def levels(store: Store) -> tuple[str, bool]:
        ten, more, most = (minutes(store, mcp(capacity, c)) for c in (10, 25, 50))
        return f"{more / ten - 1:+.1%}, {most / ten - 1:+.1%}", min(
            more, most
        ) > 0.8 * ten

    paper = {3: (-0.019, -0.190), 5: (-0.035, -0.214)}[capacity]

    @check(
        "12", f"CE {capacity}, CS 50: CAAS shortens the makespan", f"{paper[0]:+.1%}"
    )
    def shorter(store: Store) -> tuple[str, bool]:
        fcfs, caas = (minutes(store, mcp(capacity, 50, o)) for o in ("fcfs", "caas"))
        return f"{caas / fcfs - 1:+.1%}", caas < fcfs

    @check("12", f"CE {capacity}, CS 50: CAAS shortens L5", f"{paper[1]:+.1%}")
    def tail(store: Store) -> tuple[str, bool]:
        fcfs, caas = (
            result(store, mcp(capacity, 50, o))["l5_minutes"] for o in ("fcfs", "caas")
        )
        return f"{caas / fcfs - 1:+.1%}", caas < fcfs

    @check("12", f"CE {capacity}, CS 50: CAAS reaches 95% later", "later")
    def later(store: Store) -> tuple[str, bool]:
        fcfs, caas = (
            result(store, mcp(capacity, 50, o))["t95_minutes"] for o in ("fcfs", "caas")
        )
        return f"{caas / fcfs - 1:+.1%}", caas > fcfs


def add_tables() -> None:
    """Claims from the live tables, as replays of our traces."""
    pairs = [
        ("bfcl opt", "bfcl baseline"),
        ("swe opt", "swe baseline 1"),
        ("swe opt", "swe baseline 2"),
        ("widesearch opt", "widesearch baseline"),
    ]
    for better, worse in pairs:
        _add_pair("table 2", better, worse, TABLE_2)
    _add_pair("table 3", "opt-fcfs", "baseline", TABLE_3)
    _add_pair("table 3", "opt-caas", "opt-fcfs", TABLE_3)


def _add_pair(
    where: str, better: str, worse: str, table: dict[str, tuple[Cell, float]]
) -> None:
    paper = table[better][1] / table[worse][1] - 1

    @check(
        where,
        f"{better} against {worse}: makespan (live in the paper)",
        f"{paper:+.1%}",
    )
    def change(store: Store) -> tuple[str, bool]:
        ours = minutes(store, table[better][0]) / minutes(store, table[worse][0]) - 1
        return f"{ours:+.1%}", ours < 0


for _workload in C_REF:
    add_figure_3(_workload)
for _workload in FIGURE_6:
    add_figure_6(_workload)
for _workload, _other, _paper in (
    ("swe", "lpm", 0.41),
    ("swe", "dfs-weight", 0.18),
    ("bfcl", "lpm", 1.43),
    ("bfcl", "dfs-weight", 0.063),
    ("widesearch", "lpm", 0.64),
    ("widesearch", "dfs-weight", 0.28),
):
    add_table_1(_workload, _other, _paper)
for _workload in FIGURE_8:
    add_figure_8(_workload)
for _capacity in (3, 5):
    add_figure_11(_capacity)
add_tables()
