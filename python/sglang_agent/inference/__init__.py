"""How a turn is asked of a model: one request type, one answer type, one protocol.

``http`` serves both HTTP clients, ``chat`` speaks the OpenAI chat route and
``generate`` SGLang's token-exact ``/generate``. A replay or a simulation brings a
client of its own and keeps everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from sglang_agent.records import Message, ToolDefinition


class InferenceFailure(Exception):
    """A turn could not be had from the model; the message says from whom and why."""


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One inference turn of a trajectory.

    The context is ``messages`` or, token-exact, ``input_ids``. ``max_tokens`` bounds
    the answer; ``exact_tokens`` asks for exactly that many and no early stop.
    ``label`` travels as ``x-smg-routing-key`` with every attempt.
    """

    label: str
    turn: int
    messages: Sequence[Message] | None = None
    input_ids: Sequence[int] | None = None
    tools: Sequence[ToolDefinition] | None = None
    tool_choice: str | None = None
    max_tokens: int | None = None
    exact_tokens: int | None = None
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def turn_id(self) -> str:
        """Name the turn across its attempts; request ids start with it."""
        return f"{self.label}.{self.turn}"


class TurnAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back. Times in seconds on the client's clock, counts in tokens.

    Retries are folded in: ``start_s`` is the first attempt's, tokens are those of the
    attempt that succeeded. ``truncated`` tells that the answer hit its token limit.
    """

    message: Message | None = None
    output_ids: list[int] | None = None
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    start_s: float
    first_token_s: float | None
    end_s: float
    worker: str | None = None
    attempts: int = 1
    truncated: bool = False


class InferenceClient(Protocol):
    """Answers turns; shared by all samples of a run."""

    async def complete(self, request: TurnRequest) -> TurnAnswer:
        """Return the turn's answer.

        Raises :class:`InferenceFailure` when retries cannot help or are used up. When
        the caller is cancelled, the worker is told to stop the request.
        """

    async def close(self) -> None:
        """Release connections; safe to call twice."""
