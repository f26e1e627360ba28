"""Replay against a server: same stages, exact lengths, recorded environment."""

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from sglang_agent.errors import UsageError
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Outcome,
    TrajectoryRecord,
)
from sglang_agent.replay import ReplaySettings, replay
from sglang_agent.replay.batch import prepare
from sglang_agent.replay.conversations import FIRST_TOKEN, seeded_ids
from sglang_agent.simulate.wire import Segment
from sglang_agent.testing.stub_worker import StubWorker

from .batches import make_trace


class Server(StubWorker):
    """A stub worker whose cache can be flushed."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.served_before_flush: list[int] = []

    def application(self) -> web.Application:
        app = super().application()
        app.add_routes([web.post("/flush_cache", self._flush)])
        return app

    async def _flush(self, request: web.Request) -> web.Response:
        self.served_before_flush.append(self.served)
        return web.Response()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    stub = Server()
    async with stub.serving() as url:
        yield stub, url


def settings_for(url: str, **changes: object) -> ReplaySettings:
    merged = {"sample_concurrency": 4, "env_concurrency": 2, **changes}
    return ReplaySettings(base_url=url, **merged)  # type: ignore[arg-type]


def small_trace(trajectories: int = 4) -> list[TrajectoryRecord]:
    return make_trace(
        trajectories,
        3,
        first=60,
        grow=10,
        shared=20,
        output=lambda i, k: 3 + i + k,
        job_s=lambda i, k: 0.01,
    )


async def test_contexts_are_built_from_generated_and_recorded_tokens(server) -> None:
    stub, url = server
    await replay(small_trace(2), settings_for(url, warmup=0))
    for label, index in (("t0", 0), ("t1", 1)):
        asked = [r for r in stub.requests if r["routing_key"] == label]
        lengths = [r["sampling_params"]["max_new_tokens"] for r in asked]
        assert lengths == [3 + index + k for k in (1, 2, 3)]
        assert all(r["sampling_params"]["ignore_eos"] for r in asked)
        prompts = [r["input_ids"] for r in asked]
        assert len(prompts[0]) == 60
        for before, after, length in zip(prompts, prompts[1:], lengths, strict=False):
            assert after[: len(before)] == before
            assert after[len(before) : len(before) + length] == [7] * length
            assert len(after) == len(before) + length + 10
    heads = {tuple(r["input_ids"][:20]) for r in stub.requests}
    assert len(heads) == 1, "the shared head is shared"
    assert len({tuple(r["input_ids"][:60]) for r in stub.requests}) == 2


async def test_the_records_are_those_of_a_live_run(server) -> None:
    _, url = server
    trace = small_trace()
    done = await replay(trace, settings_for(url))
    assert [r.label for r in done] == [r.label for r in trace]
    for recorded, now in zip(trace, done, strict=True):
        assert now.outcome is Outcome.COMPLETED
        before = [s for s in recorded.stages if isinstance(s, InferenceStage)]
        after = [s for s in now.stages if isinstance(s, InferenceStage)]
        assert [s.output_tokens for s in after] == [s.output_tokens for s in before]
        jobs = [s for s in now.stages if isinstance(s, EnvironmentStage)]
        assert len(jobs) == 2
        assert all(s.ended_s - s.started_s >= 0.01 for s in jobs)


async def test_warm_up_comes_before_the_flush_and_is_in_no_figure(server) -> None:
    stub, url = server
    done = await replay(small_trace(1), settings_for(url, warmup=2))
    assert stub.served_before_flush == [2]
    assert sum(isinstance(s, InferenceStage) for s in done[0].stages) == 3


async def test_concurrency_limits_hold() -> None:
    stub = Server(delay_s=0.01)
    async with stub.serving() as url:
        await replay(small_trace(8), settings_for(url, sample_concurrency=3))
    assert stub.peak_in_flight <= 3


async def test_chat_sends_generated_text_and_recorded_responses(server) -> None:
    stub, url = server
    (record,) = small_trace(1)
    stages = [
        msgspec.structs.replace(s, response=[{"role": "tool", "content": f"r{s.turn}"}])
        if isinstance(s, EnvironmentStage)
        else s
        for s in record.stages
    ]
    first = [{"role": "user", "content": "begin"}]
    record = msgspec.structs.replace(record, stages=stages, initial_messages=first)
    await replay([record], settings_for(url, api="chat", warmup=0, stream=False))
    messages = stub.requests[-1]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]
    assert [m["content"] for m in messages[2::2]] == ["r1", "r2"]
    assert messages[1]["content"] == "answer after 0 turns"
    assert [r["max_tokens"] for r in stub.requests] == [4, 5, 6]


async def test_chat_keeps_the_calls_that_are_made_as_text() -> None:
    """Nothing answers their ids: the recorded response is to the recorded call."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    (record,) = small_trace(1)
    first = [{"role": "user", "content": "begin"}]
    record = msgspec.structs.replace(record, initial_messages=first, tools=tools)
    stub = Server(tool_turns=9)
    async with stub.serving() as url:
        await replay([record], settings_for(url, api="chat", warmup=0))
    assert all(r["tools"] == tools for r in stub.requests)
    messages = stub.requests[-1]["messages"]
    said = [m for m in messages if m["role"] == "assistant"]
    assert len(said) == 2
    assert all("tool_calls" not in m for m in said)
    assert all("look" in m["content"] for m in said)


async def test_chat_needs_messages(server) -> None:
    stub, url = server
    with pytest.raises(UsageError, match="--api generate"):
        await replay(small_trace(1), settings_for(url, api="chat"))
    assert stub.served == 0


async def test_a_server_that_cannot_flush_is_refused() -> None:
    async with StubWorker().serving() as url:
        with pytest.raises(UsageError, match=r"HTTP 404.*--no-flush"):
            await replay(small_trace(1), settings_for(url, warmup=0))
        done = await replay(small_trace(1), settings_for(url, flush=False))
    assert done[0].outcome is Outcome.COMPLETED


async def test_without_environment_jobs_take_no_time(server) -> None:
    _, url = server
    trace = make_trace(1, 3, first=60, grow=5, shared=0, job_s=lambda i, k: 3600.0)
    done = await replay(trace, settings_for(url, bypass_environment=True))
    assert done[0].ended_s < 60


def test_turns_without_a_job_get_an_empty_one() -> None:
    (record,) = small_trace(1)
    stages = [s for s in record.stages if isinstance(s, InferenceStage)]
    last = EnvironmentStage(3, [], 0.0, 0.0, 9.0)
    ready = prepare(msgspec.structs.replace(record, stages=[*stages, last]))
    kinds = [type(s).__name__ for s in ready.stages]
    assert kinds == ["InferenceStage", "EnvironmentStage"] * 2 + ["InferenceStage"]


def test_seeded_ids_avoid_the_low_ones_and_extend() -> None:
    short, longer = (seeded_ids(Segment(5, n), 256) for n in (50, 80))
    assert longer[:50] == short
    assert min(longer) >= FIRST_TOKEN
    assert max(longer) < 256
    assert seeded_ids(Segment(6, 50), 256) != short
