"""Environments are found by name, and wrong settings are named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sglang_agent.environments import registry
from sglang_agent.environments.base import Environment


class NoFactory:
    def create(self, config: Mapping[str, Any], sample_id: str) -> Environment:
        raise ValueError(f"asked for {sample_id} with {dict(config)}")


def test_unknown_type_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"environment\.type: 'mpc' is unknown.*mcp"):
        registry.create("mpc", {}, "s1")


def test_registered_type_gets_its_settings_without_the_type() -> None:
    registry.register("probe", NoFactory())
    try:
        with pytest.raises(ValueError, match=r"asked for s1 with \{'a': 1\}"):
            registry.create("probe", {"type": "probe", "a": 1}, "s1")
    finally:
        registry.unregister("probe")
    assert "probe" not in registry.names()


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'mcp' is already registered"):
        registry.register("mcp", NoFactory())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "environment: .*servers"),
        ({"servers": {}}, r"environment: servers: \{\}"),
        ({"servers": {"a": {}}}, r"environment\.servers\.a: .*either command"),
        (
            {"servers": {"a": {"command": "x", "url": "http://y"}}},
            "either command",
        ),
        (
            {"servers": {"a": {"command": 3}}},
            r"environment\.servers\.a\.command is 3: Exp",
        ),
        ({"servers": {"a": {"command": "x", "arg": []}}}, "unknown field `arg`"),
        (
            {"servers": {"a": {"command": "x", "tool_timeout_s": 0}}},
            "tool_timeout_s: 0; must be above 0",
        ),
        (
            {"servers": {"a": {"command": "x", "tool_timeouts_s": {"q": -1}}}},
            r"tool_timeouts_s\.q: -1",
        ),
        (
            {"servers": {"a": {"command": "x", "env": {"KEY": "${NO_SUCH_KEY}"}}}},
            r"environment\.servers\.a: \$\{NO_SUCH_KEY\} is not set",
        ),
        ({"servers": {"a": {"command": "x"}}, "share": "yes"}, r"share is 'yes'"),
    ],
)
def test_wrong_mcp_settings_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        registry.create("mcp", config, "s1")
    assert "\n" not in str(caught.value)
