"""The report's files, and the command that writes them again."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from sglang_agent.__main__ import main
from sglang_agent.commands import report as command
from sglang_agent.journal import Journal, read
from sglang_agent.records import TrajectoryRecord
from sglang_agent.report import build_report
from sglang_agent.report.files import write_report
from sglang_agent.report.perfetto import chrome_trace
from sglang_agent.report.timeline import render_html
from sglang_agent.trace import write_trace

from .report_data import inference, job, trajectory


@pytest.fixture
def records() -> list[TrajectoryRecord]:
    stages = [
        inference(1, 2.0, 3.0, worker="w0"),
        job(1, 3.0, 4.0, 6.0),
        inference(2, 6.0, 7.0, cached_tokens=80, worker="w1"),
    ]
    facts = {"submitted_s": 1.0, "admitted_s": 2.0}
    hostile = "</script><script>alert(1)</script>"
    return [
        trajectory("a", stages, 7.0, **facts),
        trajectory(hostile, [], 3.0, **facts, error="went & died"),
    ]


def test_chrome_trace_holds_every_stage_in_microseconds(
    records: list[TrajectoryRecord],
) -> None:
    events = chrome_trace(records)["traceEvents"]
    spans = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert spans["turn 1"] == (0.0, 1e6)
    assert spans["queue sqlite"] == (1e6, 1e6)
    assert spans["job sqlite"] == (2e6, 2e6)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {
        "a",
        records[1].sample_id,
    }
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "jobs"]
    assert [e["args"]["jobs"] for e in counters] == [1, 0]


def test_the_page_stands_alone_and_shows_no_contents(
    records: list[TrajectoryRecord],
) -> None:
    page = render_html(build_report(records, {"name": "A & B"}), records)
    assert "<!--" not in page
    assert not re.search(r"""(src|href)\s*=|https?://|@import""", page)
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    assert "A &amp; B" in page
    assert "s3cret" not in page
    [data] = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    row = json.loads(data)["rows"][1]
    assert row["id"] == "a"
    assert [bar[:3] for bar in row["bars"]] == [
        [0, 0, 1],
        [1, 1, 1],
        [2, 2, 2],
        [0, 4, 1],
    ]


def test_all_files_of_a_run(tmp_path: Path, records: list[TrajectoryRecord]) -> None:
    written = write_report(build_report(records, {}), records, tmp_path / "run")
    assert written[-1].name == "report.json"
    names = {p.relative_to(tmp_path / "run").as_posix() for p in written}
    assert {"report.txt", "timeline.html", "perfetto.json.gz"} <= names
    assert "plots/completion.png" in names
    assert json.loads(written[-1].read_text())["makespan_s"] == 5.0
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(
        {name.split("/")[0] for name in names}
    )


@pytest.mark.slow
def test_the_command_keeps_what_the_run_knew(
    tmp_path: Path, records: list[TrajectoryRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    info = {"name": "night", "warnings": ["CE changed"], "workers": ["w0", "w1", "w2"]}
    write_report(build_report(records, info), records, run)
    write_trace(run / "trace.jsonl", records)
    with (run / "trace.jsonl").open("ab") as file:
        file.write(b'{"version": 1, "label"')
    for _ in range(2):  # a second time changes nothing
        assert main(["report", str(run)]) == 0
        text = capsys.readouterr().out
        assert text.count("CE changed") == 1
        assert len(re.findall(r"line left out:", text)) == 1
        assert "trace.jsonl:3" in text.replace("\n", "")
    report = json.loads((run / "report.json").read_text())
    assert report["run"] == info
    assert len(report["workers"]) == 3
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 2


def test_a_lone_trace_is_only_printed(
    tmp_path: Path, records: list[TrajectoryRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "t.jsonl", records)
    assert main(["report", str(tmp_path / "t.jsonl")]) == 0
    assert "makespan" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


async def test_a_killed_run_is_reported_from_its_journal(
    tmp_path: Path, records: list[TrajectoryRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    settings = {"sample_concurrency": 7, "env_concurrency": 3, "job_order": "fcfs"}
    (run / "config.json").write_text(json.dumps(settings))
    write_trace(run / "trace.jsonl", [])  # of an attempt before
    path = run / "journal.jsonl"
    async with Journal(path, read(path), lambda: 30.0) as journal:
        await journal.add_sample("key", records[0])
    later = time.time() + 5
    os.utime(path, (later, later))
    assert main(["report", str(run)]) == 0
    assert not (run / "report.json").exists()  # it would look like the final one
    assert main(["report", str(run), "--output", str(tmp_path / "far")]) == 0
    text = capsys.readouterr().out
    assert "1 completed, 0 failed" in text
    assert "CS 7" in text
    assert "the run was killed or still goes on" in text
    report = json.loads((tmp_path / "far" / "report.json").read_text())
    assert report["attempts"]["active_s"] == 30.0


def test_nothing_to_report_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "no")]) == 2
    assert "no such run folder or trace file" in capsys.readouterr().err
    assert command.NAME == "report"
