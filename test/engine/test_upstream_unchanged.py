"""With our flags off the fork serves exactly as the pinned upstream does.

The same script of requests runs against two engines with the same command line: the
fork, and a tree of the pinned wheel without any patch (our own new files are there,
for the CPU platform). Answers, admission order, `/server_info` and metrics must agree.
"""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, SHARED_FLAGS
from .engine_server import EngineServer, running_engine

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

# What differs between two runs of the same engine.
VOLATILE = re.compile(r"^id$|_id$|created|latency|time|_ts$|throughput")
# `/server_info` entries that depend on the process or the moment.
VOLATILE_INFO = re.compile(
    r"port|version|time|throughput|memory_usage|graph|startup|_start|load|launch_command"
)
# Counted for every policy, so that the price of an order can be compared.
OUR_METRICS = {"sglang:schedule_priority_seconds_total"}
# Flags of ours that upstream does not know; unset here.
OUR_FLAGS = {
    "hybrid_workload_profile",
    "routing_prefix_capacity",
    "routing_prefix_overtake_limit",
    "hybrid_capacity",
}


@pytest.fixture(scope="module")
def upstream_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned wheel without patches, as a folder for PYTHONPATH."""
    tree = tmp_path_factory.mktemp("upstream") / "tree"
    command = [sys.executable, str(ROOT / "setup.py"), "tree", "--through", "none"]
    subprocess.run(
        [*command, "--output", str(tree)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    policies = tree / "sglang/srt/arg_groups/fields/schedule.py"
    assert "routing-prefix" not in policies.read_text()
    return tree


@pytest.fixture(scope="module")
def upstream(
    upstream_tree: Path, tiny_ling: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(upstream_tree), inherited)))
    log = tmp_path_factory.mktemp("upstream_engine") / "log"
    with running_engine(tiny_ling, log, SHARED_FLAGS, {"PYTHONPATH": path}) as engine:
        yield engine


def stable(value: Any) -> Any:
    """The value without what differs between two runs of one engine."""
    if isinstance(value, dict):
        return {k: stable(v) for k, v in value.items() if not VOLATILE.search(k)}
    if isinstance(value, list):
        return [stable(item) for item in value]
    if isinstance(value, str) and (documents := events(value)):
        return merged(documents)
    return value


def merged(documents: list[str]) -> Any:
    """What a streamed answer says; where it is cut depends on the moment."""
    parts = [json.loads(document) for document in documents]
    if "choices" not in parts[0]:
        return stable(parts[-1])  # of /generate, whose events repeat the text so far
    choices = [choice for part in parts for choice in part["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, [c["finish_reason"] for c in choices if c["finish_reason"]]


def events(text: str) -> list[str]:
    """JSON documents of a streamed answer."""
    return re.findall(r"^data: (\{.*\})$", text, re.MULTILINE)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 259), k=count)


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Route and body of one request of every kind."""
    greedy = {"temperature": 0.0, "max_new_tokens": 24}
    # Nothing is drawn: the generator's state depends on all requests before.
    penalised = {**greedy, "frequency_penalty": 0.5, "min_new_tokens": 4}
    messages = [{"role": "user", "content": "Which table holds the orders?"}]
    tool = {
        "type": "function",
        "function": {
            "name": "list_tables",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    chat = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 0.0}
    generate = {"input_ids": tokens(1, 90), "sampling_params": greedy}
    return [
        ("/generate", generate),
        ("/generate", {**generate, "return_logprob": True, "top_logprobs_num": 2}),
        ("/generate", {**generate, "stream": True}),
        ("/generate", {"text": ["one", "two words"], "sampling_params": greedy}),
        ("/generate", {"text": "Tell me", "sampling_params": penalised}),
        ("/v1/completions", {"model": "m", "prompt": "The time", "max_tokens": 16,
                             "temperature": 0.0, "logprobs": 1}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True}),
        ("/v1/chat/completions", {**chat, "tools": [tool], "max_tokens": 100,
                                  "tool_choice": "required",
                                  "parallel_tool_calls": False}),
        ("/v1/chat/completions", {**chat, "max_tokens": -1}),
        ("/generate", {"text": "x", "input_ids": [5], "sampling_params": greedy}),
        ("/tokenize", {"model": "m", "prompt": "Add 3 and 4."}),
        ("/v1/embeddings", {"model": "m", "input": "x"}),
    ]  # fmt: skip


