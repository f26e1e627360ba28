"""Fits the cost model ``h20-tp4-ling-3.0-flash`` to published makespans.

The durations of all passes add up to the makespan of an inference-only batch on one
worker, and each pass is linear in the coefficients. So: simulate, read how often each
coefficient was charged, solve for non-negative coefficients that bring the relative
errors down (of the cells, and of what lost reuse costs), and repeat if wanted, because other durations change the schedule a little.
The errors given are those of the last round's counts with the new coefficients. Only
cells with intact reuse take part; what happens past a cliff is left to the scheduler.
The published time per output token (table A3) is compared, not fitted. What ordering the
waiting queue costs is kept: fcfs is charged nothing for it (``fit_priority.py``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import reproduce
from engines import OLDER
from figures import Cell as Batch

from sgl_router.policies import make_policy
from sglang_agent.simulate import Deployment, load_deployment, simulate
from sglang_agent.simulate.cost_model import PassCosts
from sglang_agent.simulate.workers import WorkerPool

COEFFICIENTS = (
    "pass_s",
    "prefill_token_s",
    "prefill_context_s",
    "decode_request_s",
    "decode_context_s",
)


class Cell(NamedTuple):
    """One published makespan of figure 3 (FCFS, one worker), in minutes."""

    workload: str
    ratio: float
    sample_concurrency: int
    minutes: float


CELLS = (
    Cell("swe", 0.135, 49, 147.4),
    Cell("swe", 0.135, 147, 122.4),
    Cell("bfcl", 2.26, 430, 22.12),
    Cell("bfcl", 2.26, 644, 21.66),
    Cell("widesearch", 0.15, 49, 97.21),
    Cell("widesearch", 0.15, 123, 82.43),
)


class Recomputation(NamedTuple):
    """What lost reuse costs, from figures 3 and 4.

    Between two neighbouring concurrencies reuse breaks down: the makespan grows by
    ``seconds`` while new prefill becomes ``factor`` times what it was in ``intact``.
    ``context_tokens`` is the typical length that is computed again.
    """

    intact: int
    factor: float
    seconds: float
    context_tokens: int


RECOMPUTATIONS = (
    Recomputation(0, 11.0, (236.6 - 122.4) * 60, 40_000),
    Recomputation(3, 3.0, (32.67 - 20.75) * 60, 2_500),
    Recomputation(5, 9.0, (139.90 - 82.43) * 60, 40_000),
)
"""``intact`` is the place of the cell in :data:`CELLS`: one with all of its reuse, for
the paper's new prefill is the same at all concurrencies before the cliff."""


