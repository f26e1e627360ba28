"""The journal of a run: one durable record per finished sample, append-only.

Lines are JSON objects told apart by ``type``:

attempt  the program was started: number and wall time
sample   a finished sample: its key and its whole :class:`TrajectoryRecord`
change   a limit was changed while running
alive    the time this attempt has run; bounds what a kill -9 leaves unknown
end      the attempt ended by itself, and how

A reader believes every line that ends in a newline. Only a last line without one can
be torn; it is cut off when the journal is opened for appending, with one warning, and
its sample runs again. Everything before it stays byte for byte.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from sglang_agent.records import TrajectoryRecord

JOURNAL_NAME = "journal.jsonl"
FORMAT_VERSION = 1


class AttemptLine(msgspec.Struct, frozen=True, tag="attempt"):
    number: int
    unix_s: float
    version: int = FORMAT_VERSION


class SampleLine(msgspec.Struct, frozen=True, tag="sample"):
    """``active_s`` is the time this attempt had run when the sample ended."""

    key: str
    active_s: float
    unix_s: float
    record: TrajectoryRecord


class ChangeLine(msgspec.Struct, frozen=True, tag="change"):
    """``setting`` went from ``before`` to ``after`` at ``at_s`` on the run's clock."""

    setting: str
    before: float | bool
    after: float | bool
    at_s: float


class AliveLine(msgspec.Struct, frozen=True, tag="alive"):
    active_s: float
    unix_s: float


class EndLine(msgspec.Struct, frozen=True, tag="end"):
    active_s: float
    unix_s: float
    reason: str


Line = AttemptLine | SampleLine | ChangeLine | AliveLine | EndLine

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class JournalError(Exception):
    """A complete line of the journal is not what it should be."""


class Attempt(msgspec.Struct):
    """One start of the program on this run folder; times in seconds."""

    number: int
    started_unix_s: float
    active_s: float = 0.0
    ended: str | None = None


class History(msgspec.Struct):
    """What the journal says happened so far."""

    samples: dict[str, TrajectoryRecord]
    attempts: list[Attempt]
    changes: list[ChangeLine]
    whole_bytes: int
    torn_bytes: int

    @property
    def active_s(self) -> float:
        """Time that attempts ran, without the gaps between them."""
        return sum(attempt.active_s for attempt in self.attempts)


def read(path: Path) -> History:
    """Read a journal; an absent file is an empty history.

    A later record of a key replaces an earlier one. Raises :class:`JournalError` for a
    complete line that cannot be read.
    """
    history = History({}, [], [], 0, 0)
    if not path.exists():
        return history
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                history.torn_bytes = len(line)
                break
            history.whole_bytes += len(line)
            try:
                _take(history, _decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise JournalError(f"{path}:{number}: {error}") from error
    return history


def _take(history: History, line: Line) -> None:
    if isinstance(line, AttemptLine):
        history.attempts.append(Attempt(line.number, line.unix_s))
    elif isinstance(line, ChangeLine):
        history.changes.append(line)
    else:
        attempt = history.attempts[-1]
        attempt.active_s = max(attempt.active_s, line.active_s)
        if isinstance(line, SampleLine):
            history.samples[line.key] = line.record
        elif isinstance(line, EndLine):
            attempt.ended = line.reason


class Journal:
    """Appends durably; one writer, many samples.

    :meth:`add_sample` returns once the record is on disk. Records that arrive while
    the disk is busy share the next flush. A write that fails, fails every waiter.
    """

    def __init__(self, path: Path, history: History, active: Callable[[], float]):
        self._path = path
        self._history = history
        self._active = active
        self._file: BinaryIO | None = None
        self._pending: list[bytes] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Journal:
        is_new = not self._path.exists()
        self._file = self._path.open("ab", buffering=0)
        try:
            if self._history.torn_bytes:
                self._file.truncate(self._history.whole_bytes)
            if is_new:
                _sync_folder(self._path.parent)
            number = len(self._history.attempts) + 1
            await self.add(AttemptLine(number, time.time()))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        if self._flusher is not None:
            await self._flusher
        if self._file is not None:
            self._file.close()
            self._file = None

    async def add_sample(self, key: str, record: TrajectoryRecord) -> None:
        """Make a finished sample durable. Raises OSError when that is impossible."""
        await self.add(SampleLine(key, self._active(), time.time(), record))

    async def add_change(self, change: ChangeLine) -> None:
        await self.add(change)

    async def add_alive(self) -> None:
        await self.add(AliveLine(self._active(), time.time()))

    async def add_end(self, reason: str) -> None:
        await self.add(EndLine(self._active(), time.time(), reason))

    async def add(self, line: Line) -> None:
        """Append one line and wait until it is on disk."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append(_encoder.encode(line) + b"\n")
        self._waiters.append(done)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        await asyncio.shield(done)

    async def _flush(self) -> None:
        while self._pending:
            data, self._pending = b"".join(self._pending), []
            waiters, self._waiters = self._waiters, []
            try:
                await asyncio.to_thread(self._write, data)
            except OSError as error:
                for waiter in waiters:
                    waiter.set_exception(error)
                continue
            for waiter in waiters:
                waiter.set_result(None)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            raise OSError("the journal is closed")
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        os.fsync(self._file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def attempt_times(history: History) -> list[dict[str, float]]:
    """Say when each attempt ran, in Unix seconds, for a report's totals.

    An attempt that was killed ends with the last line it wrote.
    """
    return [
        {
            "started_at": attempt.started_unix_s,
            "ended_at": attempt.started_unix_s + attempt.active_s,
        }
        for attempt in history.attempts
    ]
