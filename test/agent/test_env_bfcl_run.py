"""A batch of BFCL tasks from the command line, answered from the ground truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_agent import bfcl_tasks, side_packages
from sglang_agent.__main__ import main
from sglang_agent.testing.bfcl_worker import BfclWorker
from sglang_agent.testing.stub_worker import StubWorker
from sglang_agent.trace import read_trace

from .run_support import serving


@pytest.mark.parametrize("category", ["multi_turn_base", "multi_turn_miss_func"])
@pytest.mark.slow
def test_right_trajectories_score_one(tmp_path: Path, category: str) -> None:
    side_packages.ensure("bfcl-eval")
    tasks, output = tmp_path / "tasks.jsonl", tmp_path / "run"
    flags = ["--category", category, "--limit", "6", "-o", str(tasks)]
    assert bfcl_tasks.main(flags) == 0
    worker = BfclWorker()
    with serving(worker) as url:
        limits = ["--sample-concurrency", "4", "--env-concurrency", "2", "--plain"]
        command = ["run", str(tasks), "--base-url", url, "--output", str(output)]
        assert main([*command, *limits]) == 0
    records = read_trace(output)
    assert [record.score for record in records] == [1.0] * 6
    report = json.loads((output / "report.json").read_text())
    assert report["scores"] == {"scored": 6, "unscored": 0, "mean": 1.0}
    assert [server["server"] for server in report["by_server"]] == ["bfcl"]
    said = [
        message
        for record in records
        for stage in record.stages
        for message in getattr(stage, "response", None) or []
        if message["role"] == "user"
    ]
    assert len(said) == sum(len(t) for t in turns_after_the_first(tasks))
    if category == "multi_turn_miss_func":
        offered = [len(request["tools"]) for request in worker.requests]
        assert min(offered) < max(offered)


def turns_after_the_first(tasks: Path) -> list[list[object]]:
    from sglang_agent.environments.bfcl_data import entry

    ids = [json.loads(line)["id"] for line in tasks.read_text().splitlines()]
    return [list(entry(entry_id).question[1:]) for entry_id in ids]


@pytest.mark.slow
def test_a_replay_of_the_run_did_the_same_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    side_packages.ensure("bfcl-eval")
    tasks, output, again = (tmp_path / name for name in ("t.jsonl", "run", "again"))
    assert bfcl_tasks.main(["--limit", "4", "-o", str(tasks)]) == 0
    limits = ["--sample-concurrency", "3", "--env-concurrency", "2"]
    with serving(BfclWorker()) as url:
        command = ["run", str(tasks), "--base-url", url, "--output", str(output)]
        assert main([*command, *limits, "--plain"]) == 0
    with serving(StubWorker()) as url:
        command = ["replay", str(output), "--base-url", url, "--output", str(again)]
        assert main([*command, *limits, "--no-flush"]) == 0
    capsys.readouterr()
    # The jobs take milliseconds, and so does the lateness of timers.
    slack = ["--duration-slack-s", "10"]
    assert main(["diff", str(output), str(again), *slack]) == 0
    assert capsys.readouterr().out.startswith("the same work: 4 samples")