def main(arguments: list[str] | None = None) -> int:
    """Fit and write the cost model with its errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", default="h20-tp4-ling-3.0-flash")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 8))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    deployment = load_deployment(options.start)
    with OLDER.pool() as pool:
        for number in range(1, options.rounds + 1):
            charges = measure(deployment, options.scale, pool)
            errors = relative_errors(charges, deployment.passes)
            print(f"round {number}: errors {format_errors(errors)}", file=sys.stderr)
            deployment = msgspec.structs.replace(
                deployment,
                passes=solve(charges, deployment),
                fit={},
            )
            errors = relative_errors(charges, deployment.passes)
    deployment = msgspec.structs.replace(deployment, fit=account(errors, options.scale))
    content = msgspec.json.format(msgspec.json.encode(deployment), indent=2)
    options.output.write_bytes(content + b"\n")
    print(json.dumps(deployment.fit, indent=1))
    return 0


def measure(deployment: Deployment, scale: Fraction, pool: WorkerPool) -> np.ndarray:
    """How often each coefficient was charged, a row a cell.

    At a scale, per-token and per-request costs are larger by as much as there are
    fewer tokens; the charges are given for the unscaled coefficients.
    """
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        rows = threads.map(lambda c: charges_of(c, deployment, scale, pool), CELLS)
        return np.array(list(rows))


def charges_of(
    cell: Cell, deployment: Deployment, scale: Fraction, pool: WorkerPool
) -> list[float]:
    """Simulate one cell and count."""
    scripts = reproduce.scripts_of(cell.workload, float(scale), 0)
    batch = Batch(cell.workload, cell.sample_concurrency, cell.ratio)
    settings = reproduce.settings_of(batch, reproduce.Variant(scale), deployment)
    result = simulate(scripts, settings, lambda names: make_policy("lbch", names), pool)
    (worker,) = result.workers
    share = float(scale)
    charges = [
        worker.prefill_passes + worker.decode_passes,
        worker.prefill_tokens / share,
        worker.prefill_context_products / share,
        worker.decode_request_steps / share,
        worker.decode_context_steps / share,
    ]
    print(f"{cell}: charged {charges}", file=sys.stderr, flush=True)
    return charges


def relative_errors(charges: np.ndarray, passes: PassCosts) -> np.ndarray:
    """Simulated over published makespan, minus one."""
    coefficients = [getattr(passes, name) for name in COEFFICIENTS]
    seconds = np.array([cell.minutes * 60 for cell in CELLS])
    return charges @ np.array(coefficients) / seconds - 1


def recomputation_rows(charges: np.ndarray, chunk_tokens: int) -> np.ndarray:
    """Charges of the recomputed tokens alone, over the seconds they took."""
    rows = []
    for lost in RECOMPUTATIONS:
        tokens = charges[lost.intact, 1] * (lost.factor - 1)
        row = [tokens / chunk_tokens, tokens, tokens * lost.context_tokens / 2, 0, 0]
        rows.append(np.array(row) / lost.seconds)
    return np.array(rows)


def solve(charges: np.ndarray, deployment: Deployment) -> PassCosts:
    """Least squares of the relative errors over non-negative coefficients.

    Cells with intact reuse say little about prefill, so what lost reuse costs has
    equations of its own. With five coefficients the best set of positive ones is
    found by trying all.
    """
    seconds = np.array([cell.minutes * 60 for cell in CELLS])
    lost = recomputation_rows(charges, deployment.chunked_prefill_tokens)
    rows = np.concatenate([charges / seconds[:, None], lost])
    best: tuple[float, dict[int, float]] | None = None
    for count in range(1, len(COEFFICIENTS) + 1):
        # A pass always takes some time, or the clock could stand still.
        for others in itertools.combinations(range(1, len(COEFFICIENTS)), count - 1):
            chosen = (0, *others)
            found, *_ = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)
            if (found <= 0).any():
                continue
            loss = float(((rows[:, chosen] @ found - 1) ** 2).sum())
            if best is None or loss < best[0]:
                best = (loss, dict(zip(chosen, map(float, found), strict=True)))
    if best is None:
        raise RuntimeError("no non-negative coefficients fit the published makespans")
    values = [best[1].get(index, 0.0) for index in range(len(COEFFICIENTS))]
    return msgspec.structs.replace(
        deployment.passes, **dict(zip(COEFFICIENTS, values, strict=True))
    )


def account(errors: np.ndarray, scale: Fraction) -> dict[str, Any]:
    """What the fit was made from and how well it does."""
    return {
        "source": "arXiv:2611.16661, figures 3 and 4: FCFS, one worker",
        "method": f"benchmark/paper/fit.py at scale {scale}",
        "mean_absolute_error": round(float(np.abs(errors).mean()), 4),
        "largest_absolute_error": round(float(np.abs(errors).max()), 4),
        "cells": [
            {**cell._asdict(), "relative_error": round(float(error), 4)}
            for cell, error in zip(CELLS, errors, strict=True)
        ],
    }


def format_errors(errors: Sequence[float]) -> str:
    """For the log."""
    return " ".join(f"{error:+.3f}" for error in errors)


if __name__ == "__main__":
    sys.exit(main())