def answers(engine: EngineServer) -> list[Any]:
    engine.flush()
    got = [engine.post(route, body) for route, body in requests()]
    return [(answer.status, stable(answer.body)) for answer in got]


def test_answers_are_the_same(
    shared_engine: EngineServer, upstream: EngineServer
) -> None:
    ours, theirs = answers(shared_engine), answers(upstream)
    for (route, _), our_answer, their_answer in zip(
        requests(), ours, theirs, strict=True
    ):
        assert our_answer == their_answer, route
    # Every kind of answer was seen: text, an error, a refused route.
    assert {200, 400} <= {status for status, _ in ours}


def admission_order(engine: EngineServer) -> list[tuple[str, ...]]:
    """Sequences, new and cached tokens of each prefill batch of a burst.

    One long prompt is being prefilled, chunk by chunk, while twelve requests queue up:
    prompts of different length, half of them with a cached prefix.
    """
    engine.flush()
    shared = tokens(2, 100)
    before = len(engine.log)
    engine.generate(shared, 1)
    while "Prefill batch" not in engine.log[before:]:  # written after the answer
        time.sleep(0.01)
    mark = len(engine.log)
    bodies = [(tokens(3, 16000), 1)]
    for i in range(12):
        prefix = shared if i % 2 else []
        bodies.append((prefix + tokens(200 + i, 140 + 7 * i), 2))
    threads = []
    for ids, count in bodies:
        thread = threading.Thread(target=engine.generate, args=(ids, count))
        thread.start()
        threads.append(thread)
        time.sleep(0.05)  # arrival order is part of the comparison
    assert threads[0].is_alive()  # or the queue was not full when it was ordered
    for thread in threads:
        thread.join()
    lines = re.findall(
        r"Prefill batch.*?#new-seq: (\d+).*?#new-token: (\d+).*?#cached-token: (\d+)",
        engine.log[mark:],
    )
    assert len(lines) > 16000 // 256 + 6
    return lines


def test_requests_are_admitted_in_the_same_order(
    shared_engine: EngineServer, upstream: EngineServer
) -> None:
    assert admission_order(shared_engine) == admission_order(upstream)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = ((f"{prefix}.{key}" if prefix else key, v) for key, v in value.items())
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        items = ((f"{prefix}[{i}]", v) for i, v in enumerate(value))
    else:
        return {prefix: value}
    return {k: v for key, item in items for k, v in flat(item, key).items()}


def test_server_info_differs_by_our_flags_only(
    shared_engine: EngineServer, upstream: EngineServer
) -> None:
    ours = flat(shared_engine.get("/server_info").body)
    theirs = flat(upstream.get("/server_info").body)
    added = {re.split(r"[.\[]", key)[0] for key in ours.keys() - theirs.keys()}
    added |= {key.rsplit(".", 1)[-1] for key in ours.keys() - theirs.keys()} & OUR_FLAGS
    assert theirs.keys() <= ours.keys()
    assert added - {"internal_states"} <= OUR_FLAGS
    different = {
        key
        for key, value in theirs.items()
        if ours[key] != value and not VOLATILE_INFO.search(key)
    }
    assert different == set()


METRIC = re.compile(r"^(sglang:\w+)(\{.*\})? ([^ ]+)$", re.MULTILINE)
# Counts of requests and tokens; everything else is a clock or a moment.
COUNTED = ("_tokens_total", "_requests_total")


def metrics(engine: EngineServer) -> dict[tuple[str, str], float]:
    text = engine.get("/metrics").body
    return {(name, labels): float(v) for name, labels, v in METRIC.findall(text)}


def test_metrics_have_the_same_names_labels_and_counts(
    shared_engine: EngineServer, upstream: EngineServer
) -> None:
    """Counters are compared by how much the same requests add to them."""
    seen = []
    for engine in (shared_engine, upstream):
        before = metrics(engine)
        answers(engine)
        after = metrics(engine)
        port = re.compile(r'(port|pid|model_name)="[^"]*"')
        names = {(name, port.sub("", labels)) for name, labels in after}
        counts = {
            (name, port.sub("", labels)): value - before.get((name, labels), 0.0)
            for (name, labels), value in after.items()
            if name.endswith(COUNTED)
        }
        seen.append((names, counts))
    (our_names, our_counts), (their_names, their_counts) = seen
    assert {name for name, _ in our_names - their_names} <= OUR_METRICS
    assert their_names <= our_names
    assert our_counts == their_counts
    assert any(our_counts.values())
