"""Pictures of a batch (PNG; needs matplotlib, the ``plots`` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_agent.errors import UsageError
from sglang_agent.records import TrajectoryRecord
from sglang_agent.report.model import Report
from sglang_agent.report.spans import Span, counts
from sglang_agent.report.stages import inferences, jobs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (9.0, 4.5)
DOTS_PER_INCH = 120


def write_plots(
    report: Report, records: Sequence[TrajectoryRecord], directory: Path
) -> list[Path]:
    """Draw completion, concurrency and reuse; returns the files written.

    Raises :class:`UsageError` when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(
            "plots need matplotlib: install sglang-agent[plots]"
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in _DRAWINGS.items():
        # A bare Figure draws with Agg and leaves the global state of pyplot alone.
        figure = Figure(figsize=INCHES, layout="constrained")
        draw(figure, report, records)
        figure.savefig(directory / name, dpi=DOTS_PER_INCH)
        paths.append(directory / name)
    return paths


def _completion(
    figure: Figure, report: Report, records: Sequence[TrajectoryRecord]
) -> None:
    axes = figure.subplots()
    origin = _origin(records)
    ends = sorted(record.ended_s - origin for record in records)
    shares = [100 * (place + 1) / len(ends) for place in range(len(ends))]
    axes.step([0.0, *ends], [0.0, *shares], where="post", color="tab:blue")
    axes.axvspan(report.t95_s, report.t100_s, color="tab:orange", alpha=0.25)
    axes.axhline(95, color="grey", linewidth=0.6, linestyle=":")
    title = f"makespan {report.makespan_s:.1f} s, L5 {report.l5_s:.1f} s"
    _label(axes, title, "samples ended (%)", report.makespan_s)


def _concurrency(
    figure: Figure, report: Report, records: Sequence[TrajectoryRecord]
) -> None:
    axes = figure.subplots()
    origin = _origin(records)
    for name, spans in _kinds(records).items():
        steps = counts((start - origin, end - origin) for start, end in spans)
        if steps:
            instants, values = zip(*steps, strict=True)
            axes.step(instants, values, where="post", label=name, linewidth=1.0)
            axes.legend(loc="upper right")
    _label(axes, "what was going on", "at once", report.makespan_s)


def _kinds(records: Sequence[TrajectoryRecord]) -> dict[str, list[Span]]:
    turns, work = inferences(records), jobs(records)
    return {
        "active samples": [(r.admitted_s, r.ended_s) for r in records],
        "inference in flight": [(turn.start_s, turn.end_s) for turn in turns],
        "environment jobs running": [(job.started_s, job.ended_s) for job in work],
        "environment jobs waiting": [(job.queued_s, job.started_s) for job in work],
    }


def _reuse(figure: Figure, report: Report, records: Sequence[TrajectoryRecord]) -> None:
    del records
    axes = figure.subplots()
    turns = [row.turn for row in report.by_turn]
    axes.bar(
        turns, [row.new_prefill_tokens for row in report.by_turn], color="tab:grey"
    )
    axes.set_xlabel("turn")
    axes.set_ylabel("new prefill (tokens)")
    share = axes.twinx()
    share.plot(
        turns, [100 * (row.reuse or 0.0) for row in report.by_turn], color="tab:purple"
    )
    share.set_ylabel("reuse (%)")
    share.set_ylim(0, 100)
    axes.set_title("new prefill and reuse by turn")


_DRAWINGS = {
    "completion.png": _completion,
    "concurrency.png": _concurrency,
    "reuse.png": _reuse,
}


def _origin(records: Sequence[TrajectoryRecord]) -> float:
    return min((record.admitted_s for record in records), default=0.0)


def _label(axes: Axes, title: str, vertical: str, until: float) -> None:
    axes.set_title(title)
    axes.set_xlabel("seconds from the first admission")
    axes.set_ylabel(vertical)
    axes.set_xlim(0, until or 1.0)
    axes.set_ylim(bottom=0)
