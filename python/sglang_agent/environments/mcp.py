"""Environments whose tools live on MCP servers (stdio or streamable HTTP)."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import mcp_types
import msgspec

from sglang_agent.environments import registry
from sglang_agent.environments.base import EnvironmentFailure
from sglang_agent.environments.config import parse
from sglang_agent.environments.mcp_client import McpClient, NotReached, Server
from sglang_agent.environments.operations import refusal
from sglang_agent.records import Operation, OperationResult, ToolDefinition

# What OpenAI-style APIs take as the name of a function.
_NAME_LIMIT = 64
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


class ToolRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One allowed tool and what the model sees of it.

    ``fixed`` arguments are filled in by us and hidden from the model, ``choices``
    narrows an argument to a list of values, and ``hide`` drops optional arguments.
    """

    name: str
    fixed: dict[str, Any] = {}
    choices: dict[str, list[Any]] = {}
    hide: list[str] = []


class McpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an ``mcp`` environment.

    ``tools`` is the allow-list (all tools when absent). With ``share`` the servers
    are started once for the run and used by all samples that ask for the same ones.
    """

    servers: dict[str, dict[str, Any]]
    share: bool = False
    tools: list[str | ToolRule] | None = None

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("servers: {}; must name at least one MCP server")


class Route(msgspec.Struct, frozen=True):
    """Where a tool that the model sees really is."""

    client: McpClient
    tool: mcp_types.Tool
    rule: ToolRule


class McpEnvironment:
    """The MCP servers of one trajectory, or its view of the shared ones."""

    def __init__(self, config: McpConfig) -> None:
        self._config = config
        self._servers = {
            name: parse(server, Server, f"environment.servers.{name}")
            for name, server in config.servers.items()
        }
        self._clients: list[McpClient] = []
        self._routes: dict[str, Route] = {}
        self._job: list[Operation] = []
        self._results: list[OperationResult] = []

    async def open(self) -> Sequence[ToolDefinition]:
        """Start the servers side by side and return the allowed tools."""
        try:
            if self._config.share:
                self._clients = await _SHARED.clients(self._servers)
            else:
                self._clients = [McpClient(n, s) for n, s in self._servers.items()]
                await _start_all(self._clients)
            self._routes = _routes(self._clients, self._config.tools)
        except BaseException:
            await self.close()
            raise
        return [_definition(name, route) for name, route in self._routes.items()]

    def server_of(self, operations: Sequence[Operation]) -> str | None:
        """The server of the first operation that names a known tool."""
        for operation in operations:
            if operation.name in self._routes:
                return self._routes[operation.name].client.name
        return None

    async def run(self, operations: Sequence[Operation]) -> Sequence[OperationResult]:
        """Call the tools one after the other: later ones may read what earlier wrote.

        After a :class:`~sglang_agent.environments.base.RetryLater` the same job goes
        on with the call that was put off; no call is made twice.
        """
        if self._job != list(operations):
            self._job, self._results = list(operations), []
        for operation in operations[len(self._results) :]:
            self._results.append(await self._call(operation))
        results, self._job, self._results = self._results, [], []
        return results

    async def close(self) -> None:
        """Stop the servers unless they are shared."""
        clients, self._clients = self._clients, []
        if not self._config.share:
            await asyncio.shield(_close_all(clients))

    async def _call(self, operation: Operation) -> OperationResult:
        refused = refusal(operation, self._routes)
        if refused is not None:
            return refused
        route = self._routes[operation.name]
        arguments = {**operation.arguments, **route.rule.fixed}
        try:
            result = await route.client.call(route.tool.name, arguments)
        except NotReached as error:
            return OperationResult(
                operation.id, str(error), is_error=True, transport_error=True
            )
        return OperationResult(operation.id, _text(result), bool(result.is_error))


class _SharedServers:
    """Servers that outlive a sample: one client per server and event loop."""

    def __init__(self) -> None:
        self._clients: dict[bytes, McpClient] = {}
        self._locks: dict[bytes, asyncio.Lock] = {}

    async def clients(self, servers: Mapping[str, Server]) -> list[McpClient]:
        return [await self._client(n, s) for n, s in servers.items()]

    async def _client(self, name: str, server: Server) -> McpClient:
        if not self._locks:
            registry.on_close(self.close)
        key = msgspec.json.encode((name, server), order="deterministic")
        async with self._locks.setdefault(key, asyncio.Lock()):
            client = self._clients.get(key)
            if client is None or not client.alive:  # a dead one is started anew
                client = McpClient(name, server)
                await client.start()
                self._clients[key] = client
            return client

    async def close(self) -> None:
        clients = list(self._clients.values())
        self._clients.clear()
        self._locks.clear()
        await _close_all(clients)


_SHARED = _SharedServers()


class McpFactory:
    """Makes MCP environments from a task's settings."""

    def create(self, config: Mapping[str, Any], sample_id: str) -> McpEnvironment:
        """Check the settings; nothing is started before ``open``."""
        return McpEnvironment(parse(config, McpConfig))


