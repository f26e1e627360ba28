"""Environments by name. A new kind is one module and one line in ``_MODULES``."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sglang_agent.environments.base import Environment, EnvironmentFactory

# Modules load on first use, so that an optional extra costs nothing until then.
_MODULES = {
    "bfcl": "sglang_agent.environments.bfcl",
    "functions": "sglang_agent.environments.functions",
    "mcp": "sglang_agent.environments.mcp",
    "ray": "sglang_agent.environments.ray_remote",
    "recorded": "sglang_agent.environments.recorded",
    "shell": "sglang_agent.environments.shell",
}
_registered: dict[str, EnvironmentFactory] = {}
_at_exit: list[Callable[[], Awaitable[None]]] = []


class UnknownEnvironment(ValueError):
    """No environment of this type; the message lists those there are."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"environment.type: {name!r} is unknown; allowed: {', '.join(names())}"
        )


class MissingExtra(ValueError):
    """The environment exists, but the package it needs is not installed."""

    def __init__(self, name: str, module: str | None) -> None:
        super().__init__(
            f"environment.type: {name!r} needs the package {module!r}; "
            f"install sglang-agent[{name}]"
        )


def names() -> list[str]:
    """Every environment type that can be created, in alphabetical order."""
    return sorted({*_MODULES, *_registered})


def register(name: str, factory: EnvironmentFactory) -> None:
    """Add an environment type; a name that is taken raises ValueError."""
    if name in names():
        raise ValueError(f"environment type {name!r} is already registered")
    _registered[name] = factory


def unregister(name: str) -> None:
    """Remove a type added with :func:`register`."""
    del _registered[name]


def create(type: str, config: Mapping[str, Any], sample_id: str) -> Environment:
    """Build the environment of one sample; ``config`` may repeat ``type``.

    Raises ValueError naming the field and the value when either is wrong.
    """
    settings = {key: value for key, value in config.items() if key != "type"}
    return _factory(type).create(settings, sample_id)


def require(type: str) -> None:
    """Load an environment type; raises ValueError when it cannot be used here."""
    _factory(type)


def on_close(close: Callable[[], Awaitable[None]]) -> None:
    """Have :func:`close_shared` await ``close`` once, at the end of the run."""
    _at_exit.append(close)


async def close_shared() -> None:
    """Release what environments of one run shared. Call it when the run ends."""
    while _at_exit:
        await _at_exit.pop()()


def _factory(name: str) -> EnvironmentFactory:
    if name in _registered:
        return _registered[name]
    if name not in _MODULES:
        raise UnknownEnvironment(name)
    try:
        module = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        raise MissingExtra(name, error.name) from error
    factory: EnvironmentFactory = module.FACTORY
    return factory
