"""Two runs compared: the same work under another order, or other work."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from sglang_agent.__main__ import main
from sglang_agent.records import Operation, Outcome, TrajectoryRecord
from sglang_agent.replay.conversations import JOB
from sglang_agent.trace import write_trace

from .report_data import inference, job, trajectory


def batch(
    wait: float = 0.0, output: int = 11, duration: float = 2.0
) -> list[TrajectoryRecord]:
    end = 3.0 + wait + duration
    stages = [
        inference(1, 0.0, 1.0, output_tokens=output, worker="w0"),
        job(1, 1.0, 1.0 + wait, 1.0 + wait + duration),
        inference(2, end - 2.0, end, cached_tokens=64, worker="w1"),
    ]
    return [trajectory(name, stages, end) for name in "abc"]


def diff(
    tmp_path: Path, a: list[TrajectoryRecord], b: list[TrajectoryRecord], *flags: str
) -> int:
    write_trace(tmp_path / "a.jsonl", a)
    write_trace(tmp_path / "b.jsonl", b)
    return main(["diff", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), *flags])


def test_only_times_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(tmp_path, batch(wait=0.0), batch(wait=5.0, duration=2.01)) == 0
    text = capsys.readouterr().out
    assert text.startswith("the same work: 3 samples, 6 turns")
    assert "+100.2%" in text  # the makespan, 5 s and 10.01 s


def test_a_replay_does_the_work_of_its_original(tmp_path: Path) -> None:
    def replayed(record: TrajectoryRecord) -> TrajectoryRecord:
        first, work, last = record.stages
        work = msgspec.structs.replace(work, operations=[JOB])
        return msgspec.structs.replace(record, stages=[first, work, last])

    assert diff(tmp_path, batch(), [replayed(record) for record in batch()]) == 0


def test_other_tools_are_other_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = batch()[0].stages
    calls = [Operation("x", "write", {})]
    other = [stages[0], msgspec.structs.replace(stages[1], operations=calls), stages[2]]
    mine = trajectory("a", stages, 5.0)
    assert diff(tmp_path, [mine], [trajectory("a", other, 5.0)]) == 1
    assert "a turn 1: tools read / write" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (batch(output=12), "output length 3"),
        (batch(duration=2.2), "environment duration 3"),
        (batch()[:2], "sample 1"),
        ([*batch(), batch()[0]], "sample 1"),
    ],
)
def test_other_work_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    other: list[TrajectoryRecord],
    what: str,
) -> None:
    assert diff(tmp_path, batch(), other) == 1
    assert f"not the same work: {what}" in capsys.readouterr().out


def test_stages_that_are_missing_or_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = batch()[0]
    cut = trajectory("a", whole.stages[::2], 5.0, outcome=Outcome.BUDGET)
    assert diff(tmp_path, [whole], [cut], "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["same_work"] is False
    assert result["differing"] == {
        "kind of stage": 1,
        "number of stages": 1,
        "outcome": 1,
    }
    assert result["examples"][0]["b"] == "budget"


def test_tolerance_is_checked_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        diff(tmp_path, batch(), batch(duration=2.2), "--duration-tolerance", "0.2") == 0
    )
    assert (
        diff(tmp_path, batch(), batch(duration=2.2), "--duration-slack-s", "0.3") == 0
    )
    assert diff(tmp_path, batch(), batch(), "--duration-slack-s", "-1") == 2
    assert "--duration-slack-s is -1" in capsys.readouterr().err
    assert diff(tmp_path, batch(), batch(), "--duration-tolerance", "2") == 2
    assert "--duration-tolerance is 2.0" in capsys.readouterr().err


def test_a_trace_with_a_bad_line_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diff(tmp_path, batch(), batch())
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"{torn")
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert main(["diff", *paths]) == 2
    assert "a.jsonl:4" in capsys.readouterr().err
