"""Which simulations stand behind each published figure and table.

Published values (arXiv:2611.16661) are makespans in minutes unless said otherwise;
None is a time-out. Each cell is one batch; cells that figures share run once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

SWE_R, BFCL_R, WIDESEARCH_R = 0.09, 2.26, 0.10
C_REF = {"swe": (SWE_R, 98), "bfcl": (BFCL_R, 859), "widesearch": (WIDESEARCH_R, 98)}
"""The balanced ratio and the reference concurrency of one worker."""


class Cell(NamedTuple):
    """One batch, in the paper's own terms (unscaled)."""

    workload: str
    sample_concurrency: int
    ratio: float
    schedule_policy: str = "fcfs"
    workers: int = 1
    router_policy: str = "lbch"
    env_concurrency: int | None = None
    job_order: str = "fcfs"
    time_limit_hours: float = 6.0

    @property
    def key(self) -> str:
        """Name in the results file."""
        return "/".join(str(value) for value in self)


class Published(NamedTuple):
    """A cell with the paper's makespan in minutes, if it is printed.

    ``reference`` is the cell of the same batch that others are compared with.
    """

    cell: Cell
    minutes: float | None
    timed_out: bool = False
    reference: Cell | None = None


FIGURE_3: dict[str, tuple[list[int], dict[float, list[float | None]]]] = {
    "swe": (
        [49, 74, 98, 123, 147, 157],
        {
            0.045: [148.3, None, None, None, None, None],
            0.09: [150.8, 136.6, 131.9, None, None, None],
            0.135: [147.4, 137.6, 131.7, 125.7, 122.4, 236.6],
            0.18: [151.5, 138.4, 132.6, 127.2, 171.8, None],
            0.45: [147.7, 138.1, 131.7, None, None, None],
            0.9: [151.1, 138.5, None, None, None, None],
        },
    ),
    "bfcl": (
        [430, 644, 859, 1074, 1289],
        {
            0.9: [25.01, 25.35, 35.14, 35.82, 36.47],
            1.13: [21.40, 20.75, 32.67, 33.76, 34.21],
            2.26: [22.12, 21.66, 22.57, 35.25, 36.98],
            3.39: [27.98, 32.08, 35.75, 36.70, 38.00],
            4.52: [32.59, 35.75, 37.52, 37.74, 38.65],
        },
    ),
    "widesearch": (
        [49, 74, 98, 123, 147],
        {
            0.05: [97.23, 225.26, 219.12, 217.49, 216.19],
            0.1: [97.17, 89.53, 85.79, 166.43, 179.16],
            0.15: [97.21, 89.61, 85.95, 82.43, 139.90],
            0.2: [97.07, 89.54, 86.00, 88.67, 155.56],
            0.9: [100.82, 132.91, 203.49, 205.16, 209.53],
        },
    ),
}

FIGURE_6: dict[str, tuple[float, list[int], dict[str, list[float | None]]]] = {
    "swe": (
        SWE_R,
        [49, 98, 196, 289],
        {
            "fcfs": [150.8, 131.9, 747.4, None],
            "lpm": [150.0, 134.0, 129.9, 505.0],
            "dfs-weight": [154.4, 144.7, 146.0, 152.2],
            "routing-prefix": [150.0, 134.3, 127.9, 128.2],
        },
    ),
    "bfcl": (
        BFCL_R,
        [325, 650, 1300, 1950],
        {
            "fcfs": [24.5, 26.1, 35.8, 35.9],
            "lpm": [24.0, 24.9, 32.9, 34.0],
            "dfs-weight": [24.3, 23.3, 24.0, 24.0],
            "routing-prefix": [23.0, 20.6, 19.8, 19.8],
        },
    ),
    "widesearch": (
        WIDESEARCH_R,
        [49, 98, 150, 200],
        {
            "fcfs": [100.9, 86.5, 180.2, 192.9],
            "lpm": [100.9, 86.6, 85.8, 85.7],
            "dfs-weight": [97.6, 86.7, 86.1, 86.0],
            "routing-prefix": [97.2, 86.1, 85.2, 85.1],
        },
    ),
}

FIGURE_8: dict[str, tuple[float, int, dict[str, float]]] = {
    "swe": (
        SWE_R,
        196,
        {"cache_aware": 84.1, "consistent_hashing": 75.3, "lbch": 72.7},
    ),
    "bfcl": (
        BFCL_R,
        2000,
        {"cache_aware": 16.8, "consistent_hashing": 16.2, "lbch": 15.6},
    ),
    "widesearch": (
        WIDESEARCH_R,
        200,
        {"cache_aware": 52.7, "consistent_hashing": 52.9, "lbch": 51.9},
    ),
}

# Figures 11 and 12 print curves, not makespans; section 5.3 gives the changes.
MCP_RATIO = 0.14


def mcp(env_concurrency: int, concurrency: int, job_order: str = "fcfs") -> Cell:
    """One batch of the coordination replay."""
    return Cell(
        "mcp_atlas",
        concurrency,
        MCP_RATIO,
        "routing-prefix",
        2,
        "lbch",
        env_concurrency,
        job_order,
    )


def live(workload: str, concurrency: int, ratio: float, optimized: bool) -> Cell:
    """A live operating point (table A2) as a replay of our trace."""
    policy, router = (
        ("routing-prefix", "lbch") if optimized else ("fcfs", "cache_aware")
    )
    return Cell(workload, concurrency, ratio, policy, 2, router)


