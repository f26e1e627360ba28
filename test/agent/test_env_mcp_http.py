"""MCP over streamable HTTP: a real server, and one that refuses in every way."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sglang_agent.environments import registry
from sglang_agent.environments.base import (
    Environment,
    EnvironmentFailure,
    RetryLater,
)
from sglang_agent.records import Operation

SDK_SERVER = """
import socket, sys
import uvicorn
from mcp.server.mcpserver import MCPServer
server = MCPServer("web")

@server.tool()
def echo(text: str) -> str:
    return text

@server.tool()
async def wait() -> str:
    import asyncio
    await asyncio.sleep(60)
    return "late"

listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
app = server.streamable_http_app()
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
"""


def operation(tool: str, name: str = "c", **arguments: Any) -> Operation:
    return Operation(name, tool, arguments)


def make(url: str, **server: Any) -> Environment:
    return registry.create("mcp", {"servers": {"web": {"url": url, **server}}}, "s1")


@pytest.mark.slow
async def test_a_real_server_answers_and_its_death_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SDK_SERVER)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE
    )
    environment: Environment | None = None
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        environment = make(f"http://127.0.0.1:{port}/mcp")
        tools = await environment.open()
        assert [tool["function"]["name"] for tool in tools] == ["echo", "wait"]
        [result] = await environment.run([operation("echo", text="hällo")])
        assert result.content == "hällo"
        call = asyncio.create_task(environment.run([operation("wait")]))
        await asyncio.sleep(0.2)
        process.kill()
        with pytest.raises(EnvironmentFailure, match="'web' closed its connection"):
            await asyncio.wait_for(call, 5)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if environment is not None:
            await environment.close()


class Refusing:
    """A small MCP server whose tool calls are answered from a list of statuses."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.calls: list[str] = []
        self.headers: dict[str, str] = {}
        self.retry_after = "7"

    async def post(self, request: web.Request) -> web.Response:
        self.headers = dict(request.headers)
        message = await request.json()
        if "id" not in message:
            return web.Response(status=202)
        method = message["method"]
        if method == "tools/call":
            self.calls.append(message["params"]["arguments"].get("x", ""))
            status = self.statuses.pop(0) if self.statuses else 200
            if status != 200:
                return web.Response(
                    status=status, headers={"Retry-After": self.retry_after}
                )
        body = {"jsonrpc": "2.0", "id": message["id"], **self.answer(method, message)}
        return web.json_response(body)

    def answer(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "refusing", "version": "1"}
            result = {
                "protocolVersion": version,
                "capabilities": {},
                "serverInfo": info,
            }
            return {"result": result}
        if method == "tools/list":
            return {
                "result": {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
            }
        if method == "tools/call":
            return {"result": {"content": [{"type": "text", "text": "done"}]}}
        return {"error": {"code": -32601, "message": "no such method"}}


@pytest.fixture
async def refusing() -> AsyncIterator[tuple[Refusing, str]]:
    server = Refusing()
    app = web.Application()
    app.router.add_post("/mcp", server.post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield server, f"http://{host}:{port}/mcp"
    await runner.cleanup()


async def test_a_busy_server_is_asked_again_where_it_stopped(
    refusing: tuple[Refusing, str],
) -> None:
    server, url = refusing
    environment = make(url)
    await environment.open()
    job = [operation("t", "1", x="a"), operation("t", "2", x="b")]
    server.statuses = [200, 429]
    with pytest.raises(RetryLater, match="web: HTTP 429") as caught:
        await environment.run(job)
    assert caught.value.delay_s == 7.0
    results = await environment.run(job)
    assert [(r.id, r.content) for r in results] == [("1", "done"), ("2", "done")]
    assert server.calls == ["a", "b", "b"]
    await environment.run(job)
    assert server.calls[3:] == ["a", "b"]  # a job of its own, though it looks alike
    server.statuses = [503]
    server.retry_after = format_datetime(datetime.now(UTC) + timedelta(seconds=60))
    with pytest.raises(RetryLater) as later:
        await environment.run(job)
    assert 50 < later.value.delay_s <= 60
    await environment.close()


async def test_server_errors_are_transport_errors_and_a_lost_session_is_the_end(
    refusing: tuple[Refusing, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = refusing
    monkeypatch.setenv("WEB_TOKEN", "s3cret")
    environment = make(url, headers={"Authorization": "Bearer ${WEB_TOKEN}"})
    await environment.open()
    server.statuses = [500, 200, 404]
    [broken] = await environment.run([operation("t")])
    assert broken.transport_error
    assert broken.content == "web: HTTP 500"
    [good] = await environment.run([operation("t")])
    assert not good.is_error
    with pytest.raises(EnvironmentFailure, match="forgot its session"):
        await environment.run([operation("t")])
    with pytest.raises(EnvironmentFailure, match="is gone"):
        await environment.run([operation("t")])
    assert server.headers["Authorization"] == "Bearer s3cret"
    await environment.close()
