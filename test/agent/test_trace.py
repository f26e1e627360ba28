"""Traces survive the way to disk and back, and say what is wrong with a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_agent.errors import UsageError
from sglang_agent.records import Outcome
from sglang_agent.trace import BadLine, encode_record, read_trace, write_trace

from .report_data import inference, job, trajectory

RECORD = trajectory(
    "ä",
    [
        inference(1, 0.0, 1.5, worker="w0", message={"role": "assistant"}),
        job(1, 1.5, 1.5, 2.0, response=[{"role": "tool", "content": "\u2028"}]),
    ],
    2.0,
    outcome=Outcome.GRADING,
    score=None,
)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [RECORD, RECORD])
    assert read_trace(tmp_path) == [RECORD, RECORD]
    assert read_trace(tmp_path / "trace.jsonl") == [RECORD, RECORD]
    assert encode_record(RECORD).count(b"\n") == 1


def test_a_bad_line_is_named_or_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    newer = encode_record(RECORD).replace(b'"version":1', b'"version":9')
    torn = encode_record(RECORD)[:-20]
    path.write_bytes(encode_record(RECORD) + b"\n" + newer + torn)
    with pytest.raises(UsageError, match=r"t\.jsonl:3: version is 9; can read 1"):
        read_trace(path)
    bad: list[BadLine] = []
    assert read_trace(path, bad) == [RECORD]
    assert [line.number for line in bad] == [3, 4]


def test_no_trace_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such run folder or trace file"):
        read_trace(tmp_path)
