"""Where a report's records come from: a trace, or a run folder in any state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sglang_agent import journal
from sglang_agent.errors import UsageError
from sglang_agent.journal import JOURNAL_NAME, History, JournalError
from sglang_agent.records import TrajectoryRecord
from sglang_agent.report.files import REPORT_NAME
from sglang_agent.runfolder import CONFIG_NAME
from sglang_agent.trace import TRACE_NAME, BadLine, read_trace


class Source(msgspec.Struct, frozen=True):
    """Records, what the run knew of itself, and trace lines that could not be read.

    ``folder`` is where the report belongs: None for a lone trace, and for a run that
    has not ended, whose report would look like the final one.
    """

    records: list[TrajectoryRecord]
    run_info: dict[str, Any]
    bad: list[BadLine] = []
    folder: Path | None = None
    ended: bool = True

    @property
    def warnings(self) -> list[str]:
        """What a reader of the records has to know, in lines."""
        lines = [f"line left out: {line}" for line in self.bad]
        if not self.ended:
            lines.append("from the journal: the run was killed or still goes on")
        return lines


def read_source(path: Path) -> Source:
    """Read a trace file or a run folder.

    A run that was killed, or still runs, has what its journal holds so far. Raises
    :class:`UsageError` when there is nothing to read.
    """
    if path.is_dir() and _journal_is_newer(path):
        return _from_journal(path)
    bad: list[BadLine] = []
    records = read_trace(path, bad)
    folder = path if path.is_dir() else None
    known = _read_object(folder / REPORT_NAME) if folder else {}
    return Source(records, known.get("run", {}), bad, folder)


def _journal_is_newer(folder: Path) -> bool:
    """Whether the journal has samples that the trace has not.

    The trace is written when an attempt ends, after the journal's last line.
    """
    kept, trace = folder / JOURNAL_NAME, folder / TRACE_NAME
    if not kept.is_file():
        return False
    return not trace.is_file() or kept.stat().st_mtime > trace.stat().st_mtime


def _from_journal(folder: Path) -> Source:
    try:
        history = journal.read(folder / JOURNAL_NAME)
    except JournalError as error:
        raise UsageError(str(error)) from error
    info = {
        "settings": _read_object(folder / CONFIG_NAME),
        "attempts": attempt_spans(history),
        "changes": msgspec.to_builtins(history.changes),
    }
    return Source(list(history.samples.values()), info, ended=False)


def attempt_spans(history: History) -> list[dict[str, float]]:
    """The run's attempts as :func:`~sglang_agent.report.build_report` takes them."""
    return [
        {
            "started_at": attempt.started_unix_s,
            "ended_at": attempt.started_unix_s + attempt.active_s,
        }
        for attempt in history.attempts
    ]


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty when there is no file."""
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: {error}") from error
    return found
