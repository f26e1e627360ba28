"""What the page on environments shows is accepted and runs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_agent import tasks
from sglang_agent.environments import registry
from sglang_agent.records import Operation

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The module and the folder that the examples speak of."""
    module: Any = ModuleType("shop.tools")
    module.Till = type("Till", (), {"pay": lambda self: None})
    module.today = lambda: "today"
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.tools", module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repo").mkdir()


@pytest.mark.usefixtures("shop")
@pytest.mark.slow
def test_every_json_example_is_accepted(tmp_path: Path) -> None:
    examples = [json.loads(text) for text in blocks("json")]
    environments = [example for example in examples if "type" in example]
    assert {e["type"] for e in environments} == {"mcp", "functions", "shell"}
    for environment in environments:
        registry.create(environment["type"], environment, "sample")
    lines = [json.dumps(example) for example in examples if "id" in example]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    assert len(tasks.load(tmp_path / "tasks.jsonl")) == 1


def test_every_type_has_its_place() -> None:
    for name in registry.names():
        assert f"| `{name}` |" in PAGE
        assert f"## `{name}`" in PAGE


@pytest.fixture
def weather() -> Iterator[None]:
    [code] = blocks("python")
    exec(code, {})
    yield
    registry.unregister("weather")


@pytest.mark.usefixtures("weather")
async def test_the_environment_of_ones_own_runs() -> None:
    environment = registry.create("weather", {}, "sample")
    await environment.open()
    [result] = await environment.run([Operation("c", "weather", {})])
    assert result.content == "rain"
    await environment.close()
