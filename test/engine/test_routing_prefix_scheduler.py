"""Routing-prefix in the real scheduler: every path that builds a prefill batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

SCENARIOS = Path(__file__).with_name("routing_prefix_scenarios.py")
ORDER = ["A", "B", "A again", "unlabelled", "new", "C", "empty"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all scenarios in one process that imports SGLang once."""
    done = subprocess.run(
        [sys.executable, str(SCENARIOS)],
        cwd=tmp_path_factory.mktemp("scenarios"),
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


@pytest.fixture
def result(results: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Return the result of the scenario that the test is named after."""
    outcome = results[request.node.originalname.removeprefix("test_")]
    assert not isinstance(outcome, str), outcome
    return outcome


@pytest.mark.parametrize("scenario", ["admission_order", "overlap_schedule"])
def test_recent_trajectories_go_first(results: dict[str, Any], scenario: str) -> None:
    outcome = results[scenario]
    assert not isinstance(outcome, str), outcome

    assert outcome["batches"] == [[name] for name in ORDER]
    assert outcome["queries"] == 3
    assert outcome["labels"] == ["D", "C"]


def test_chunked_prefill(result: Any) -> None:
    assert result["labels"][0] == ["L"]
    assert result["admitted"] == 2
    assert result["finished"] == ["long", "short"]
    # The chunks that follow do not make the long one the most recent again.
    assert result["labels"][-1] == ["L", "S"]


def test_retraction(result: Any) -> None:
    assert result["retracted"] > 0
    assert result["entries_are_new"]
    assert result["labelled"] == 8
    assert result["held"] == 8
    assert result["finished"] == [f"r{i}" for i in range(8)]


def test_no_prefix_cache(result: Any) -> None:
    assert result["policy"] == "fcfs"
    assert not result["active"]
    assert result["batches"] == [["a"], ["b"], ["c"]]
    assert "falling back to fcfs" in result["log"]


def test_abort_while_waiting(result: Any) -> None:
    assert result["batches"] == [["first"], ["last"]]
    assert result["labels"] == ["R", "first", "last"]


def test_blocked_head(result: Any) -> None:
    assert result["counts"] == [1, 2, 3]
    assert result["waiting"] == ["head", "fits"]


def test_prefill_node(result: Any) -> None:
    assert result["batch"] == ["warm", "cold"]
    assert result["labels"] == ["warm", "cold"]


def test_dp_attention(result: Any) -> None:
    first, second = result

    assert first["rank"] == [0, 2]
    assert second["rank"] == [1, 2]
    # Rank 0 has served two trajectories before and rank 1 one of its own.
    assert first["labels"] == ["0B", "0A", "cold"]
    assert second["labels"] == ["1A", "cold"]
    assert (first["labelled"], second["labelled"]) == (4, 3)
    for name in ("0", "1"):
        batches = result[int(name)]["batches"]
        assert batches == [["warm"], ["cold"]]


def test_capacity_default(result: Any) -> None:
    assert result == {"capacity": 14, "capacity_origin": "max_running_requests"}


def test_capacity_flag(result: Any) -> None:
    assert result == {"capacity": 3, "capacity_origin": "flag", "overtake_limit": 5}


@pytest.mark.parametrize(
    "policy", ["fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first"]
)
def test_every_policy_is_timed(results: dict[str, Any], policy: str) -> None:
    outcome = results[f"seconds_{policy}"]
    assert not isinstance(outcome, str), outcome

    assert outcome["seconds"] > 0
    assert outcome["other"]
