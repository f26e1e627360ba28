"""A sweep as a picture like the paper's figure 3, and as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_agent.errors import UsageError
from sglang_agent.simulate.sweep import Point, best

MODEL_MARK = "*"
BEST_MARK = "<"


def axes_of(points: Sequence[Point]) -> tuple[str, str]:
    """Row and column axis: the two axes with most values (one value, if only one).

    A sweep over more axes is reduced to the best cell of the others.
    """
    names = list(points[0].varied)
    spread = {n: len({str(p.varied[n]) for p in points}) for n in names}
    ordered = sorted(names, key=lambda n: -spread[n])[:2]
    rows, columns = [*sorted(ordered, key=names.index), ""][:2]
    return rows, columns


def cells(
    points: Sequence[Point], rows: str, columns: str
) -> dict[tuple[Any, Any], Point]:
    """The point to show at each (row, column)."""
    shown: dict[tuple[Any, Any], Point] = {}
    for point in points:
        key = (point.varied.get(rows), point.varied.get(columns))
        if key not in shown or _better(point, shown[key]):
            shown[key] = point
    return shown


def render_text(points: Sequence[Point], is_model: Callable[[Point], bool]) -> str:
    """Makespans in minutes; TO is the time limit, ``*`` the model's point, ``<`` the best."""
    rows, columns = axes_of(points)
    shown = cells(points, rows, columns)
    across = list(dict.fromkeys(column for _, column in shown))
    down = list(dict.fromkeys(row for row, _ in shown))
    chosen = best(points)
    name = rows.replace("_", "-")
    width = max(len(name), *(len(str(value)) for value in down)) + 1
    lines = [
        f"makespan (min, simulated), columns: {columns.replace('_', '-') or 'none'}"
    ]
    lines.append(name.ljust(width) + "".join(f"{value!s:>10}" for value in across))
    for row in down:
        texts = [_cell(shown.get((row, column)), chosen, is_model) for column in across]
        lines.append(str(row).ljust(width) + "".join(f"{text:>10}" for text in texts))
    lines.append(f"{MODEL_MARK} capacity model, {BEST_MARK} shortest, TO time limit")
    return "\n".join(lines)


def write_png(
    points: Sequence[Point], is_model: Callable[[Point], bool], path: Path, title: str
) -> None:
    """Draw the same. Raises :class:`UsageError` when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ModuleNotFoundError as error:
        raise UsageError(
            "the heat map needs matplotlib: install sglang-agent[plots]"
        ) from error
    rows, columns = axes_of(points)
    shown = cells(points, rows, columns)
    across = list(dict.fromkeys(column for _, column in shown))
    down = list(dict.fromkeys(row for row, _ in shown))
    figure = Figure(
        figsize=(1.6 + 0.9 * len(across), 1.4 + 0.5 * len(down)), layout="constrained"
    )
    axes = figure.subplots()
    values = [[_minutes(shown.get((row, column))) for column in across] for row in down]
    image = axes.imshow(values, aspect="auto", cmap="viridis_r")
    figure.colorbar(image, ax=axes, label="makespan (min, simulated)")
    chosen = best(points)
    for y, row in enumerate(down):
        for x, column in enumerate(across):
            point = shown.get((row, column))
            text = _cell(point, chosen, is_model).rstrip(MODEL_MARK + BEST_MARK)
            axes.text(x, y, text, ha="center", va="center", fontsize=8)
            for marked, color in (
                (point is not None and is_model(point), "black"),
                (point is not None and point is chosen, "magenta"),
            ):
                if marked:
                    inset = 0.44 if color == "black" else 0.48
                    axes.add_patch(
                        Rectangle(
                            (x - inset, y - inset),
                            2 * inset,
                            2 * inset,
                            fill=False,
                            edgecolor=color,
                            linewidth=2,
                        )
                    )
    axes.set_xticks(range(len(across)), [str(value) for value in across])
    axes.set_yticks(range(len(down)), [str(value) for value in down])
    axes.set_xlabel(columns.replace("_", " "))
    axes.set_ylabel(rows.replace("_", " "))
    axes.set_title(f"{title}\nblack: capacity model, magenta: shortest", fontsize=9)
    figure.savefig(path, dpi=120)


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
