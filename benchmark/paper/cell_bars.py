"""A picture for each figure and table: the paper's makespans and ours, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from figures import FIGURES, Cell, Published
from reproduce import Store

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")
PAPER_COLOUR = "tab:gray"

Row = tuple[Published, Mapping[str, dict[str, Any]]]
"""A published cell, and its result at each scale at which it was run."""


def draw(stores: Mapping[str, Store], folder: Path) -> None:
    """Draw what has been run, one bar a scale beside the paper's.

    ``stores`` are named by their scale. A figure of which nothing was run has no file.
    """
    for name, figure in FIGURES.items():
        known = list(rows(stores, figure()))
        file = folder / f"{name}.png"
        if known:
            draw_figure(name, known, list(stores), file)
        else:
            file.unlink(missing_ok=True)


def rows(stores: Mapping[str, Store], figure: Iterator[Published]) -> Iterator[Row]:
    """The cells that were run at any scale."""
    for entry in figure:
        found = {name: store.get(entry.cell) for name, store in stores.items()}
        run = {name: result for name, result in found.items() if result is not None}
        if run:
            yield entry, run


def draw_figure(name: str, known: list[Row], scales: list[str], file: Path) -> None:
    """Horizontal bars, the paper's first."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 1.2 + 0.26 * len(known)), layout="constrained")
    axes = picture.subplots()
    height = 0.8 / (1 + len(scales))
    for column, (label, colour) in enumerate(bars(scales)):
        cells = [minutes_of(entry, run, label) for entry, run in known]
        at = [row + (column - len(scales) / 2) * height for row in range(len(cells))]
        widths = [value or 0.0 for value in cells]
        axes.barh(at, widths, height, color=colour, label=label)
    for row, (entry, run) in enumerate(known):
        if who := timed_out(entry, run):
            axes.text(0, row, f"  time-out: {', '.join(who)}", va="center", fontsize=6)
    axes.set_yticks(range(len(known)), [title(e.cell) for e, _ in known], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("makespan (min), simulated but for the paper's")
    axes.legend(fontsize=7)
    axes.set_title(name)
    picture.savefig(file, dpi=110)


def bars(scales: list[str]) -> list[tuple[str, str]]:
    """Label and colour of each bar of a cell."""
    ours = [(f"scale {scale}", c) for scale, c in zip(scales, COLOURS, strict=False)]
    return [("paper", PAPER_COLOUR), *ours]


def minutes_of(
    entry: Published, run: Mapping[str, dict[str, Any]], label: str
) -> float | None:
    """The length of one bar; None if it is not known."""
    if label == "paper":
        return entry.minutes
    result = run.get(label.removeprefix("scale "))
    return result and result["minutes"]


def timed_out(entry: Published, run: Mapping[str, dict[str, Any]]) -> list[str]:
    """Who ran into the limit."""
    ours = [f"scale {scale}" for scale, result in run.items() if result["timed_out"]]
    return [*ours, *(["paper"] if entry.timed_out else [])]


def title(cell: Cell) -> str:
    """A cell in words."""
    parts = [
        cell.workload,
        f"CS {cell.sample_concurrency}",
        f"r {cell.ratio:g}",
        cell.schedule_policy,
    ]
    if cell.workers > 1:
        parts.append(cell.router_policy)
    if cell.env_concurrency is not None:
        parts.append(f"CE {cell.env_concurrency} {cell.job_order}")
    return ", ".join(parts)
