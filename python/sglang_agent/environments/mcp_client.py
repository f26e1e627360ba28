"""One connection to one MCP server, owned by one task from start to end.

The SDK's client is a stack of task groups that must be left by the task that
entered them, while a trajectory may be cancelled in any other. So a task of our
own enters the client, waits for the word to stop, and leaves it; calls go to the
open session from wherever they are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
import mcp_types
import msgspec
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from sglang_agent.environments import leases
from sglang_agent.environments.base import EnvironmentFailure, RetryLater
from sglang_agent.environments.blocking import run_blocking
from sglang_agent.environments.starting import start_turn
from sglang_agent.environments.stderr_tail import StderrTail

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_BUSY = (429, 503)
_NO_SESSION = 404
_SERVER_ERROR = 500


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach one MCP server: ``command`` (stdio) or ``url`` (HTTP).

    A ``command`` of ``python`` is the interpreter that runs this client. Only a few
    safe variables are inherited by a stdio server; ``env`` adds to them. ``${NAME}`` in
    ``env`` and ``headers`` is taken from this process's environment, so that secrets
    stay out of tasks files. A call is
    given up after ``tool_timeout_s``, or after the tool's own entry in
    ``tool_timeouts_s``; without either, only the run's own limits bound it.
    """

    command: str | list[str] | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    start_timeout_s: float = 60.0
    tool_timeout_s: float | None = None
    tool_timeouts_s: dict[str, float] = {}

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command (stdio) or url (HTTP)")
        _require_positive("start_timeout_s", self.start_timeout_s)
        if self.tool_timeout_s is not None:
            _require_positive("tool_timeout_s", self.tool_timeout_s)
        for tool, limit in self.tool_timeouts_s.items():
            _require_positive(f"tool_timeouts_s.{tool}", limit)
        expanded(self.env)
        expanded(self.headers)

    def argv(self) -> list[str]:
        """The command line of a stdio server."""
        head = [self.command] if isinstance(self.command, str) else self.command or []
        program, *rest = [*head, *self.args]
        return [sys.executable if program == "python" else program, *rest]


def expanded(values: Mapping[str, str]) -> dict[str, str]:
    """Replace every ``${NAME}``; raises ValueError for a variable that is not set."""

    def replace(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ValueError(f"${{{match[1]}}} is not set in the environment")
        return os.environ[match[1]]

    return {key: _VARIABLE.sub(replace, value) for key, value in values.items()}


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}: {value:g}; must be above 0 seconds")


class NotReached(Exception):
    """A call got no answer, but its server may well answer the next one."""


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
        self._refusal: httpx2.Response | None = None

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._session is not None

    async def start(self) -> None:
        """Connect and list the tools; raises :class:`EnvironmentFailure`.

        A stdio server is a new process, so it waits for its turn to start.
        """
        turn = start_turn() if self.server.url is None else contextlib.nullcontext()
        async with turn:
            await self._start()

    async def _start(self) -> None:
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

        Raises :class:`EnvironmentFailure` when the server is gone,
        :class:`NotReached` when it gave no answer, and :class:`RetryLater` when it
        asks for a pause (HTTP 429 or 503).
        """
        if self._session is None:
            raise self._failure("is gone")
        limit = self.server.tool_timeouts_s.get(tool, self.server.tool_timeout_s)
        try:
            return await self._session.call_tool(
                tool, dict(arguments), read_timeout_seconds=limit
            )
        except MCPError as error:
            if error.code == mcp_types.REQUEST_TIMEOUT:
                text = f"{self.name}: {tool} gave no answer within {limit:g} s"
                raise NotReached(text) from error
            return self._answer(error)
        except (OSError, httpx2.HTTPError) as error:
            reason = str(error) or type(error).__name__
            raise NotReached(f"{self.name}: call lost: {reason}") from error

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
                # An old server complains of the handshake; that is no last word.
                self._stderr.forget()
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
                await run_blocking(leases.end_orphans_once)
                errlog = stack.enter_context(self._stderr.writer())
                transport = stdio_client(self._parameters(), errlog=errlog)
            else:
                http = await stack.enter_async_context(self._http_client())
                transport = streamable_http_client(self.server.url, http_client=http)
            yield await stack.enter_async_context(Client(transport))

    def _parameters(self) -> StdioServerParameters:
        program, *args = self.server.argv()
        # A server that hangs does not see its input close when this process is killed;
        # the mark lets the next one find it.
        mark = {leases.OWNER_VARIABLE: leases.owner()}
        return StdioServerParameters(
            command=program,
            args=args,
            env={**expanded(self.server.env), **mark},
            cwd=self.server.cwd,
        )

    def _http_client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers=expanded(self.server.headers),
            timeout=httpx2.Timeout(30.0, read=None),
            event_hooks={"response": [self._note_refusal]},
        )

    async def _note_refusal(self, response: httpx2.Response) -> None:
        # The SDK makes every refusal the same error; what it was is kept here.
        if response.request.method == "POST" and response.status_code >= 400:
            self._refusal = response

    def _answer(self, error: MCPError) -> mcp_types.CallToolResult:
        """What an error of the protocol means: a pause, the end, or bad arguments."""
        refusal, self._refusal = self._refusal, None
        if error.code == mcp_types.CONNECTION_CLOSED:
            self._session = None
            raise self._failure("closed its connection")
        if refusal is not None:
            self._raise_for(refusal)
        return _error_result(str(error))

    def _raise_for(self, refusal: httpx2.Response) -> None:
        status = refusal.status_code
        if status in _BUSY:
            raise RetryLater(_retry_after_s(refusal), f"{self.name}: HTTP {status}")
        if status == _NO_SESSION:
            self._session = None
            raise self._failure("forgot its session (HTTP 404)")
        if status >= _SERVER_ERROR:
            raise NotReached(f"{self.name}: HTTP {status}")

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
    """Seconds of a Retry-After header, a number or a date; 0, the runner's choice."""
    value = response.headers.get("retry-after", "")
    if value.isdigit():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max((when - datetime.now(when.tzinfo)).total_seconds(), 0.0)


def _first_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
