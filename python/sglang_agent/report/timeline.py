"""One self-contained HTML page: the figures and the timeline of every trajectory.

The page holds its data, style and script; it loads nothing, so it can be mailed or
kept with a run. It shows names of samples and tools, never prompts, arguments or
answers.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files

from sglang_agent.records import InferenceStage, TrajectoryRecord
from sglang_agent.report.model import Report
from sglang_agent.report.text import scheduler_lines, summary_rows

_KINDS = ("inference", "queue", "environment")
_DECIMALS = 3


def render_html(report: Report, records: Sequence[TrajectoryRecord]) -> str:
    """The page as text. Rows are trajectories in the order of their admission."""
    page = files("sglang_agent.report").joinpath("timeline.html").read_text("utf-8")
    parts = {
        "title": html.escape(str(report.run.get("name", "Batch"))),
        "summary": _rows(summary_rows(report)),
        "notes": _notes(report),
        "tail": _rows(
            (s.sample_id, f"{s.ended_s:.1f} s; {s.why}") for s in report.tail
        ),
        "data": _embedded(_data(report, records)),
    }
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def _rows(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
        for name, text in pairs
    )


def _notes(report: Report) -> str:
    lines = [*report.warnings, *scheduler_lines(report)]
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _embedded(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _data(report: Report, records: Sequence[TrajectoryRecord]) -> dict[str, object]:
    origin = min((record.admitted_s for record in records), default=0.0)
    ordered = sorted(records, key=lambda record: (record.admitted_s, record.sample_id))
    return {
        "kinds": _KINDS,
        "makespan": report.makespan_s,
        "t95": report.t95_s,
        "rows": [_row(record, origin) for record in ordered],
    }


def _row(record: TrajectoryRecord, origin: float) -> dict[str, object]:
    def span(start: float, end: float) -> list[float]:
        return [round(start - origin, _DECIMALS), round(end - start, _DECIMALS)]

    bars: list[list[object]] = []
    for stage in record.stages:
        if isinstance(stage, InferenceStage):
            note = (
                f"turn {stage.turn} on {stage.worker or '?'}: {stage.input_tokens} in, "
                f"{stage.cached_tokens} cached, {stage.output_tokens} out"
            )
            bars.append([0, *span(stage.start_s, stage.end_s), note])
            continue
        tools = ", ".join(operation.name for operation in stage.operations)
        note = f"{stage.server or 'environment'}: {tools}"
        bars.append([1, *span(stage.queued_s, stage.started_s), note])
        bars.append([2, *span(stage.started_s, stage.ended_s), note])
    return {
        "id": record.sample_id,
        "outcome": str(record.outcome),
        "span": span(record.admitted_s, record.ended_s),
        "bars": bars,
    }