TABLE_2: dict[str, tuple[Cell, float]] = {
    "bfcl baseline": (live("bfcl", 100, 0.9, False), 68.4),
    "bfcl opt": (live("bfcl", 300, 1.5, True), 49.2),
    "swe baseline 1": (live("swe_live", 100, 0.9, False), 166.9),
    "swe baseline 2": (live("swe_live", 250, 0.9, False), 197.7),
    "swe opt": (live("swe_live", 250, 0.1, True), 149.5),
    "widesearch baseline": (live("widesearch", 40, 0.9, False), 186.7),
    "widesearch opt": (live("widesearch", 100, 0.25, True), 116.7),
}

TABLE_3: dict[str, tuple[Cell, float]] = {
    "baseline": (
        Cell("mcp_atlas", 3, 0.9, "fcfs", 2, "cache_aware", 3, "fcfs", 24.0),
        466.1,
    ),
    "opt-fcfs": (mcp(3, 50), 168.2),
    "opt-caas": (mcp(3, 50, "caas"), 163.0),
}


def scheduled(workload: str, policy: str, concurrency: int) -> Cell:
    """A cell of figure 6; only the swe runs past C_ref had more than six hours."""
    long = workload == "swe" and concurrency > C_REF["swe"][1]
    return Cell(
        workload,
        concurrency,
        FIGURE_6[workload][0],
        policy,
        time_limit_hours=13.0 if long else 6.0,
    )


def figure_3() -> Iterator[Published]:
    """Cache allocation against concurrency, FCFS, one worker."""
    for workload, (concurrencies, rows) in FIGURE_3.items():
        ratio, concurrency = C_REF[workload]
        best = Cell(workload, concurrency, ratio)
        for ratio, values in rows.items():
            for concurrency, minutes in zip(concurrencies, values, strict=True):
                cell = Cell(workload, concurrency, ratio)
                yield Published(cell, minutes, minutes is None, best)


def figure_6() -> Iterator[Published]:
    """In-worker scheduling at the balanced ratio; also figure 7 and table 1."""
    for workload, (_, concurrencies, rows) in FIGURE_6.items():
        best = scheduled(workload, "routing-prefix", concurrencies[-1])
        for policy, values in rows.items():
            for concurrency, minutes in zip(concurrencies, values, strict=True):
                cell = scheduled(workload, policy, concurrency)
                yield Published(cell, minutes, minutes is None, best)


def figure_8() -> Iterator[Published]:
    """Cross-worker routing on two workers; also figures 9 and 10."""
    for workload, (_, _, rows) in FIGURE_8.items():
        for router, minutes in rows.items():
            yield Published(
                routed(workload, router), minutes, reference=routed(workload, "lbch")
            )


def routed(workload: str, router: str) -> Cell:
    """A cell of figure 8."""
    ratio, concurrency, _ = FIGURE_8[workload]
    return Cell(workload, concurrency, ratio, "routing-prefix", 2, router)


def figure_11() -> Iterator[Published]:
    """Capacity separation; the first concurrency is the unified baseline."""
    for env_concurrency in (3, 5):
        for concurrency in (env_concurrency, 10, 25, 50):
            yield Published(mcp(env_concurrency, concurrency), None)


def figure_12() -> Iterator[Published]:
    """Job order at a sample concurrency of 50."""
    for env_concurrency in (3, 5):
        for order in ("fcfs", "caas"):
            yield Published(mcp(env_concurrency, 50, order), None)


def table_2() -> Iterator[Published]:
    """Live operating points, replayed."""
    for name, (cell, minutes) in TABLE_2.items():
        best, _ = TABLE_2[f"{name.split()[0]} opt"]
        yield Published(cell, minutes, reference=best)


def table_3() -> Iterator[Published]:
    """Live MCP-Atlas, replayed."""
    best, _ = TABLE_3["opt-fcfs"]
    for cell, minutes in TABLE_3.values():
        yield Published(cell, minutes, reference=best)


def without_environment() -> Iterator[Published]:
    """The swe rows of table 2 with the trace of the replay: nothing but inference."""
    for concurrency, ratio, optimized in (
        (100, 0.9, False),
        (250, 0.9, False),
        (250, 0.1, True),
    ):
        yield Published(live("swe", concurrency, ratio, optimized), None)


@functools.cache
def one_state_per_path() -> frozenset[Cell]:
    """Cells of the deployment that section 3.4 describes, whichever engine runs them.

    These are the optimized live runs and the coordination replay. The sweeps of figures 3
    to 8 are not among them: their cliffs say otherwise (README.md, where it differs).
    """
    figures = (figure_11, figure_12, table_2, table_3, without_environment)
    cells = (entry.cell for figure in figures for entry in figure())
    return frozenset(cell for cell in cells if is_optimized(cell))


def is_optimized(cell: Cell) -> bool:
    """Whether all of the paper's inference-side methods are on."""
    return (cell.schedule_policy, cell.router_policy) == ("routing-prefix", "lbch")


def router_options(cell: Cell, scale: float) -> dict[str, float]:
    """Settings of cache-aware routing: native in figure 8, appendix A.3 in the tables.

    The absolute threshold counts requests, so it shrinks with the batch; unscaled it
    would let a shared system prompt send a small batch to one worker.
    """
    if cell.router_policy != "cache_aware":
        return {}
    if cell.schedule_policy == "fcfs":
        thresholds = {"balance_abs_threshold": 0, "balance_rel_threshold": 1.6666667}
    else:
        thresholds = {
            "balance_abs_threshold": round(64 * scale),
            "balance_rel_threshold": 1.5,
        }
    return thresholds | {"first_holder": True}


# The cheap ones first, so that something is there early.
FIGURES = {
    "figure-12": figure_12,
    "figure-11": figure_11,
    "table-3": table_3,
    "figure-8": figure_8,
    "table-2": table_2,
    "table-2-without-environment": without_environment,
    "figure-6": figure_6,
    "figure-3": figure_3,
}
"""Figures 4 and 5 are rows of figure 3; 7 and table 1 are of figure 6; 9 and 10 of 8."""