FACTORY = McpFactory()


async def _start_all(clients: Sequence[McpClient]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.start())
    except* EnvironmentFailure as failures:
        raise failures.exceptions[0] from None


async def _close_all(clients: Sequence[McpClient]) -> None:
    await asyncio.gather(*(client.close() for client in clients))


def _routes(
    clients: Sequence[McpClient], allowed: Sequence[str | ToolRule] | None
) -> dict[str, Route]:
    """Tools by the name the model sees, in the order of the allow-list."""
    everything = {
        name: Route(client, tool, ToolRule(name))
        for name, client, tool in _named_tools(clients)
    }
    if allowed is None:
        return everything
    rules = [ToolRule(rule) if isinstance(rule, str) else rule for rule in allowed]
    for rule in rules:
        if rule.name not in everything:
            raise EnvironmentFailure(
                f"environment.tools: {rule.name!r} is on no server; "
                f"allowed: {', '.join(everything)}"
            )
    return {
        rule.name: msgspec.structs.replace(everything[rule.name], rule=rule)
        for rule in rules
    }


def _named_tools(
    clients: Sequence[McpClient],
) -> list[tuple[str, McpClient, mcp_types.Tool]]:
    """Every tool with its public name: prefixed when two servers have it."""
    count = Counter(tool.name for client in clients for tool in client.tools)
    return [
        (_public_name(client.name, tool.name, count[tool.name] > 1), client, tool)
        for client in clients
        for tool in client.tools
    ]


def _public_name(server: str, tool: str, ambiguous: bool) -> str:
    name = f"{server}__{tool}" if ambiguous else tool
    return _NOT_IN_NAMES.sub("_", name)[:_NAME_LIMIT]


def _definition(name: str, route: Route) -> ToolDefinition:
    function = {
        "name": name,
        "description": route.tool.description or "",
        "parameters": _narrowed(route.tool.input_schema, route.rule),
    }
    return {"type": "function", "function": function}


def _narrowed(schema: Mapping[str, Any], rule: ToolRule) -> dict[str, Any]:
    """The JSON schema of the arguments that are left to the model."""
    hidden = {*rule.fixed, *rule.hide}
    properties = {
        key: {**value, "enum": rule.choices[key]} if key in rule.choices else value
        for key, value in schema.get("properties", {}).items()
        if key not in hidden
    }
    required = [key for key in schema.get("required", []) if key not in hidden]
    kept = {key: value for key, value in schema.items() if key != "title"}
    return {**kept, "type": "object", "properties": properties, "required": required}


def _text(result: mcp_types.CallToolResult) -> str:
    """The result as the text of a tool message."""
    parts = [_block_text(block) for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts)


def _block_text(block: mcp_types.ContentBlock) -> str:
    match block:
        case mcp_types.TextContent():
            return block.text
        case mcp_types.EmbeddedResource(
            resource=mcp_types.TextResourceContents() as resource
        ):
            return resource.text
        case mcp_types.ResourceLink():
            return str(block.uri)
        case _:
            # Pictures and sound have no place in a text message; say what was there.
            return f"[{block.type}]"
