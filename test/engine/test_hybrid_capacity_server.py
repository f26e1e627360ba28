"""A served hybrid model whose cache is split by a profile: reports, and same answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import SHARED_FLAGS
from .engine_server import EngineServer, cached_tokens, output_ids, running_engine
from .hybrid_overlay import plan_hybrid_cache

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

MEAN_CONTEXT = 20_000.0
PROFILE = {
    "version": 1,
    "name": "long-agents",
    "trajectories": 100,
    "final_context_tokens": {"mean": MEAN_CONTEXT},
    "forked_share": 0.0,
}


@pytest.fixture(scope="module")
def engine(
    tiny_ling: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("hybrid_capacity")
    profile = folder / "profile.json"
    profile.write_text(json.dumps(PROFILE))
    flags = (*SHARED_FLAGS, "--hybrid-workload-profile", str(profile))
    flags = (*flags, "--schedule-policy", "routing-prefix")
    with running_engine(tiny_ling, folder / "log", flags) as server:
        yield server


@pytest.fixture(scope="module")
def info(engine: EngineServer) -> dict[str, Any]:
    body: dict[str, Any] = engine.get("/server_info").body
    return body


def test_server_info_carries_the_capacity(info: dict[str, Any]):
    """On top for clients, and for each rank in the internal states."""
    report = info["hybrid_capacity"]

    assert report == info["internal_states"][0]["hybrid_capacity"]
    assert report["ratio_origin"] == "profile"
    assert report["ratio"] == pytest.approx(
        report["state_bytes_per_trajectory"] / report["kv_bytes_per_trajectory"],
        rel=1e-5,
    )
    assert report["mean_final_context_tokens"] == MEAN_CONTEXT
    assert report["kv_tokens"] == info["max_total_num_tokens"]
    assert report["reference_concurrency"] == min(
        report["kv_tokens"] // 20_000,
        report["state_slots"] // report["state_slots_per_request"],
    )


def test_the_label_set_holds_twice_the_reference_concurrency(info: dict[str, Any]):
    """Nobody gave --routing-prefix-capacity."""
    policy = info["routing_prefix"]

    assert policy["capacity"] == 2 * info["hybrid_capacity"]["reference_concurrency"]
    assert policy["capacity_origin"] == "reference_concurrency"


def test_metrics_carry_it_too(engine: EngineServer, info: dict[str, Any]):
    """Only where a profile was given."""
    text = engine.get("/metrics").body
    found = dict(re.findall(r"^sglang:hybrid_capacity_(\w+)\{.*\} (\S+)$", text, re.M))

    for name, value in found.items():
        assert float(value) == pytest.approx(info["hybrid_capacity"][name]), name
    assert {"ratio", "reference_concurrency", "state_slots"} <= set(found)


def test_one_line_of_the_log_says_it_in_words(engine: EngineServer):
    """The split, why it is so, and what it holds."""
    lines = [line for line in engine.log.splitlines() if "Hybrid cache:" in line]

    assert len(lines) == 1
    assert "from the workload profile" in lines[0]
    assert "trajectories of 20,000 tokens (long-agents)" in lines[0]
    assert "reference concurrency" in lines[0]


def test_the_planner_finds_the_server_as_planned(
    engine: EngineServer, capsys: pytest.CaptureFixture[str]
):
    """--check needs the URL, and the cap of requests that the server was given."""
    check = ["--check", engine.url]

    assert plan_hybrid_cache.main([*check, "--max-running-requests", "8"]) == 0
    assert capsys.readouterr().out.endswith("runs as planned\n")
    assert plan_hybrid_cache.main(check) == 1
    assert "max_running_requests: planned" in capsys.readouterr().out


def test_without_a_profile_the_split_is_the_default(shared_engine: EngineServer):
    """Reported all the same; no gauges, no reference concurrency."""
    report = shared_engine.get("/server_info").body["hybrid_capacity"]

    assert (report["ratio"], report["ratio_origin"]) == (0.9, "default")
    assert report["reference_concurrency"] is None
    assert "hybrid_capacity" not in shared_engine.get("/metrics").body


def test_greedy_answers_do_not_depend_on_the_ratio(
    engine: EngineServer, shared_engine: EngineServer, info: dict[str, Any]
):
    """Two turns of four conversations, the second resumed from the cache."""
    assert info["hybrid_capacity"]["ratio"] < 0.1
    rng = random.Random(5)
    for length in (40, 180, 500, 900):
        prompt = [rng.randrange(300) for _ in range(length)]
        followup = [rng.randrange(300) for _ in range(30)]
        turns = []
        for server in (engine, shared_engine):
            first = output_ids(server.generate(prompt, 16))
            second = server.generate([*prompt, *first, *followup], 16)
            assert cached_tokens(second) > 0
            turns.append((first, output_ids(second)))
        assert turns[0] == turns[1]
