"""Recorded environments take the recorded time and give the recorded answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_agent.clock import VirtualClock
from sglang_agent.environments import registry
from sglang_agent.environments.base import EnvironmentFailure
from sglang_agent.environments.recorded import RecordedEnvironment
from sglang_agent.records import Operation
from sglang_agent.trace import write_trace

from .report_data import inference, job, trajectory

RESPONSE = [{"role": "tool", "tool_call_id": "x", "content": "4 rows"}]
RECORD = trajectory(
    "s1",
    [
        inference(1, 0, 1),
        job(1, 1, 2, 5, response=RESPONSE, server="sqlite"),
        inference(2, 5, 6),
        job(2, 6, 6, 8, error="went away", server="git"),
    ],
    8.0,
    tools=[{"type": "function", "function": {"name": "read"}}],
)
CALL = Operation("new-id", "anything", {})


def test_time_and_answers_are_the_recorded_ones() -> None:
    clock = VirtualClock()
    environment = RecordedEnvironment(RECORD, clock)

    async def play() -> list[float]:
        assert await environment.open() == RECORD.tools
        assert environment.server_of([CALL]) == "sqlite"
        started = clock.now()
        [result] = await environment.run([CALL])
        assert (result.id, result.content) == ("new-id", "4 rows")
        middle = clock.now()
        assert environment.server_of([CALL]) == "git"
        with pytest.raises(EnvironmentFailure, match="recorded: went away"):
            await environment.run([CALL])
        ended = clock.now()
        with pytest.raises(EnvironmentFailure, match="has only 2 environment jobs"):
            await environment.run([CALL])
        await environment.close()
        return [middle - started, ended - middle]

    assert clock.run(play()) == [3.0, 2.0]


async def test_from_a_trace_by_the_samples_own_id(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [RECORD])
    config = {"trace": str(tmp_path), "time_scale": 0.0}
    environment = registry.create("recorded", config, "s1")
    await environment.open()
    [one, two] = await environment.run([CALL, CALL])
    assert (one.content, two.content) == ("4 rows", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trace": "no/such"}, "environment.trace: no/such: no such run folder"),
        ({"sample": "s9"}, "environment.sample is 's9'.*has 1 samples"),
        ({"time_scale": -1}, "time_scale: -1"),
    ],
)
def test_wrong_settings_are_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_trace(tmp_path / "trace.jsonl", [RECORD])
    with pytest.raises(ValueError, match=message):
        registry.create("recorded", {"trace": str(tmp_path), **change}, "s1")
