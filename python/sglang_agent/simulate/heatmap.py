"""A sweep as a picture like the paper's figure 3, and as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_agent.errors import UsageError
from sglang_agent.simulate.sweep import Point, best, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL_MARK = "*"
BEST_MARK = "<"


class Grid(NamedTuple):
    """A sweep laid out: axis names, values along both, and the point in each cell."""

    rows: str
    columns: str
    down: list[Any]
    across: list[Any]
    points: dict[tuple[Any, Any], Point]


def lay_out(points: Sequence[Point]) -> Grid:
    """Put the two axes with most values on a grid (an empty name, if only one).

    A sweep over more axes is reduced to the best cell of the others.
    """
    names = list(points[0].varied)
    spread = {n: len({str(p.varied[n]) for p in points}) for n in names}
    ordered = sorted(names, key=lambda n: -spread[n])[:2]
    rows, columns = [*sorted(ordered, key=names.index), ""][:2]
    cells: dict[tuple[Any, Any], Point] = {}
    for point in points:
        key = (point.varied.get(rows), point.varied.get(columns))
        if key not in cells or _better(point, cells[key]):
            cells[key] = point
    down = list(dict.fromkeys(row for row, _ in cells))
    across = list(dict.fromkeys(column for _, column in cells))
    return Grid(rows, columns, down, across, cells)


def render_text(points: Sequence[Point], is_model: Callable[[Point], bool]) -> str:
    """Makespans in minutes; TO is the time limit, ``*`` the model's, ``<`` the best."""
    grid = lay_out(points)
    chosen = best(points)
    name, columns = (axis.replace("_", "-") for axis in (grid.rows, grid.columns))
    width = max(len(name), *(len(shown(value)) for value in grid.down)) + 1
    lines = [f"makespan (min, simulated), columns: {columns or 'none'}"]
    lines.append(name.ljust(width) + "".join(f"{shown(v):>10}" for v in grid.across))
    for row in grid.down:
        texts = [
            _cell(grid.points.get((row, c)), chosen, is_model) for c in grid.across
        ]
        lines.append(shown(row).ljust(width) + "".join(f"{t:>10}" for t in texts))
    lines.append(f"{MODEL_MARK} capacity model, {BEST_MARK} shortest, TO time limit")
    return "\n".join(lines)


def write_png(
    points: Sequence[Point], is_model: Callable[[Point], bool], path: Path, title: str
) -> None:
    """Draw the same. Raises :class:`UsageError` when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(
            "the heat map needs matplotlib: install sglang-agent[plots]"
        ) from error
    grid = lay_out(points)
    size = (1.6 + 0.9 * len(grid.across), 1.4 + 0.5 * len(grid.down))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    values = [
        [_minutes(grid.points.get((r, c))) for c in grid.across] for r in grid.down
    ]
    image = axes.imshow(values, aspect="auto", cmap="viridis_r")
    figure.colorbar(image, ax=axes, label="makespan (min, simulated)")
    _write_cells(axes, grid, is_model, best(points))
    axes.set_xticks(range(len(grid.across)), [shown(value) for value in grid.across])
    axes.set_yticks(range(len(grid.down)), [shown(value) for value in grid.down])
    axes.set_xlabel(grid.columns.replace("_", " "))
    axes.set_ylabel(grid.rows.replace("_", " "))
    axes.set_title(f"{title}\nblack: capacity model, magenta: shortest", fontsize=9)
    figure.savefig(path, dpi=120)


def _write_cells(
    axes: Axes, grid: Grid, is_model: Callable[[Point], bool], chosen: Point | None
) -> None:
    for y, row in enumerate(grid.down):
        for x, column in enumerate(grid.across):
            point = grid.points.get((row, column))
            if point is None:
                continue
            text = _cell(point, None, lambda _: False)
            axes.text(x, y, text, ha="center", va="center", fontsize=8)
            if is_model(point):
                _frame(axes, x, y, 0.44, "black")
            if point is chosen:
                _frame(axes, x, y, 0.48, "magenta")


def _frame(axes: Axes, x: int, y: int, inset: float, color: str) -> None:
    from matplotlib.patches import Rectangle

    corner = (x - inset, y - inset)
    side = 2 * inset
    axes.add_patch(
        Rectangle(corner, side, side, fill=False, edgecolor=color, linewidth=2)
    )


def _minutes(point: Point | None) -> float:
    if point is None or point.timed_out:
        return math.nan
    return point.report.makespan_s / 60


def _cell(
    point: Point | None, chosen: Point | None, is_model: Callable[[Point], bool]
) -> str:
    if point is None:
        return ""
    text = "TO" if point.timed_out else f"{_minutes(point):.1f}"
    mark = MODEL_MARK if is_model(point) else ""
    return text + mark + (BEST_MARK if point is chosen else "")


def _better(one: Point, other: Point) -> bool:
    if one.timed_out != other.timed_out:
        return other.timed_out
    return one.report.makespan_s < other.report.makespan_s
