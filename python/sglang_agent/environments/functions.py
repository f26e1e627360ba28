"""Environments whose tools are Python functions, or the methods of an object.

Signatures become the tools' schemas and are checked on every call. Functions that
block run in threads, coroutine functions on the event loop.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from sglang_agent.environments.base import EnvironmentFailure
from sglang_agent.environments.blocking import run_blocking
from sglang_agent.environments.config import parse
from sglang_agent.environments.operations import refusal
from sglang_agent.records import Operation, OperationResult, ToolDefinition


class FunctionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a ``functions`` environment.

    ``functions`` are ``"module:name"``. ``object`` is a ``"module:Class"`` called once
    per sample with ``arguments``; its public methods are the tools and it is closed
    at the end if it has ``close``. A tasks file can thus run any code that can be
    imported here: treat it as a program.
    """

    functions: list[str] = []
    object: str | None = None
    arguments: dict[str, Any] = {}
    tools: list[str] | None = None

    def __post_init__(self) -> None:
        if not self.functions and self.object is None:
            raise ValueError("functions or object: give at least one")


class Tool:
    """One callable with the schema of its arguments."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
        self._arguments = _arguments_struct(name, function)

    def definition(self) -> ToolDefinition:
        """The tool in the OpenAI shape, its docstring as the description."""
        _, parts = msgspec.json.schema_components(
            [self._arguments], ref_template="#/$defs/{name}"
        )
        schema = parts.pop(self._arguments.__name__)
        schema.pop("title", None)
        if parts:
            schema["$defs"] = parts
        function = {
            "name": self.name,
            "description": inspect.getdoc(self._function) or "",
            "parameters": schema,
        }
        return {"type": "function", "function": function}

    async def call(self, operation: Operation) -> OperationResult:
        """Run the tool; what it raises is the tool's own error.

        :class:`EnvironmentFailure` passes through: with it, code says that the
        environment itself is broken.
        """
        try:
            arguments = msgspec.convert(operation.arguments, self._arguments)
            value = await self._run(msgspec.structs.asdict(arguments))
            return OperationResult(operation.id, _text(value))
        except EnvironmentFailure:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return OperationResult(operation.id, text, is_error=True)

    async def _run(self, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**arguments)
        return await run_blocking(lambda: self._function(**arguments))


class FunctionEnvironment:
    """Tools of one trajectory. ``make`` is called at opening, off the event loop."""

    def __init__(
        self,
        make: Callable[[], Mapping[str, Callable[..., Any]]],
        close: Callable[[], None] | None = None,
        server: str = "functions",
    ) -> None:
        self._make = make
        self._close = close
        self._server = server
        self._tools: dict[str, Tool] = {}

    async def open(self) -> Sequence[ToolDefinition]:
        """Make the tools; an error in making them is an environment failure."""
        try:
            functions = await run_blocking(self._make)
        except Exception as error:
            raise EnvironmentFailure(
                f"{self._server}: cannot be made: {type(error).__name__}: {error}"
            ) from error
        self._tools = {name: Tool(name, f) for name, f in functions.items()}
        return [tool.definition() for tool in self._tools.values()]

    def server_of(self, operations: Sequence[Operation]) -> str | None:
        """The name under which limits for this environment are given."""
        return self._server

    async def run(self, operations: Sequence[Operation]) -> Sequence[OperationResult]:
        """Call the functions one after the other."""
        return [
            refusal(operation, self._tools)
            or await self._tools[operation.name].call(operation)
            for operation in operations
        ]

    async def close(self) -> None:
        """Close the object behind the tools, once."""
        close, self._close = self._close, None
        if close is not None:
            await run_blocking(close)


class FunctionsFactory:
    """Makes function environments from import paths."""

    def create(self, config: Mapping[str, Any], sample_id: str) -> FunctionEnvironment:
        """Import everything now, so that a wrong path is found before the run."""
        settings = parse(config, FunctionsConfig)
        functions = {
            path.rpartition(":")[2]: _load(path, f"functions[{place}]")
            for place, path in enumerate(settings.functions)
        }
        if settings.object is None:
            return FunctionEnvironment(lambda: _allowed(functions, settings.tools))
        holder = _Holder(_load(settings.object, "object"), settings)
        return FunctionEnvironment(
            lambda: _allowed({**functions, **holder.methods()}, settings.tools),
            holder.close,
            server=settings.object.rpartition(":")[2],
        )


class _Holder:
    """The object of one sample: made at opening, closed if it can be."""

    def __init__(self, factory: Callable[..., Any], settings: FunctionsConfig) -> None:
        self._factory = factory
        self._settings = settings
        self._made: Any = None

    def methods(self) -> dict[str, Callable[..., Any]]:
        self._made = self._factory(**self._settings.arguments)
        return {
            name: method
            for name, method in inspect.getmembers(self._made, inspect.ismethod)
            if not name.startswith("_") and name != "close"
        }

    def close(self) -> None:
        close = getattr(self._made, "close", None)
        if callable(close):
            close()


FACTORY = FunctionsFactory()


def _load(path: str, field: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"environment.{field} is {path!r}: must be module:name; {error}"
        ) from error
    if not callable(found):
        raise ValueError(f"environment.{field} is {path!r}: cannot be called")
    function: Callable[..., Any] = found
    return function


def _allowed(
    functions: Mapping[str, Callable[..., Any]], tools: Sequence[str] | None
) -> dict[str, Callable[..., Any]]:
    if tools is None:
        return dict(functions)
    for name in tools:
        if name not in functions:
            raise EnvironmentFailure(
                f"environment.tools: {name!r} is no tool; allowed: {', '.join(functions)}"
            )
    return {name: functions[name] for name in tools}


def _arguments_struct(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    """A struct with the function's parameters: schema and check in one.

    A parameter without annotation takes anything; ``*args`` and ``**kwargs`` have no
    schema and are left out.
    """
    hints = get_type_hints(function)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = hints.get(parameter.name, Any)
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            default = msgspec.field(default_factory=_returning(parameter.default))
            fields.append((parameter.name, kind, default))
    return msgspec.defstruct(
        f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True
    )


def _returning(value: Any) -> Callable[[], Any]:
    return lambda: value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value, enc_hook=str).decode()
