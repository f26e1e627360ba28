"""The report's files in a run folder."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sglang_agent.errors import UsageError
from sglang_agent.records import TrajectoryRecord
from sglang_agent.report.model import Report
from sglang_agent.report.perfetto import chrome_trace
from sglang_agent.report.plots import write_plots
from sglang_agent.report.text import render_text
from sglang_agent.report.timeline import render_html
from sglang_agent.runfolder import replace

REPORT_NAME = "report.json"
TEXT_NAME = "report.txt"
TIMELINE_NAME = "timeline.html"
PERFETTO_NAME = "perfetto.json.gz"
PLOTS_NAME = "plots"


def write_report(
    report: Report, records: Sequence[TrajectoryRecord], folder: Path
) -> list[Path]:
    """Write JSON, text, timeline page, Chrome trace and, if possible, pictures.

    Returns the files written. Each appears whole or not at all, report.json last,
    so that its presence says that the others are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        TEXT_NAME: render_text(report).encode(),
        TIMELINE_NAME: render_html(report, records).encode(),
        PERFETTO_NAME: _packed(msgspec.json.encode(chrome_trace(records))),
    }
    paths = [_write(folder / name, content) for name, content in contents.items()]
    with contextlib.suppress(UsageError):  # matplotlib is an extra
        paths += write_plots(report, records, folder / PLOTS_NAME)
    report_json = msgspec.json.format(msgspec.json.encode(report), indent=1)
    return [*paths, _write(folder / REPORT_NAME, report_json)]


def _packed(content: bytes) -> bytes:
    # Without a time in it, the same run gives the same file.
    return gzip.compress(content, compresslevel=1, mtime=0)


def _write(path: Path, content: bytes) -> Path:
    replace(path, content)
    return path
