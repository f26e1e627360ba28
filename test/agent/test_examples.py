"""The adoption examples run: a plain loop, mini-swe-agent, inspect-ai."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_agent import ActionScheduler, side_packages

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"example_{Path(name).stem}", EXAMPLES / name
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_plain_loop_changes_two_lines_besides_the_trajectory() -> None:
    before, after = (
        (EXAMPLES / "asyncio_loop" / name).read_text().splitlines()
        for name in ("before.py", "after.py")
    )
    added = [
        line[2:].strip()
        for line in difflib.ndiff(before, after)
        if line.startswith("+ ") and line.strip() != "+"
    ]
    assert 'slots = ActionScheduler(capacity=3, policy="caas")' in added
    assert "async with slots.slot(trajectory):" in added
    removed = [x for x in difflib.ndiff(before, after) if x.startswith("- ")]
    assert len(removed) <= 6


def dispatch_order(name: str) -> list[str]:
    """Three jobs hold the slots; a first and a third turn's job queue behind them."""
    example = load(f"asyncio_loop/{name}")
    order: list[str] = []
    delays_s = {("shallow", 1): 0.05, ("deep", 3): 0.10}
    jobs_s = {"holder-0": 0.3, "holder-1": 0.3, "holder-2": 0.3}

    async def ask(sample: str, turn: int) -> bool:
        # The holders come when the deep chain has done two jobs.
        first_s = 0.03 if sample.startswith("holder") else 0.0
        await asyncio.sleep(delays_s.get((sample, turn), first_s))
        return turn <= (3 if sample == "deep" else 1)

    async def act(sample: str, turn: int) -> None:
        order.append(f"{sample} {turn}")
        await asyncio.sleep(jobs_s.get(sample, 0.0))

    asyncio.run(example.run_batch([*jobs_s, "shallow", "deep"], ask, act))
    return order


def test_a_plain_loop_runs_and_lets_the_deep_chain_go_first() -> None:
    before, after = dispatch_order("before.py"), dispatch_order("after.py")
    assert sorted(before) == sorted(after)
    assert before.index("shallow 1") < before.index("deep 3")
    assert after.index("deep 3") < after.index("shallow 1")


@pytest.fixture
def swe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.syspath_prepend(str(side_packages.ensure("mini-swe-agent")))
    yield load("mini_swe_agent.py")
    for name in [n for n in sys.modules if n.startswith("minisweagent")]:
        del sys.modules[name]


def test_mini_swe_agent_runs_its_commands_through_one_scheduler(
    swe: ModuleType, tmp_path: Path
) -> None:
    models = importlib.import_module("minisweagent.models.test_models")
    actions = ActionScheduler(capacity=2, policy="caas")

    def scripted(task: str) -> Any:
        finish = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat notes"
        commands = [f"echo {task} > notes", "sleep 0.05", finish]
        return models.DeterministicModel(
            outputs=[models.make_output(c, [{"command": c}]) for c in commands]
        )

    tasks = [f"task-{n}" for n in range(6)]
    results = swe.run_batch(tasks, scripted, tmp_path, actions)
    assert {task: r["submission"].strip() for task, r in results.items()} == {
        task: task for task in tasks
    }
    statistics = actions.statistics()
    assert statistics.peak_running == 2
    assert statistics.running == 0


@pytest.mark.slow
def test_an_inspect_task_runs_its_tools_through_one_scheduler(tmp_path: Path) -> None:
    # A process of its own: inspect changes asyncio and brings modules of its own.
    script = Path(__file__).with_name("inspect_example_run.py")
    path = (side_packages.ensure("inspect-ai"), EXAMPLES)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == "success"
    assert found["accuracy"] == 1.0
    assert 1 <= found["peak_running"] <= 3
    assert found["running"] == 0
