"""How near the simulated makespans are to the published ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from figures import FIGURES, Published
from reproduce import Store


class Comparison(NamedTuple):
    """A figure at one scale: cells run, of all; ratios to the paper.

    ``relative`` is over the reference cell of the same batch, ours and the paper's.
    """

    name: str
    run: int
    published: int
    timed_out: int
    timed_out_in_both: int
    absolute: list[float]
    relative: list[float]


def makespan_lines(store: Store) -> Iterator[str]:
    """How many published makespans are met within 15%, by figure."""
    yield (
        "| figure | cells run | time-outs of either that agree | makespans within 15% "
        "| relative makespans within 15% |"
    )
    yield "|---|---|---|---|---|"
    compared = [c for name in FIGURES if (c := compare(name, store))]
    for one in compared:
        yield (
            f"| {one.name} | {one.run} of {one.published} | "
            f"{one.timed_out_in_both} of {one.timed_out} | "
            f"{spread(one.absolute)} | {spread(one.relative)} |"
        )
    if ratios := [ratio for one in compared for ratio in one.relative]:
        near = sum(map(is_near, ratios))
        yield ""
        yield (
            f"Relative makespans: {near} of {len(ratios)} ({near / len(ratios):.0%}) "
            "within 15% of the paper's."
        )


def compare(name: str, store: Store) -> Comparison | None:
    """One figure; None if it prints no makespans or none of its cells was run."""
    published = list(FIGURES[name]())
    run = [(e, found) for e in published if (found := store.get(e.cell))]
    if not any(entry.minutes or entry.timed_out for entry, _ in run):
        return None
    ends = [(found["timed_out"], entry.timed_out) for entry, found in run]
    absolute = (against_paper(store, entry) for entry, _ in run)
    relative = (relative_to_paper(store, e, FIGURES[name]()) for e, _ in run)
    return Comparison(
        name,
        len(run),
        len(published),
        sum(ours or theirs for ours, theirs in ends),
        sum(ours and theirs for ours, theirs in ends),
        [ratio for ratio in absolute if ratio],
        [ratio for ratio in relative if ratio],
    )


def is_near(ratio: float) -> bool:
    """Whether a makespan is met."""
    return abs(ratio - 1) <= 0.15


def cost_line(store: Store) -> str:
    """What the cells that were run have cost, and how many there are."""
    cells = {entry.cell for figure in FIGURES.values() for entry in figure()}
    seconds = [found["cpu_s"] for c in cells if (found := store.get(c))]
    if not seconds:
        return f"None of {len(cells)} cells was run."
    return (
        f"{len(seconds)} of {len(cells)} cells were run; their workers took "
        f"{sum(seconds):.0f} CPU seconds, {min(seconds):.0f} to {max(seconds):.0f} a cell."
    )


def spread(ratios: list[float]) -> str:
    """How many are within 15% of 1, and their range."""
    if not ratios:
        return "-"
    near = sum(map(is_near, ratios))
    return f"{near} of {len(ratios)} ({min(ratios):.2f} to {max(ratios):.2f})"


def against_paper(store: Store, entry: Published) -> float | None:
    """Our makespan over the paper's, unless one of them is missing or a time-out."""
    found = store.get(entry.cell)
    if found is None or entry.minutes is None or found["timed_out"]:
        return None
    return float(found["minutes"]) / entry.minutes


def relative_to_paper(
    store: Store, entry: Published, figure: Iterator[Published]
) -> float | None:
    """The same of the makespan over that of the reference cell."""
    if entry.reference is None or entry.reference == entry.cell:
        return None
    reference = next(e for e in figure if e.cell == entry.reference)
    here, there = against_paper(store, entry), against_paper(store, reference)
    return here / there if here and there else None
