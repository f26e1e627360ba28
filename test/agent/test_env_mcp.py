"""MCP environments against real servers: processes, deaths, time limits."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sglang_agent import demo_tasks, side_packages
from sglang_agent.environments import registry, starting
from sglang_agent.environments.base import Environment, EnvironmentFailure
from sglang_agent.records import Operation

TIME = {"command": ["python", "-m", "mcp_server_time", "--local-timezone", "UTC"]}
MUTE = {"command": ["python", "-c", "import sys; sys.stdin.read()"]}

# A server in a few lines, so that it starts in no time, with tools that misbehave on
# request. The servers that people use are tested beside it.
ODD_SERVER = """
import json, os, sys, time
print("said at the start", file=sys.stderr, flush=True)

def get_current_time(timezone):
    return "late"

def die(words):
    print(words, file=sys.stderr, flush=True)
    os._exit(3)

def wait(seconds):
    time.sleep(seconds)
    return "waited"

def fail():
    raise ValueError("no such thing")

def identity():
    return str(os.getpid())

TOOLS = {f.__name__: f for f in (get_current_time, die, wait, fail, identity)}

def call(name, arguments):
    try:
        text, wrong = TOOLS[name](**arguments), False
    except Exception as error:
        text, wrong = repr(error), True
    return {"content": [{"type": "text", "text": text}], "isError": wrong}

def answer(method, parameters):
    if method == "initialize":
        version = parameters["protocolVersion"]
        info = {"name": "odd", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [{"name": n, "inputSchema": {"type": "object"}} for n in TOOLS]}
    if method == "tools/call":
        return call(parameters["name"], parameters.get("arguments") or {})

for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params", {}))
        body = {"result": result} if result else {"error": {"code": -32601, "message": "no"}}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}), flush=True)
