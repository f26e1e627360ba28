"""Quotes a benchmark's results in a feature's message, so that no figure is typed."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patches.tools.errors import SeriesError

_BATCH = ("workload", "trajectories", "requests", "refresh", "date", "machine")


def quote_benchmark(name: str, root: Path) -> str:
    """Return a paragraph on the results of the scheduler benchmark in file ``name``.

    One line a batch: CPU seconds of priority calculation by policy, the median over
    the seeds. Raise SeriesError when the file is not there or lacks a field.
    """
    try:
        runs = json.loads((root / name).read_text("utf-8"))["runs"]
        lines = [
            textwrap.fill(line, 80, subsequent_indent="  ") for line in _lines(runs)
        ]
    except (OSError, ValueError) as error:
        raise SeriesError(f"{name}: {error}") from None
    except KeyError as error:
        raise SeriesError(f"{name}: field {error} is missing") from None
    return "\n".join(
        [
            "CPU seconds in priority calculation (real scheduler on virtual time):",
            *lines,
        ]
    )


def _lines(runs: list[Mapping[str, Any]]) -> Iterator[str]:
    batches: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for run in runs:
        policies = batches.setdefault(tuple(run[field] for field in _BATCH), {})
        policies.setdefault(run["policy"], []).append(run["priority_cpu_s"])
    for batch, policies in batches.items():
        workload, trajectories, requests, refresh, date, machine = batch
        seconds = ", ".join(
            f"{policy} {statistics.median(values):.2f}"
            for policy, values in policies.items()
        )
        yield (
            f"- {workload}, {trajectories} trajectories, {requests} requests, refresh"
            f" {'on' if refresh else 'off'} ({machine}, {date}): {seconds}"
        )
