"""BFCL multi-turn tasks: right calls pass the package's checker, others do not."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_agent import bfcl_tasks, side_packages
from sglang_agent.environments import bfcl_data, registry
from sglang_agent.environments.base import GradingEnvironment, UserEnvironment
from sglang_agent.environments.bfcl import STEPS_PER_TURN, call_text
from sglang_agent.records import Operation, OperationResult
from sglang_agent.testing.bfcl_worker import Call, right_steps

Turns = Sequence[Sequence[Sequence[Call]]]


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    side_packages.ensure("bfcl-eval")


class Play:
    """Plays calls against a task as a runner would; keeps what came of it."""

    def __init__(self, entry_id: str) -> None:
        self.environment = registry.create("bfcl", {"entry": entry_id}, entry_id)
        self.results: list[OperationResult] = []
        self.tools: list[set[str]] = []

    async def run(self, turns: Turns) -> float:
        tools = await self.environment.open()
        self.tools.append({tool["function"]["name"] for tool in tools})
        assert isinstance(self.environment, UserEnvironment)
        assert isinstance(self.environment, GradingEnvironment)
        for steps in turns:
            for step in steps:
                job = [Operation("c", name, arguments) for name, arguments in step]
                self.results += await self.environment.run(job)
            following = await self.environment.next_user_turn()
            if following is not None and following.tools is not None:
                self.tools.append({t["function"]["name"] for t in following.tools})
        score = await self.environment.score([])
        await self.environment.close()
        return score


async def play(entry_id: str, turns: Turns | None = None) -> float:
    right = right_steps(bfcl_data.entry(entry_id))
    return await Play(entry_id).run(right if turns is None else turns)


@pytest.mark.parametrize("category", bfcl_data.CATEGORIES)
async def test_right_steps_are_accepted(category: str) -> None:
    ids = list(bfcl_data.entries(category))
    assert len(ids) == 200
    assert [await play(entry_id) for entry_id in ids[:8]] == [1.0] * 8


@pytest.mark.slow
@pytest.mark.parametrize("category", bfcl_data.CATEGORIES)
async def test_all_right_steps_are_accepted(category: str) -> None:
    wrong = [i for i in bfcl_data.entries(category) if await play(i) != 1.0]
    assert wrong == []


async def test_a_missing_call_and_another_state_are_not_accepted() -> None:
    right = right_steps(bfcl_data.entry("multi_turn_base_0"))
    assert await play("multi_turn_base_0", [right[0][:-1], *right[1:]]) == 0.0
    other = [[("mkdir", {"dir_name": "elsewhere"})], *right[0]]
    assert await play("multi_turn_base_0", [other, *right[1:]]) == 0.0
    assert await play("multi_turn_base_0", right[:-1]) == 0.0
    assert await play("multi_turn_base_0") == 1.0


async def test_trajectories_of_one_task_do_not_share_state() -> None:
    assert [await play("multi_turn_base_1") for _ in range(3)] == [1.0] * 3
    checker = sys.modules["bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils"]
    assert not [name for name in vars(checker) if name.startswith("grading")]


async def test_errors_are_answers() -> None:
    playing = Play("multi_turn_base_0")
    await playing.run(
        [
            [
                [
                    ("cd", {"folder": "nowhere"}),
                    ("rocket", {}),
                    ("cd", {"folder); import os; (x": "y"}),
                    ("cd", {"dir": "document"}),
                ]
            ]
        ]
    )
    texts = [result.content for result in playing.results]
    assert json.loads(texts[0])["error"]
    assert "unknown tool 'rocket'" in texts[1]
    assert "no parameter names" in texts[2]
    assert "Error during execution" in texts[3]
    assert [result.is_error for result in playing.results] == [False, True, True, True]


async def test_withheld_tools_come_with_their_turn() -> None:
    entry = next(
        e
        for e in bfcl_data.entries("multi_turn_miss_func").values()
        if e.missed_function
    )
    [(turn, [late, *_])] = entry.missed_function.items()
    playing = Play(entry.id)
    await playing.run([[] for _ in range(int(turn))])
    before, after = playing.tools
    assert late not in before
    assert late in after


async def test_too_many_steps_fail_the_task() -> None:
    right = right_steps(bfcl_data.entry("multi_turn_base_0"))
    many = [[("ls", {})]] * STEPS_PER_TURN
    playing = Play("multi_turn_base_0")
    assert await playing.run([[*many, *right[0]], *right[1:]]) == 0.0
    assert playing.results[STEPS_PER_TURN].is_error
    assert await playing.environment.next_user_turn() is None


async def test_schemas_have_json_types() -> None:
    tools = await registry.create("bfcl", {"entry": "multi_turn_base_0"}, "x").open()
    types = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("type"), str):
                types.add(node["type"])
            for value in node.values():
                walk(value)

    for tool in tools:
        walk(tool["function"]["parameters"])
    assert types <= {"object", "string", "integer", "number", "boolean", "array"}


def test_calls_as_text_and_back() -> None:
    def move(source: str, destination: str, force: bool = False) -> None: ...

    arguments = {"source": "it's", "destination": "a\nb", "force": True}
    text = call_text("move", arguments)
    assert bfcl_data.parse_call(text, {"move": move}) == ("move", arguments)
    positional = bfcl_data.parse_call("move('a', 'b')", {"move": move})
    assert positional == ("move", {"source": "a", "destination": "b"})
    with pytest.raises(ValueError, match="is no call"):
        bfcl_data.parse_call("1 + 1", {})


def test_tasks_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tasks.jsonl"
    assert bfcl_tasks.main(["--limit", "3", "-o", str(path)]) == 0
    tasks = [json.loads(line) for line in path.read_text().splitlines()]
    assert [task["id"] for task in tasks] == [f"multi_turn_base_{i}" for i in range(3)]
    assert bfcl_tasks.main(["-o", str(tmp_path / "no" / "x")]) == 2
    with pytest.raises(SystemExit):
        bfcl_tasks.main(["--limit", "0", "-o", str(path)])
    assert "--limit is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"entry": "multi_turn_base_999"}, "entry is 'multi_turn_base_999'"),
        ({"entry": "simple_1"}, "must be an id from multi_turn_base"),
        ({}, "entry"),
    ],
)
def test_wrong_settings_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.create("bfcl", config, "s1")