"""


def operation(tool: str, **arguments: Any) -> Operation:
    return Operation("call-1", tool, arguments)


def make(config: dict[str, Any]) -> Environment:
    return registry.create("mcp", config, "sample-1")


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Any]:
    script = tmp_path / "odd.py"
    script.write_text(ODD_SERVER)
    return {"command": [sys.executable, str(script)]}


@pytest.fixture(autouse=True)
async def shared_servers_end() -> AsyncIterator[None]:
    yield
    await registry.close_shared()


async def pid_of(environment: Environment) -> int:
    [result] = await environment.run([operation("identity")])
    return int(result.content)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
async def test_sqlite_server_answers_and_reports_its_own_errors(tmp_path: Path) -> None:
    side_packages.ensure("mcp-server-sqlite")
    database = tmp_path / "shop.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE goods (name TEXT)")
    connection.close()
    server = demo_tasks.sqlite_server(database)
    environment = make({"servers": {"sqlite": server}})
    try:
        tools = await environment.open()
        names = [tool["function"]["name"] for tool in tools]
        assert {"list_tables", "read_query"} <= set(names)
        job = [operation("list_tables"), operation("read_query", query="SELECT x")]
        assert environment.server_of(job) == "sqlite"
        found, wrong = await environment.run(job)
        assert "goods" in found.content
        assert "no such column" in wrong.content
    finally:
        await environment.close()


@pytest.mark.slow
async def test_git_server_with_a_hidden_repository_path(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    os.makedirs(repository)
    process = await asyncio.create_subprocess_exec(
        "git", "init", "--quiet", str(repository)
    )
    assert await process.wait() == 0
    rule = {
        "name": "git_log",
        "fixed": {"repo_path": str(repository)},
        "choices": {"max_count": [1, 2]},
        "hide": ["start_timestamp", "end_timestamp"],
    }
    status = {"name": "git_status", "fixed": {"repo_path": str(repository)}}
    server = {"command": ["python", "-m", "mcp_server_git"]}
    environment = make({"servers": {"git": server}, "tools": [rule, status]})
    try:
        log, state = await environment.open()
        parameters = log["function"]["parameters"]
        assert list(parameters["properties"]) == ["max_count"]
        assert parameters["properties"]["max_count"]["enum"] == [1, 2]
        assert parameters["required"] == []
        assert state["function"]["parameters"]["properties"] == {}
        [result] = await environment.run([operation("git_status")])
        assert "No commits yet" in result.content
    finally:
        await environment.close()


@pytest.mark.slow
async def test_ambiguous_names_carry_their_server(odd: dict[str, Any]) -> None:
    environment = make({"servers": {"time": TIME, "odd": odd}})
    try:
        names = [tool["function"]["name"] for tool in await environment.open()]
        assert "time__get_current_time" in names
        assert "odd__get_current_time" in names
        assert "get_current_time" not in names
        assert "convert_time" in names
        calls = [
            operation(f"{s}__get_current_time", timezone="UTC") for s in ("time", "odd")
        ]
        real, fake = await environment.run(calls)
        assert '"timezone": "UTC"' in real.content
        assert fake.content == "late"
        assert environment.server_of(calls[1:]) == "odd"
    finally:
        await environment.close()


async def test_errors_of_tools_are_results(odd: dict[str, Any]) -> None:
    environment = make({"servers": {"odd": odd}})
    try:
        await environment.open()
        calls = [operation("fail")] * 5 + [operation("nothing"), operation("wait", x=1)]
        calls.append(operation("identity", __raw_arguments__="{broken"))
        results = await environment.run(calls)
        assert all(result.is_error for result in results)
        assert "no such thing" in results[0].content
        assert "unknown tool 'nothing'" in results[5].content
        assert "not a JSON object" in results[7].content
    finally:
        await environment.close()


async def test_a_dead_server_fails_fast_with_its_last_words(
    odd: dict[str, Any],
) -> None:
    dying, other = make({"servers": {"odd": odd}}), make({"servers": {"odd": odd}})
    try:
        await asyncio.gather(dying.open(), other.open())
        started = time.monotonic()
        last_words = r"'odd' closed its connection; its last output: disk on fire$"
        with pytest.raises(EnvironmentFailure, match=last_words):
            await dying.run([operation("die", words="disk on fire")])
        with pytest.raises(EnvironmentFailure, match=r"'odd' is gone.*disk on fire"):
            await dying.run([operation("identity")])
        assert time.monotonic() - started < 5
        assert await pid_of(other) > 0
    finally:
        await asyncio.gather(dying.close(), other.close())


async def test_a_killed_server_fails_a_waiting_call(odd: dict[str, Any]) -> None:
    environment = make({"servers": {"odd": odd}})
    try:
        await environment.open()
        pid = await pid_of(environment)
        call = asyncio.create_task(environment.run([operation("wait", seconds=60)]))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailure, match="closed its connection"):
            await asyncio.wait_for(call, 5)
    finally:
        await environment.close()


async def test_a_call_without_answer_is_told_from_a_tools_error(
    odd: dict[str, Any],
) -> None:
    limits = {"tool_timeout_s": 0.1, "tool_timeouts_s": {"identity": 20}}
    environment = make({"servers": {"odd": {**odd, **limits}}})
    try:
        await environment.open()
        [late] = await environment.run([operation("wait", seconds=0.4)])
        assert late.is_error
        assert late.transport_error
        assert "no answer within 0.1 s" in late.content
        # A tool with its own limit is not cut at the general one, and the server
        # that was slow goes on.
        assert await pid_of(environment) > 0
        [failed] = await environment.run([operation("fail")])
        assert not failed.transport_error
    finally:
        await environment.close()


@pytest.mark.slow
async def test_children_are_reaped_on_close_and_on_cancellation(
    odd: dict[str, Any],
) -> None:
    closed, cancelled = make({"servers": {"odd": odd}}), make({"servers": {"odd": odd}})
    await closed.open()
    first = await pid_of(closed)
    await closed.close()
    await closed.close()
    assert gone(first)

    async def trajectory() -> None:
        try:
            await cancelled.run([operation("wait", seconds=60)])
        finally:
            await cancelled.close()

    await cancelled.open()
    second = await pid_of(cancelled)
    task = asyncio.create_task(trajectory())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(second)


async def test_opening_can_be_cancelled() -> None:
    environment = make({"servers": {"mute": MUTE}})
    task = asyncio.create_task(environment.open())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await environment.close()


@pytest.mark.slow
async def test_servers_take_turns_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting.os, "cpu_count", lambda: 2)
    # Six servers that take 0.3 s each, two at a time.
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(0.3)\n" + ODD_SERVER)
    server = {"command": [sys.executable, str(slow)], "start_timeout_s": 30}
    environments = [make({"servers": {"odd": server}}) for _ in range(6)]
    started = time.monotonic()
    try:
        await asyncio.gather(*(e.open() for e in environments))
        assert time.monotonic() - started >= 0.9
    finally:
        await asyncio.gather(*(e.close() for e in environments))


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": "no-such-program"}, "failed to start.*no-such-program"),
        (
            {"command": ["python", "-c", "import sys; sys.exit('bad licence')"]},
            "failed to start.*bad licence",
        ),
        (
            {**MUTE, "start_timeout_s": 0.2},
            "did not start within 0.2 s",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "failed to start"),
    ],
)
async def test_a_server_that_does_not_start(
    server: dict[str, Any], message: str
) -> None:
    environment = make({"servers": {"broken": server}})
    with pytest.raises(EnvironmentFailure, match=message):
        await environment.open()
    await environment.close()


async def test_unknown_tool_in_the_allow_list(odd: dict[str, Any]) -> None:
    environment = make({"servers": {"odd": odd}, "tools": ["get_time"]})
    with pytest.raises(EnvironmentFailure, match="'get_time' is on no server; allowed"):
        await environment.open()


async def test_shared_servers_start_once_and_outlive_a_sample(
    odd: dict[str, Any],
) -> None:
    config = {"servers": {"odd": odd}, "share": True}
    one, two = make(config), make(config)
    await asyncio.gather(one.open(), two.open())
    pid = await pid_of(one)
    assert await pid_of(two) == pid
    await one.close()
    assert await pid_of(two) == pid
    with pytest.raises(EnvironmentFailure):
        await two.run([operation("die", words="bye")])
    await two.close()
    three = make(config)
    await three.open()
    assert await pid_of(three) != pid
    fresh = await pid_of(three)
    await three.close()
    await registry.close_shared()
    assert gone(fresh)
