"""Fits what ordering the waiting queue costs to table 1 of the paper.

The virtual worker counts what each policy goes over; the seconds are linear in the
counts. So: simulate the nine cells of table 1, read the counts, solve for coefficients
>= 0, and repeat if wanted, because the charge changes the schedule a little. An error
counts by its share of the published makespan, which is what it would distort.

The result is kept in the cost model beside the fit of the forward passes, which it does
not touch: fcfs is charged nothing for its order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import reproduce
from engines import OLDER
from figures import FIGURE_6, scheduled

from sglang_agent.simulate import Deployment, load_deployment
from sglang_agent.simulate.workers import WorkerPool

COEFFICIENTS = ("waiting_token_s", "lookup_token_s", "walked_token_s")
POLICIES = ("lpm", "dfs-weight", "routing-prefix")
TABLE_1 = {
    "swe": (735.00, 1704.25, 303.05),
    "bfcl": (7.65, 172.15, 10.91),
    "widesearch": (62.82, 144.08, 39.97),
}
"""Seconds of priority calculation at the highest concurrency, by :data:`POLICIES`."""


class Row(NamedTuple):
    """One figure of table 1 and what the simulation counted for it, in tokens."""

    workload: str
    policy: str
    seconds: float
    makespan_s: float
    counts: tuple[float, ...]


def main(arguments: list[str] | None = None) -> int:
    """Fit and write the cost model with its errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 8))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    with OLDER.pool() as pool:
        rows = measure(options.scale, pool)
    deployment = fitted(load_deployment(reproduce.COST_MODEL), rows)
    deployment.fit["priority"]["method"] = (
        f"benchmark/paper/fit_priority.py at scale {options.scale}"
    )
    content = msgspec.json.format(msgspec.json.encode(deployment), indent=2)
    options.output.write_bytes(content + b"\n")
    print(json.dumps(deployment.fit["priority"], indent=1))
    return 0


def measure(scale: Fraction, pool: WorkerPool) -> list[Row]:
    """Simulate the cells of table 1."""
    keys = list(itertools.product(TABLE_1, POLICIES))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(lambda key: _row(*key, scale, pool), keys))


def _row(workload: str, policy: str, scale: Fraction, pool: WorkerPool) -> Row:
    _, concurrencies, makespans = FIGURE_6[workload]
    minutes = makespans[policy][-1]
    assert minutes is not None, "only fcfs timed out"
    cell = scheduled(workload, policy, concurrencies[-1])
    counts = reproduce.run(cell, reproduce.Variant(scale), pool)[
        "priority_million_tokens"
    ]
    seconds = TABLE_1[workload][POLICIES.index(policy)]
    tokens = tuple(counts[field] * 1e6 for field in reproduce.PRIORITY_COUNTS)
    row = Row(workload, policy, seconds, minutes * 60, tokens)
    print(row, file=sys.stderr, flush=True)
    return row


def solve(rows: list[Row]) -> np.ndarray:
    """Non-negative least squares of the errors over the makespans."""
    left = np.array([[count / row.makespan_s for count in row.counts] for row in rows])
    right = np.array([row.seconds / row.makespan_s for row in rows])
    best: tuple[float, np.ndarray] | None = None
    for size in range(1, len(COEFFICIENTS) + 1):
        for chosen in itertools.combinations(range(len(COEFFICIENTS)), size):
            found, *_ = np.linalg.lstsq(left[:, chosen], right, rcond=None)
            loss = float(((left[:, chosen] @ found - right) ** 2).sum())
            if (found > 0).all() and (best is None or loss < best[0]):
                values = np.zeros(len(COEFFICIENTS))
                values[list(chosen)] = found
                best = (loss, values)
    if best is None:
        raise RuntimeError("no non-negative coefficients fit table 1")
    return best[1]


def fitted(deployment: Deployment, rows: list[Row]) -> Deployment:
    """``deployment`` with the coefficients that suit ``rows``, and their errors."""
    values = solve(rows)
    passes = msgspec.structs.replace(
        deployment.passes, **dict(zip(COEFFICIENTS, map(float, values), strict=True))
    )
    account = {"source": "arXiv:2611.16661, table 1", "cells": accounts(rows, values)}
    fit = {**deployment.fit, "priority": account}
    return msgspec.structs.replace(deployment, passes=passes, fit=fit)


def accounts(rows: list[Row], values: np.ndarray) -> list[dict[str, Any]]:
    """Published and fitted seconds, and the error as a share of the makespan."""
    cells = []
    for row in rows:
        seconds = float(np.array(row.counts) @ values)
        cells.append(
            {
                "workload": row.workload,
                "schedule_policy": row.policy,
                "seconds": row.seconds,
                "fitted_seconds": round(seconds, 1),
                "error_of_makespan": round((seconds - row.seconds) / row.makespan_s, 4),
            }
        )
    return cells


if __name__ == "__main__":
    sys.exit(main())
