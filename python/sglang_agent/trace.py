"""Reads and writes traces: JSON lines, one finished trajectory a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from sglang_agent.errors import UsageError
from sglang_agent.records import TRACE_VERSION, TrajectoryRecord

TRACE_NAME = "trace.jsonl"

_decoder = msgspec.json.Decoder(TrajectoryRecord)
_encoder = msgspec.json.Encoder()


class BadLine(NamedTuple):
    """A line that is not what the file should hold."""

    path: Path
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.reason}"


class TraceError(UsageError):
    """A trace cannot be used; the message names the file and, if any, the line."""


def encode_record(record: TrajectoryRecord) -> bytes:
    """One line of a trace, with its line end."""
    return _encoder.encode(record) + b"\n"


def decode_record(line: bytes) -> TrajectoryRecord:
    """Read one line back. Raises ValueError with the reason."""
    record = _decoder.decode(line)
    if record.version != TRACE_VERSION:
        raise ValueError(f"version is {record.version}; can read {TRACE_VERSION}")
    return record


def write_trace(path: Path, records: Iterable[TrajectoryRecord]) -> None:
    """Write a whole trace at once."""
    with path.open("wb") as file:
        file.writelines(map(encode_record, records))


def trace_file(path: Path) -> Path:
    """The trace in a run folder, or the path itself when it is a file.

    Raises :class:`TraceError` when there is none.
    """
    file = path / TRACE_NAME if path.is_dir() else path
    if not file.is_file():
        raise TraceError(f"{path}: no such run folder or trace file")
    return file


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a JSON-lines file that are not blank, counted from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def read_trace(path: Path, bad: list[BadLine] | None = None) -> list[TrajectoryRecord]:
    """Read the trace of a run folder or of a file.

    A bad line goes to ``bad`` when that is given; otherwise it raises
    :class:`TraceError`, which names the line.
    """
    file = trace_file(path)
    records = []
    for number, line in read_lines(file):
        try:
            records.append(decode_record(line))
        except (msgspec.MsgspecError, ValueError) as error:
            found = BadLine(file, number, str(error))
            if bad is None:
                raise TraceError(str(found)) from error
            bad.append(found)
    return records
