"""The typed records that cross module boundaries, and the trace they are kept in.

A trace file is JSON lines, one :class:`TrajectoryRecord` a line. Times are seconds
on the run's clock, counted from the start of the batch; token counts are tokens.

What a live trajectory gathers is out of the garbage collector's sight (``gc=False``):
records are trees, and thousands of them would make its pauses long.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

TRACE_VERSION = 1

Message = dict[str, Any]
"""One chat message in the OpenAI shape (role, content, tool_calls, ...)."""

ToolDefinition = dict[str, Any]
"""One tool in the OpenAI shape: ``{"type": "function", "function": {...}}``."""


class Outcome(StrEnum):
    """How a trajectory ended: completed, or the class of its failure."""

    COMPLETED = "completed"
    ENVIRONMENT = "environment"
    INFERENCE = "inference"
    OURS = "ours"
    BUDGET = "budget"
    GRADING = "grading"
    CANCELLED = "cancelled"


class Operation(msgspec.Struct, frozen=True, gc=False):
    """One tool call inside an environment job."""

    id: str
    name: str
    arguments: dict[str, Any]


class OperationResult(msgspec.Struct, frozen=True):
    """What one operation returned; ``is_error`` is the tool's own verdict.

    ``transport_error`` says that the tool was not reached although its environment
    still lives. The model sees the text, and the runner ends the sample as an
    environment failure after several in a row, which a tool's own errors never do.
    """

    id: str
    content: str
    is_error: bool = False
    transport_error: bool = False


class InferenceStage(
    msgspec.Struct, frozen=True, gc=False, tag="inference", tag_field="stage"
):
    """One inference turn, retries folded into it (tokens are counted once)."""

    turn: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    start_s: float
    first_token_s: float | None
    end_s: float
    worker: str | None = None
    attempts: int = 1
    message: Message | None = None
    output_ids: list[int] | None = None


class EnvironmentStage(
    msgspec.Struct, frozen=True, gc=False, tag="environment", tag_field="stage"
):
    """One environment job: everything one turn asks of the environment.

    ``queued_s`` to ``started_s`` is queue time, ``started_s`` to ``ended_s`` service
    time. ``response`` holds the messages appended to the context, or only
    ``response_tokens`` says how long they were.
    """

    turn: int
    operations: list[Operation]
    queued_s: float
    started_s: float
    ended_s: float
    server: str | None = None
    response: list[Message] | None = None
    response_tokens: int | None = None
    error: str | None = None


Stage = InferenceStage | EnvironmentStage


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sample's complete execution: one line of a trace, one entry of a journal.

    ``attempts`` counts how often the sample was begun anew; ``stages`` are the last.
    """

    version: int = TRACE_VERSION
    label: str
    sample_id: str
    initial_messages: list[Message] | None = None
    initial_tokens: int | None = None
    shared_tokens: int | None = None
    tools: list[ToolDefinition] | None = None
    submitted_s: float
    admitted_s: float
    ended_s: float
    outcome: Outcome
    error: str | None = None
    score: float | None = None
    attempts: int = 1
    stages: list[Stage]
