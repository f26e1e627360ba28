"""Real hybrid forward passes through the engine on the CPU.

Two engines boot, one with each way of caching recurrent state. What they answer is
compared with an independent float64 model of the same weights.
"""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from .engine_server import (
    EngineServer,
    cached_tokens,
    log_probabilities,
    output_ids,
    running_engine,
)
from .hybrid_reference import HybridModel, Reader

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

# First prompts of the five conversations; later turns add an answer and a question.
FIRST_PROMPT_TOKENS = (37, 64, 150, 700, 2300)
TURNS = 3
ANSWER_TOKENS = 24
QUESTION_TOKENS = 40
TOLERANCE = 1e-3  # of a log-probability, single against double precision


def tokens(seed: int, count: int) -> list[int]:
    """Random byte tokens; the special ones come first in the vocabulary."""
    return random.Random(seed).choices(range(3, 259), k=count)


@dataclass
class Turn:
    """What was generated, how sure, and how much of the prompt was cached."""

    prompt_tokens: int
    ids: list[int]
    log_probabilities: list[float]
    cached: int = 0


def turn_of(answer: Any) -> Turn:
    return Turn(
        answer["meta_info"]["prompt_tokens"],
        output_ids(answer),
        log_probabilities(answer),
        cached_tokens(answer),
    )


def question(conversation: int, turn: int) -> list[int]:
    return tokens(1000 + 10 * conversation + turn, QUESTION_TOKENS)


def converse(engine: EngineServer) -> list[list[Turn]]:
    """Five conversations of three turns, each turn resuming from the one before."""
    conversations = []
    for i, length in enumerate(FIRST_PROMPT_TOKENS):
        prompt, turns = tokens(i, length), []
        for n in range(TURNS):
            turn = turn_of(engine.generate(prompt, ANSWER_TOKENS))
            turns.append(turn)
            prompt = prompt + turn.ids + question(i, n)
        conversations.append(turns)
    return conversations


@pytest.fixture(scope="module")
def expected(tiny_ling: Path) -> list[list[Turn]]:
    """The same conversations by the float64 model."""
    model, conversations = HybridModel(tiny_ling), []
    for i, length in enumerate(FIRST_PROMPT_TOKENS):
        reader, unread, read = Reader(model), tokens(i, length), 0
        turns = []
        for n in range(TURNS):
            for token in unread:
                reader.read(token)
            read += len(unread)
            ids, values = reader.generate(ANSWER_TOKENS)
            turns.append(Turn(read, ids, values))
            read += len(ids) - 1
            unread = [ids[-1], *question(i, n)]
        conversations.append(turns)
    return conversations


def compare(ours: list[list[Turn]], theirs: list[list[Turn]]) -> tuple[int, float]:
    """Number of turns with other tokens, and the largest log-probability gap."""
    pairs = [
        pair
        for a, b in zip(ours, theirs, strict=True)
        for pair in zip(a, b, strict=True)
    ]
    gaps = [
        abs(p - q)
        for a, b in pairs
        for p, q in zip(a.log_probabilities, b.log_probabilities, strict=True)
    ]
    return sum(a.ids != b.ids for a, b in pairs), max(gaps)


def assert_same(ours: list[list[Turn]], theirs: list[list[Turn]]) -> None:
    other, gap = compare(ours, theirs)
    assert other == 0
    assert gap < TOLERANCE


def alone_and_together(
    engine: EngineServer, prompts: list[list[int]], count: int
) -> tuple[list[Turn], list[Turn]]:
    engine.flush()
    alone = [turn_of(engine.generate(prompt, count)) for prompt in prompts]
    engine.flush()
    together = [turn_of(a) for a in engine.generate_together(prompts, count)]
    return alone, together


