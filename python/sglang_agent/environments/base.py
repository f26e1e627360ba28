"""The contract between the runner and an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from sglang_agent.records import (
    Message,
    Operation,
    OperationResult,
    ToolDefinition,
)


class EnvironmentFailure(Exception):
    """The environment itself broke (died, lost its transport): not a tool error.

    The message names the server and carries its last log lines.
    """


class RetryLater(Exception):
    """The environment asks to come back after ``delay_s`` seconds (HTTP 429).

    The runner frees the job's slot while it waits.
    """

    def __init__(self, delay_s: float, reason: str) -> None:
        super().__init__(f"retry after {delay_s:g} s: {reason}")
        self.delay_s = delay_s
        self.reason = reason


class Environment(Protocol):
    """One trajectory's view of its environment; used by one task at a time."""

    async def open(self) -> Sequence[ToolDefinition]:
        """Start what is needed and return the tools the model may call.

        Raises :class:`EnvironmentFailure` when it cannot start.
        """

    def server_of(self, operations: Sequence[Operation]) -> str | None:
        """Name the server that caps and rates of this job count against."""

    async def run(self, operations: Sequence[Operation]) -> Sequence[OperationResult]:
        """Run one environment job; results in the order of ``operations``.

        A tool's own error is a result with ``is_error``. Raises
        :class:`EnvironmentFailure` or :class:`RetryLater`.
        """

    async def close(self) -> None:
        """Release everything; safe to call twice and after a failure."""


@runtime_checkable
class GradingEnvironment(Protocol):
    """An environment that can also score what was done; optional."""

    async def score(self, messages: Sequence[Message]) -> float:
        """Score the finished trajectory, called once, before ``close``.

        Whatever it raises makes the sample a grading failure without a score; it is
        never recorded as 0.
        """


class UserTurn(msgspec.Struct, frozen=True):
    """What the user says next; ``tools`` are all that are offered from now on.

    ``tools`` is None when they stay as they are.
    """

    messages: list[Message]
    tools: list[ToolDefinition] | None = None


@runtime_checkable
class UserEnvironment(Protocol):
    """An environment with a user who goes on asking; optional."""

    async def next_user_turn(self) -> UserTurn | None:
        """What follows an answer without tool calls; None ends the trajectory."""


class EnvironmentFactory(Protocol):
    """Makes environments of one kind; registered by name in the registry."""

    def create(self, config: Mapping[str, Any], sample_id: str) -> Environment:
        """Build the environment for one sample.

        Raises ValueError naming the field and value when ``config`` is wrong.
        """
