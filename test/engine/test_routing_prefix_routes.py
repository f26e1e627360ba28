"""The label reaches the scheduler over every route, and is visible as counts only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .conftest import SHARED_FLAGS
from .engine_server import EngineServer, running_engine

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

HEADER = "x-smg-routing-key"
FLAGS = (
    *SHARED_FLAGS,
    "--schedule-policy",
    "routing-prefix",
    "--served-model-name",
    "m",
    "--skip-server-warmup",  # it is a request without a label
)
CAPACITY = 64
MESSAGES = [{"role": "user", "content": "Name the tables."}]
SAMPLING = {"max_new_tokens": 2, "temperature": 0.0}


@pytest.fixture(scope="module")
def engine(
    tiny_ling: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    log = tmp_path_factory.mktemp("routing_prefix") / "log"
    flags = (*FLAGS, "--routing-prefix-capacity", str(CAPACITY))
    with running_engine(tiny_ling, log, flags) as server:
        yield server


def counts(engine: EngineServer) -> dict[str, Any]:
    section: dict[str, Any] = engine.get("/server_info").body["routing_prefix"]
    return section


@pytest.fixture
def grown(engine: EngineServer) -> Callable[[], dict[str, int]]:
    """Return what the counts grew by since the test began; zeros left out."""
    before = counts(engine)

    def growth() -> dict[str, int]:
        after = counts(engine)
        names = ("labelled", "unlabelled", "invalid_labels", "labels_held")
        diff = {name: after[name] - before[name] for name in names}
        return {name: value for name, value in diff.items() if value}

    return growth


def chat(stream: bool) -> tuple[str, dict[str, Any]]:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 2, "stream": stream}
    return "/v1/chat/completions", body


def completions(prompt: Any, stream: bool) -> tuple[str, dict[str, Any]]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "stream": stream}
    return "/v1/completions", body


def messages(stream: bool) -> tuple[str, dict[str, Any]]:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 2, "stream": stream}
    return "/v1/messages", body


def responses(stream: bool) -> tuple[str, dict[str, Any]]:
    body = {"model": "m", "input": "Hello", "max_output_tokens": 2, "stream": stream}
    return "/v1/responses", body


def generate(prompt: Any, stream: bool) -> tuple[str, dict[str, Any]]:
    body = {"text": prompt, "sampling_params": SAMPLING, "stream": stream}
    return "/generate", body


ROUTES = {
    "chat": (chat, 1),
    "completions": (lambda stream: completions("one", stream), 1),
    "completions-batch": (lambda stream: completions(["one", "two"], stream), 2),
    "messages": (messages, 1),
    "responses": (responses, 1),
    "generate": (lambda stream: generate("one", stream), 1),
    "generate-batch": (lambda stream: generate(["one", "two", "three"], stream), 3),
}


def post(
    engine: EngineServer,
    route: tuple[str, Mapping[str, Any]],
    header: str | None = None,
    **extra: Any,
) -> None:
    path, body = route
    headers = {} if header is None else {HEADER: header}
    answer = engine.post(path, {**body, **extra}, headers)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("source", ["header", "body"])
@pytest.mark.parametrize("name", ROUTES)
def test_every_route_carries_the_label(
    engine: EngineServer,
    grown: Callable[[], dict[str, int]],
    name: str,
    source: str,
    stream: bool,
) -> None:
    make, requests = ROUTES[name]
    label = f"{name}-{source}-{stream}"

    if source == "header":
        post(engine, make(stream), label)
    else:
        post(engine, make(stream), routing_key=label)

    assert grown() == {"labelled": requests, "labels_held": 1}


def test_all_routes_carry_the_same_label(
    engine: EngineServer, grown: Callable[[], dict[str, int]]
) -> None:
    for make, _ in ROUTES.values():
        post(engine, make(False), "one-trajectory")

    assert grown()["labels_held"] == 1
    assert "unlabelled" not in grown()


@pytest.mark.parametrize("name", ROUTES)
def test_the_header_wins_over_the_body(
    engine: EngineServer, grown: Callable[[], dict[str, int]], name: str
) -> None:
    make, _ = ROUTES[name]
    post(engine, make(False), f"wins-{name}")

    post(engine, make(False), f"wins-{name}", routing_key=f"loses-{name}")

    assert grown()["labels_held"] == 1


@pytest.mark.parametrize("name", ["chat", "completions", "generate", "responses"])
def test_a_session_id_stands_in_for_a_missing_label(
    engine: EngineServer, grown: Callable[[], dict[str, int]], name: str
) -> None:
    make, requests = ROUTES[name]

    post(engine, make(False), session_id=f"session-{name}")
    post(engine, make(False), f"label-{name}", session_id=f"session-{name}")

    assert grown() == {"labelled": 2 * requests, "labels_held": 2}


def test_requests_without_a_label_are_counted(
    engine: EngineServer, grown: Callable[[], dict[str, int]]
) -> None:
    post(engine, chat(False))
    post(engine, generate("one", False), routing_key="")

    assert grown() == {"unlabelled": 2}


@pytest.mark.parametrize("label", ["x" * 129, "two words"])
def test_an_invalid_label_counts_as_none(
    engine: EngineServer, grown: Callable[[], dict[str, int]], label: str
) -> None:
    post(engine, chat(False), label)

    assert grown() == {"unlabelled": 1, "invalid_labels": 1}


def test_a_label_of_128_bytes_is_valid(
    engine: EngineServer, grown: Callable[[], dict[str, int]]
) -> None:
    post(engine, chat(False), "x" * 128)

    assert grown() == {"labelled": 1, "labels_held": 1}


def test_health_polls_are_not_counted(
    engine: EngineServer, grown: Callable[[], dict[str, int]]
) -> None:
    assert engine.get("/health_generate").status == 200

    assert grown() == {}


def test_a_returning_trajectory_is_first_tier(engine: EngineServer) -> None:
    post(engine, chat(False), "returns")
    before = counts(engine)

    post(engine, chat(False), "returns")

    after = counts(engine)
    assert after["admitted_first_tier"] == before["admitted_first_tier"] + 1
    assert after["prefix_queries"] == before["prefix_queries"] + 1
    assert after["stale_hits"] == before["stale_hits"]
    admitted = after["admitted_first_tier"] + after["admitted_second_tier"]
    assert after["first_tier_share"] == after["admitted_first_tier"] / admitted


def test_the_settings_are_shown(engine: EngineServer) -> None:
    section = counts(engine)

    assert section["capacity"] == CAPACITY
    assert section["capacity_origin"] == "flag"
    assert section["overtake_limit"] is None


def test_metrics_follow_the_counts(engine: EngineServer) -> None:
    post(engine, chat(False), "metrics")
    section, text = counts(engine), engine.get("/metrics").body
    values = dict(re.findall(r"^sglang:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE))

    (state,) = engine.get("/server_info").body["internal_states"]
    seconds = float(values["schedule_priority_seconds_total"])
    assert 0 < seconds <= state["schedule_priority_seconds"]
    assert float(values["routing_prefix_capacity"]) == CAPACITY
    for name in ("labelled", "unlabelled", "admitted_first_tier", "prefix_queries"):
        assert float(values[f"routing_prefix_{name}_total"]) <= section[name]
        assert f"# HELP sglang:routing_prefix_{name}_total" in text
    assert 0 < float(values["routing_prefix_labels_held"]) <= section["labels_held"]


def test_no_label_is_shown_anywhere(engine: EngineServer) -> None:
    label = "do-not-show-this-label"
    post(engine, chat(False), label)

    shown = json.dumps(engine.get("/server_info").body) + engine.get("/metrics").body

    assert label not in shown
    assert label not in engine.log