def chat_body(messages: list[Any], **extra: Any) -> dict[str, Any]:
    def tool(name: str, **properties: str) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in properties.items()},
            "required": list(properties),
        }
        return {
            "type": "function",
            "function": {"name": name, "parameters": parameters},
        }

    tools = [
        tool("get_time", timezone="string"),
        tool("add", a="integer", b="integer"),
        tool("list_tables"),
    ]
    return {
        "model": "tiny",
        "messages": messages,
        "tools": tools,
        "parallel_tool_calls": False,
        "temperature": 0.0,
        "max_tokens": 400,
        **extra,
    }


def chat(engine: EngineServer, messages: list[Any], **extra: Any) -> Any:
    answer = engine.post("/v1/chat/completions", chat_body(messages, **extra))
    assert answer.status == 200, answer.body
    return answer.body


def check_call(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    kinds = {
        "get_time": {"timezone": str},
        "add": {"a": int, "b": int},
        "list_tables": {},
    }
    assert {key: type(value) for key, value in values.items()} == kinds[name]


class TestNoBuffer:
    """The shared engine: no_buffer, prefill in chunks of 256 tokens."""

    def test_reuse_and_chunks_change_nothing(
        self, shared_engine: EngineServer, expected: list[list[Turn]]
    ) -> None:
        shared_engine.flush()
        ours = converse(shared_engine)
        assert_same(ours, expected)
        for turns in ours:
            for earlier, turn in pairwise(turns):
                # All of the turn before but its last token, which is never fed.
                held = earlier.prompt_tokens + ANSWER_TOKENS - 1
                assert turn.cached == held

    def test_concurrent_requests_equal_sequential_ones(
        self, shared_engine: EngineServer
    ) -> None:
        prompts = [tokens(50 + i, 20 + 37 * i) for i in range(8)]
        alone, together = alone_and_together(shared_engine, prompts, ANSWER_TOKENS)
        assert_same([alone], [together])

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_required_tool_calls_are_valid(
        self, shared_engine: EngineServer, temperature: float
    ) -> None:
        for content in ("What time is it?", "Add 3 and 4.", "List the tables."):
            answer = chat(
                shared_engine,
                [{"role": "user", "content": content}],
                tool_choice="required",
                temperature=temperature,
                seed=1,
            )
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            check_call(call["function"]["name"], call["function"]["arguments"])

    def test_a_tool_result_continues_and_a_last_turn_ends_in_text(
        self, shared_engine: EngineServer
    ) -> None:
        """The end of an agent loop; `none` would drop the tools from the prompt."""
        messages: list[Any] = [{"role": "user", "content": "Add 3 and 4."}]
        first = chat(shared_engine, messages, tool_choice="required")
        message = first["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        messages += [
            message,
            {"role": "tool", "tool_call_id": call_id, "content": "7"},
        ]
        last = chat(shared_engine, messages, tool_choice="auto", max_tokens=32)
        assert not last["choices"][0]["message"].get("tool_calls")
        cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"] - 1

    def test_streamed_calls_arrive_whole(self, shared_engine: EngineServer) -> None:
        body = chat_body(
            [{"role": "user", "content": "Add 3 and 4."}],
            tool_choice="required",
            stream=True,
        )
        text = shared_engine.post("/v1/chat/completions", body).body
        events = [
            json.loads(line.removeprefix("data: "))
            for line in text.splitlines()
            if line.startswith("data: {")
        ]
        parts = [
            call["function"]
            for event in events
            for choice in event["choices"]
            for call in choice["delta"].get("tool_calls") or []
        ]
        (name,) = [part["name"] for part in parts if part.get("name")]
        check_call(name, "".join(part.get("arguments") or "" for part in parts))

    def test_answers_follow_a_json_schema(self, shared_engine: EngineServer) -> None:
        schema = {
            "type": "object",
            "properties": {
                "verdict": {"enum": ["yes", "no"]},
                "why": {"type": "string"},
            },
            "required": ["verdict", "why"],
            "additionalProperties": False,
        }
        form = {"name": "verdict", "schema": schema}
        answer = chat(
            shared_engine,
            [{"role": "user", "content": "Is it late?"}],
            tool_choice="none",
            response_format={"type": "json_schema", "json_schema": form},
        )
        value = json.loads(answer["choices"][0]["message"]["content"])
        assert value["verdict"] in ("yes", "no")
        assert isinstance(value["why"], str)

    def test_a_bare_command_gets_working_defaults(
        self, shared_engine: EngineServer
    ) -> None:
        info = shared_engine.get("/server_info").body
        assert info["version"].startswith("0.5.23+makespan.")
        assert info["device"] == "cpu"
        assert info["attention_backend"] == "torch_native"
        assert info["sampling_backend"] == "pytorch"
        assert info["dtype"] == "float32"
        assert info["mamba_radix_cache_strategy"] == "no_buffer"
        assert info["chunked_prefill_size"] == 256  # given, so it wins


# A plugin that can be told, by a file, to forget every state that was restored.
AMNESIA = """
import os
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def forget(backend, layer, forward_batch, *args, **kwargs):
    if os.path.exists(os.environ["AMNESIA_FILE"]):
        cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        resumed = forward_batch.extend_prefix_lens > 0
        slots = backend.forward_metadata.mamba_cache_indices[resumed].long()
        cache.temporal[slots] = 0

def install():
    HookRegistry.register(
        "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend.forward_extend",
        forget,
        HookType.BEFORE,
    )
"""


def write_plugin(folder: Path) -> None:
    info = folder / "amnesia-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "amnesia.py").write_text(AMNESIA)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: amnesia\nVersion: 1.0\n"
    )
    entry = "[sglang.srt.plugins]\namnesia = amnesia:install\n"
    (info / "entry_points.txt").write_text(entry)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extra_buffer")


