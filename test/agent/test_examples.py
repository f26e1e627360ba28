"""The adoption examples run: a plain loop, mini-swe-agent, inspect-ai."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_agent import ActionScheduler

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
    from sglang_agent import side_packages

    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    folder = side_packages.folder("mini-swe-agent")
    if folder.exists():
        monkeypatch.syspath_prepend(str(folder))
    pytest.importorskip(
        "minisweagent",
        reason="needs mini-swe-agent: python -m sglang_agent.side_packages",
    )
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


@pytest.mark.filterwarnings("ignore")  # of inspect's own dependencies
def test_an_inspect_task_runs_its_tools_through_one_scheduler(tmp_path: Path) -> None:
    inspect_ai = pytest.importorskip(
        "inspect_ai", reason="needs inspect-ai, which pins packages of its own"
    )
    example = load("inspect_ai_task.py")
    models = importlib.import_module("inspect_ai.model")

    def answer(messages: list[Any], *_: Any) -> Any:
        """Call the shell, read what it printed, say it."""
        last = messages[-1]
        count = {"command": f"seq {messages[0].text.split()[5]} | wc -l"}
        name = "mockllm/model"
        output = (
            models.ModelOutput.from_content(name, last.text)
            if last.role == "tool"
            else models.ModelOutput.for_tool_call(name, "shell", count)
        )
        # Without a usage inspect counts tokens, with a table from the network.
        output.usage = models.ModelUsage(input_tokens=9, output_tokens=9)
        return output

    model = models.get_model("mockllm/model", custom_outputs=answer)
    (log,) = inspect_ai.eval(
        example.count_lines(4), model=model, log_dir=str(tmp_path), display="none"
    )
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    statistics = example.ACTIONS.statistics()
    assert 1 <= statistics.peak_running <= 3
    assert statistics.running == 0
