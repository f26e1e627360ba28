"""The demo's tasks: same seed, same batch; every one of them opens and answers."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sglang_agent import demo_tasks, side_packages
from sglang_agent.environments import registry
from sglang_agent.records import Operation


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_folder(tasks: list[dict[str, Any]], folder: Path) -> str:
    return json.dumps(tasks).replace(str(folder.resolve()), "FOLDER")


@pytest.mark.slow
def test_one_seed_one_batch(tmp_path: Path) -> None:
    texts = [
        without_folder(read(demo_tasks.write_tasks(32, seed, folder)), folder)
        for folder, seed in [
            (tmp_path / "a", 3),
            (tmp_path / "b", 3),
            (tmp_path / "c", 4),
        ]
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_lengths_have_a_heavy_tail() -> None:
    lengths = Counter(demo_tasks.draw_lengths(3000, random.Random(1)))
    assert sorted(lengths) == list(range(2, 9))
    assert lengths[2] > 4 * lengths[8] > 0
    assert demo_tasks.draw_lengths(1, random.Random(0)) == [8]


@pytest.mark.slow
async def test_the_tools_of_every_kind_answer(tmp_path: Path) -> None:
    tasks = read(demo_tasks.write_tasks(3, 0, tmp_path))
    assert [task["id"].split("-")[0] for task in tasks] == ["sqlite", "git", "time"]
    for task in tasks:
        environment = registry.create("mcp", task["environment"], task["id"])
        try:
            tools = await environment.open()
            job = [Operation(str(i), *first_choice(t)) for i, t in enumerate(tools)]
            results = await environment.run(job)
            assert all(r.content and not r.is_error for r in results), results
        finally:
            await environment.close()
    await registry.close_shared()


def first_choice(tool: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The call that a model makes when it takes the first of all allowed values."""
    function = tool["function"]
    properties = function["parameters"]["properties"]
    return function["name"], {key: p["enum"][0] for key, p in properties.items()}


@pytest.mark.parametrize("count", ["0", "-3", "many"])
def test_a_wrong_count_is_named(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        demo_tasks.main(["--count", count, "--output", "unused"])
    assert exit.value.code == 2
    assert f"'{count}'" in capsys.readouterr().err or count.startswith("-")


def test_no_git_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert demo_tasks.main(["--output", str(tmp_path / "out")]) == 2
    assert "git is not on the PATH" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_set_of_side_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        side_packages.main(["mcp-server-sql"])
    assert "SET is 'mcp-server-sql'; must be one of" in capsys.readouterr().err


@pytest.mark.slow
def test_pip_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setitem(side_packages.SETS, "bfcl-eval", ("/no/such/file.whl",))
    assert side_packages.main(["bfcl-eval"]) == 2
    assert "cannot install /no/such/file.whl" in capsys.readouterr().err
    assert list((tmp_path / "share" / "sglang-agent").iterdir()) == []