@pytest.fixture(scope="module")
def engine(tiny_ling: Path, folder: Path) -> Iterator[EngineServer]:
    """An engine with extra_buffer that can be told to lose restored states."""
    write_plugin(folder)
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (inherited, str(folder))))
    env = {"PYTHONPATH": path, "AMNESIA_FILE": str(folder / "forget")}
    flags = ("--mamba-radix-cache-strategy", "extra_buffer")
    with running_engine(tiny_ling, folder / "log", flags, env) as engine:
        yield engine


class TestExtraBuffer:
    """An engine with extra_buffer, and a plugin that can break it on demand."""

    def test_reuse_changes_nothing(
        self, engine: EngineServer, expected: list[list[Turn]]
    ) -> None:
        engine.flush()
        ours = converse(engine)
        assert_same(ours, expected)
        for turns in ours:
            assert all(turn.cached % 64 == 0 for turn in turns)
            # From the first prompt on that holds a whole chunk of 64 tokens.
            for earlier, turn in pairwise(turns):
                assert turn.cached >= (earlier.prompt_tokens - 1) // 64 * 64

    def test_concurrent_requests_equal_sequential_ones(
        self, engine: EngineServer
    ) -> None:
        """Long enough for the snapshots that decoding takes every 256 tokens."""
        prompts = [tokens(80 + i, 60 + i) for i in range(6)]
        alone, together = alone_and_together(engine, prompts, 220)
        assert_same([alone], [together])

    def test_a_lost_state_is_noticed(
        self, engine: EngineServer, folder: Path, expected: list[list[Turn]]
    ) -> None:
        """Control: with restored states zeroed the comparison must fail.

        Only what resumes from a cached state changes; a comparison that passed all
        the same would prove nothing.
        """
        engine.flush()
        (folder / "forget").touch()
        try:
            ours = converse(engine)
        finally:
            (folder / "forget").unlink()
        resumed = [
            (turn, wanted)
            for turns, others in zip(ours, expected, strict=True)
            for turn, wanted in zip(turns, others, strict=True)
            if turn.cached
        ]
        assert len(resumed) >= 8
        assert sum(turn.ids != wanted.ids for turn, wanted in resumed) == len(resumed)
