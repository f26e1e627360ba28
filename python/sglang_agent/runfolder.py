"""A run's folder: who may write it, what is in it, and how its files are replaced.

config.json     the settings as resolved, of the latest attempt
journal.jsonl   one durable record per finished sample (see ``journal``)
trace.jsonl     the records in the order of their end, written when an attempt ends
report.json     the figures, and the plots beside it
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import filelock
import msgspec
import orjson

from sglang_agent import journal
from sglang_agent.config import RunSettings
from sglang_agent.errors import UsageError
from sglang_agent.journal import History
from sglang_agent.records import TrajectoryRecord
from sglang_agent.trace import TRACE_NAME, encode_record

CONFIG_NAME = "config.json"
LOCK_NAME = ".lock"


class RunFolder:
    """Holds the folder for one writer: ``with RunFolder(path) as folder:``.

    Raises :class:`UsageError` when another program runs there or it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = filelock.FileLock(path / LOCK_NAME)

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UsageError(
                f"--output: {self.path}; another program is running there"
            ) from None
        except OSError as error:
            raise UsageError(f"--output: {self.path}; {error.strerror}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    @property
    def journal(self) -> Path:
        return self.path / journal.JOURNAL_NAME

    def history(self) -> History:
        """Read what earlier attempts did. Raises :class:`UsageError` if unreadable."""
        try:
            return journal.read(self.journal)
        except journal.JournalError as error:
            raise UsageError(f"--output: {error}") from error

    def check_content(self, settings: RunSettings) -> None:
        """Refuse to mix samples of different content in one folder."""
        file = self.path / CONFIG_NAME
        if not file.exists() or not self.journal.exists():
            return
        before = orjson.loads(file.read_bytes()).get("content", {})
        now = msgspec.to_builtins(settings.content)
        for name, value in now.items():
            if before.get(name) != value:
                raise UsageError(
                    f"--output: {self.path}; was made with {name}"
                    f" {before.get(name)!r}, not {value!r}: use another folder"
                )

    def write_config(self, settings: RunSettings) -> None:
        data = orjson.dumps(
            msgspec.to_builtins(settings),
            option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS,
        )
        replace(self.path / CONFIG_NAME, data + b"\n")

    def write_trace(self, records: list[TrajectoryRecord]) -> None:
        ordered = sorted(records, key=lambda r: (r.ended_s, r.sample_id))
        replace(self.path / TRACE_NAME, b"".join(map(encode_record, ordered)))


def replace(path: Path, data: bytes) -> None:
    """Put a whole file in place at once, so that a reader never sees half of it."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
