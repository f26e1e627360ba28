"""One connection to one MCP server, owned by one task from start to end.

The SDK's client is a stack of task groups that must be left by the task that
entered them, while a trajectory may be cancelled in any other. So a task of our
own enters the client, waits for the word to stop, and leaves it; calls go to the
open session from wherever they are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2
import mcp_types
import msgspec
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from sglang_agent.environments.base import EnvironmentFailure, RetryLater
from sglang_agent.environments.stderr_tail import StderrTail

_BUSY = (429, 503)


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach one MCP server: ``command`` (stdio) or ``url`` (HTTP).

    A ``command`` of ``python`` is the interpreter that runs this client. Only a few
    safe variables are inherited by a stdio server; ``env`` adds to them. A call is
    given up after ``tool_timeout_s``, or after the tool's own entry in
    ``tool_timeouts_s``. ``failures_allowed`` answers in a row may be missing (time
    out, or be lost on the way) before the server counts as broken.
    """

    command: str | list[str] | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    start_timeout_s: float = 60.0
    tool_timeout_s: float = 60.0
    tool_timeouts_s: dict[str, float] = {}
    failures_allowed: int = 4
    retry_base_s: float = 1.0

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command (stdio) or url (HTTP)")
        for name in ("start_timeout_s", "tool_timeout_s", "retry_base_s"):
            _require_positive(name, getattr(self, name))
        for tool, limit in self.tool_timeouts_s.items():
            _require_positive(f"tool_timeouts_s.{tool}", limit)
        if self.failures_allowed < 0:
            raise ValueError(f"failures_allowed: {self.failures_allowed}; at least 0")

    def argv(self) -> list[str]:
        """The command line of a stdio server."""
        head = [self.command] if isinstance(self.command, str) else self.command or []
        program, *rest = [*head, *self.args]
        return [sys.executable if program == "python" else program, *rest]


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}: {value:g}; must be above 0 seconds")


class McpClient:
    """An open connection to one MCP server.

    Safe to call from several tasks at once. Every way in which the server can be
    gone ends in :class:`EnvironmentFailure` with the last lines of its stderr.
    """

    def __init__(self, name: str, server: Server) -> None:
        self.name = name
        self.server = server
        self.tools: list[mcp_types.Tool] = []
        self._stderr = StderrTail()
        self._session: Client | None = None
        self._stop = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._opened = False
        self._failures = 0
        self._busy_s: float | None = None

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._session is not None

    async def start(self) -> None:
        """Connect and list the tools; raises :class:`EnvironmentFailure`."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready), name=f"mcp-{self.name}")
        try:
            async with asyncio.timeout(self.server.start_timeout_s):
                await asyncio.shield(ready)
        except TimeoutError:
            await self.close()
            limit = self.server.start_timeout_s
            raise self._failure(f"did not start within {limit:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def call(
        self, tool: str, arguments: Mapping[str, Any]
    ) -> mcp_types.CallToolResult:
        """Call one tool. Its own error is a result with ``is_error``.

        Raises :class:`EnvironmentFailure` when the server is gone, and
        :class:`RetryLater` when it asks for a pause (HTTP 429 or 503).
        """
        if self._session is None:
            raise self._failure("is gone")
        limit = self.server.tool_timeouts_s.get(tool, self.server.tool_timeout_s)
        try:
            result = await self._session.call_tool(
                tool, dict(arguments), read_timeout_seconds=limit
            )
        except MCPError as error:
            return self._answer(error, tool, limit)
        except (OSError, httpx2.HTTPError) as error:
            return self._missed(f"lost a call: {error or type(error).__name__}")
        self._failures = 0
        return result

    async def close(self) -> None:
        """Stop the server and wait until it is reaped; safe to call twice."""
        if self._owner is None:
            return
        if not self._stop.is_set():
            self._stop.set()
            if not self._opened:  # it cannot see the flag while it connects
                self._owner.cancel()
        # A cancelled caller must not cut the reaping short.
        await asyncio.shield(asyncio.gather(self._owner, return_exceptions=True))

    async def _own(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._connect() as session:
                self.tools = await _all_tools(session)
                self._session, self._opened = session, True
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            self._session = None
            if not ready.done():
                reason = f"failed to start: {_first_cause(error)}"
                ready.set_exception(self._failure(reason))
        finally:
            self._session = None
            if not ready.done():
                ready.cancel()

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[Client]:
        async with contextlib.AsyncExitStack() as stack:
            if self.server.url is None:
                errlog = stack.enter_context(self._stderr.writer())
                transport = stdio_client(self._parameters(), errlog=errlog)
            else:
                http = await stack.enter_async_context(self._http_client())
                transport = streamable_http_client(self.server.url, http_client=http)
            yield await stack.enter_async_context(Client(transport))

    def _parameters(self) -> StdioServerParameters:
        program, *args = self.server.argv()
        return StdioServerParameters(
            command=program, args=args, env=self.server.env, cwd=self.server.cwd
        )

    def _http_client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers=self.server.headers,
            timeout=httpx2.Timeout(30.0, read=None),
            event_hooks={"response": [self._note_busy]},
        )

    async def _note_busy(self, response: httpx2.Response) -> None:
        if response.status_code in _BUSY:
            self._busy_s = _retry_after_s(response)

    def _answer(
        self, error: MCPError, tool: str, limit: float
    ) -> mcp_types.CallToolResult:
        if self._busy_s is not None:
            delay_s, self._busy_s = self._busy_s, None
            raise RetryLater(delay_s or self._backoff_s(), f"{self.name} is busy")
        if error.code == mcp_types.CONNECTION_CLOSED:
            self._session = None
            raise self._failure("closed its connection")
        if error.code == mcp_types.REQUEST_TIMEOUT:
            return self._missed(f"{tool} gave no answer within {limit:g} s")
        self._failures = 0
        return _error_result(str(error))

    def _missed(self, reason: str) -> mcp_types.CallToolResult:
        self._failures += 1
        if self._failures > self.server.failures_allowed:
            raise self._failure(f"{reason} ({self._failures} failures in a row)")
        return _error_result(f"{self.name}: {reason}")

    def _backoff_s(self) -> float:
        # Spread over a whole base delay, so that jobs that failed together part.
        return self.server.retry_base_s * random.uniform(0.5, 1.5)

    def _failure(self, reason: str) -> EnvironmentFailure:
        lines = self._stderr.last_lines()
        log = f"; its last output: {' | '.join(lines)}" if lines else ""
        return EnvironmentFailure(f"MCP server {self.name!r} {reason}{log}")


async def _all_tools(session: Client) -> list[mcp_types.Tool]:
    tools: list[mcp_types.Tool] = []
    cursor: str | None = None
    while True:
        page = await session.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


def _error_result(text: str) -> mcp_types.CallToolResult:
    content = mcp_types.TextContent(type="text", text=text)
    return mcp_types.CallToolResult(content=[content], is_error=True)


def _retry_after_s(response: httpx2.Response) -> float:
    """Seconds of a Retry-After header; 0 when it is absent or a date."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0


def _first_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
