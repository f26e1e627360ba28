"""Python functions as tools: schemas, checks, state, and blocking code."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, Literal

import pytest

from sglang_agent import ActionScheduler, Trajectory
from sglang_agent.environments import registry
from sglang_agent.environments.base import Environment, EnvironmentFailure
from sglang_agent.environments.blocking import run_blocking
from sglang_agent.environments.functions import FunctionEnvironment
from sglang_agent.records import Operation

HERE = __name__


def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


async def greet(name: str, tone: Literal["kind", "curt"] = "kind") -> dict[str, str]:
    await asyncio.sleep(0)
    return {"greeting": f"{tone} {name}"}


def broken() -> None:
    raise EnvironmentFailure("the database is gone")


class Counter:
    """A stateful tool; one for every sample."""

    closed = 0

    def __init__(self, start: int) -> None:
        self._value = start

    def up(self, by: int) -> int:
        self._value += by
        return self._value

    def close(self) -> None:
        Counter.closed += 1


def call(tool: str, **arguments: Any) -> Operation:
    return Operation("c", tool, arguments)


async def opened(environment: Environment) -> Environment:
    await environment.open()
    return environment


def make(**config: Any) -> Environment:
    return registry.create("functions", config, "s1")


async def test_signatures_are_the_schemas() -> None:
    environment = make(functions=[f"{HERE}:add", f"{HERE}:greet"])
    first, second = [tool["function"] for tool in await environment.open()]
    assert first["name"] == "add"
    assert first["description"] == "Add two numbers."
    assert first["parameters"]["properties"]["a"] == {"type": "integer"}
    assert first["parameters"]["required"] == ["a"]
    assert second["parameters"]["properties"]["tone"]["enum"] == ["curt", "kind"]


async def test_calls_are_checked_and_errors_are_results() -> None:
    environment = await opened(make(functions=[f"{HERE}:add", f"{HERE}:greet"]))
    job = [
        call("add", a=1),
        call("greet", name="Ada"),
        call("add", a="one"),
        call("add", a=1, c=3),
        call("subtract"),
    ]
    results = await environment.run(job)
    assert [result.content for result in results[:2]] == [
        "3",
        '{"greeting":"kind Ada"}',
    ]
    assert [result.is_error for result in results] == [False, False, True, True, True]
    assert "Expected `int`, got `str`" in results[2].content
    assert environment.server_of(job) == "functions"


async def test_code_can_say_that_the_environment_broke() -> None:
    environment = await opened(make(functions=[f"{HERE}:broken"]))
    with pytest.raises(EnvironmentFailure, match="the database is gone"):
        await environment.run([call("broken")])


async def test_every_sample_has_an_object_of_its_own() -> None:
    config = {"object": f"{HERE}:Counter", "arguments": {"start": 10}}
    one, two = await opened(make(**config)), await opened(make(**config))
    before = Counter.closed
    await one.run([call("up", by=5)])
    [mine] = await one.run([call("up", by=1)])
    [other] = await two.run([call("up", by=1)])
    assert (mine.content, other.content) == ("16", "11")
    for environment in (one, two, one):
        await environment.close()
    assert Counter.closed == before + 2


async def test_an_object_that_cannot_be_made_is_an_environment_failure() -> None:
    environment = make(object=f"{HERE}:Counter", arguments={"begin": 1})
    with pytest.raises(EnvironmentFailure, match="Counter: cannot be made: TypeError"):
        await environment.open()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "functions or object"),
        (
            {"functions": [f"{HERE}:nothing"]},
            r"functions\[0\] is .*nothing.*module:name",
        ),
        ({"functions": ["no.such.module:f"]}, "no.such.module"),
        ({"functions": [f"{HERE}:HERE"]}, "cannot be called"),
        ({"functions": "add"}, "functions is 'add'"),
    ],
)
def test_wrong_settings_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**config)


async def test_the_allow_list_is_checked() -> None:
    environment = make(functions=[f"{HERE}:add"], tools=["ad"])
    with pytest.raises(EnvironmentFailure, match="'ad' is no tool; allowed: add"):
        await environment.open()


async def test_blocking_jobs_run_side_by_side_and_leave_the_loop_alone() -> None:
    """64 samples, 3 blocking steps each, 16 at once: nobody waits for the loop."""
    actions = ActionScheduler(
        capacity=16, policy="caas", band_s=30, duration_bucket_s=1
    )
    lags: list[float] = []

    async def watch() -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - started - 0.01)

    async def sample(name: str) -> None:
        environment = FunctionEnvironment(lambda: {"step": lambda: time.sleep(0.05)})
        await environment.open()
        trajectory = Trajectory(label=name)
        for _ in range(3):
            async with actions.slot(trajectory):
                await environment.run([call("step")])
            trajectory.complete_turn(duration_s=0.0)

    watching = asyncio.create_task(watch())
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(64):
            group.create_task(sample(f"s{number}"))
    took = time.monotonic() - started
    watching.cancel()
    assert 0.6 <= took < 9.6 / 2  # 64 x 3 steps of 0.05 s through 16 slots, not 1
    assert sorted(lags)[len(lags) * 9 // 10] < 0.1  # a busy machine may add a few


async def test_a_cancelled_wait_ends_at_once_and_the_thread_is_forgotten() -> None:
    release = threading.Event()
    task = asyncio.create_task(run_blocking(release.wait))
    await asyncio.sleep(0.02)
    task.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 1
    release.set()
    assert await run_blocking(lambda: threading.current_thread().daemon)
