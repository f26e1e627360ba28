"""Environments in Ray actors on a local cluster: same jobs, limits and failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_agent.environments import registry
from sglang_agent.environments.base import GradingEnvironment, UserEnvironment
from sglang_agent.records import EnvironmentStage, Outcome
from sglang_agent.testing.stub_worker import StubWorker
from sglang_agent.trace import read_trace

from .run_support import arguments, serving

pytest.importorskip("ray", reason="needs sglang-agent[ray]")

TOOLS = """
import os, time
from sglang_agent.environments.base import EnvironmentFailure, RetryLater

class Tools:
    def __init__(self, kind):
        self._kind, self._calls = kind, 0

    def look(self, turn: int) -> str:
        "Say where this runs, or fail in the way that was asked for."
        self._calls += 1
        if self._kind == "broken":
            raise EnvironmentFailure("the disk is on fire")
        if self._kind == "dying" and self._calls == 2:
            os._exit(1)
        time.sleep(0.05)
        return f"{os.getpid()} call {self._calls}"
"""


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tasks file; the module with the tools is found by driver and actors."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "far_tools.py").write_text(TOOLS)
    package = Path(sys.modules["sglang_agent"].__file__ or "").parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{package}")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    lines = []
    for kind in ("fine-1", "fine-2", "fine-3", "broken", "dying"):
        inner = {
            "type": "functions",
            "object": "far_tools:Tools",
            "arguments": {"kind": kind},
        }
        task = {
            "id": kind,
            "messages": [{"role": "user", "content": kind}],
            "environment": inner,
        }
        lines.append(json.dumps(task))
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_on_a_local_cluster(batch: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with serving(StubWorker(tool_turns=4)) as url:
        command = [sys.executable, "-m", "sglang_agent"]
        command += arguments(batch, url, output, "--env-executor", "ray")
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=280, check=False
        )
    assert done.returncode == 1, done.stdout + done.stderr
    records = {record.sample_id: record for record in read_trace(output)}
    pids = set()
    for name in ("fine-1", "fine-2", "fine-3"):
        assert records[name].outcome is Outcome.COMPLETED, records[name].error
        texts = answers(records[name].stages)
        assert [text.split()[1:] for text in texts] == [
            ["call", str(n)] for n in range(1, 5)
        ]
        pids |= {text.split()[0] for text in texts}
    assert len(pids) == 3  # every trajectory has an actor of its own
    assert records["broken"].outcome is Outcome.ENVIRONMENT
    assert records["broken"].error == "the disk is on fire"
    assert records["dying"].outcome is Outcome.ENVIRONMENT
    assert "ray: ActorDiedError" in (records["dying"].error or "")
    report = json.loads((output / "report.json").read_text())
    assert report["running_jobs"]["peak"] <= 2
    assert [server["server"] for server in report["by_server"]] == ["Tools"]


def answers(stages: Any) -> list[str]:
    return [
        str(message["content"])
        for stage in stages
        if isinstance(stage, EnvironmentStage)
        for message in stage.response or []
    ]


def test_the_near_end_can_do_what_the_far_one_can() -> None:
    shell = registry.create("ray", {"environment": {"type": "shell"}}, "s")
    assert not isinstance(shell, GradingEnvironment | UserEnvironment)
    entry = {"type": "bfcl", "entry": "multi_turn_base_0"}
    bfcl = registry.create("ray", {"environment": entry}, "s")
    assert isinstance(bfcl, GradingEnvironment)
    assert isinstance(bfcl, UserEnvironment)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"environment": {}}, "environment: must have a type"),
        ({"environment": {"type": "shel"}}, "'shel' is unknown"),
        ({"environment": {"type": "shell", "timeout_s": 0}}, "timeout_s: 0"),
        ({"environment": {"type": "shell"}, "cpus": -1}, "cpus: -1"),
    ],
)
def test_wrong_settings_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.create("ray", config, "s1")
