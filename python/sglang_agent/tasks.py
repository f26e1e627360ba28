"""The tasks file: JSON lines, one sample a line, checked whole before a run starts.

Fields of a line::

    id            unique name of the sample
    messages      the initial chat messages
    environment   {"type": ..., settings of that type}; without it the model has no
                  environment and a sample is one turn
    tools         tool definitions to send instead of the environment's
    tool_choice   auto, required or none; overrides the command line
    sampling      further fields of the request, e.g. temperature
    limits        see :class:`TaskLimits`

Identity is the content of a line, not its position: reordering the file or adding
lines changes nothing for the other samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson

from sglang_agent.environments import registry
from sglang_agent.errors import UsageError
from sglang_agent.records import Message, ToolDefinition

TOOL_CHOICES = ("auto", "required", "none")


class TaskLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What bounds one sample; what is absent comes from the command line.

    max_turns                inference turns
    max_output_tokens        tokens of one answer
    max_total_output_tokens  tokens of all answers together
    max_context_tokens       tokens of the context, answers included
    final_answer_turn        no call of turn number ``max_turns`` is run: it is the
                             final answer, or one more turn without calls is
    sample_timeout_s         seconds from admission
    tool_timeouts_s          seconds one call of the named tool may run
    """

    max_turns: int | None = None
    max_output_tokens: int | None = None
    max_total_output_tokens: int | None = None
    max_context_tokens: int | None = None
    final_answer_turn: bool = False
    sample_timeout_s: float | None = None
    tool_timeouts_s: dict[str, float] = {}


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the file."""

    id: str
    messages: list[Message]
    environment: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | None = None
    sampling: dict[str, Any] = {}
    limits: TaskLimits = TaskLimits()


def load(path: Path) -> list[Task]:
    """Read and check every line; blank lines are skipped.

    Raises :class:`UsageError` naming the file, the line number, the field and the
    value; nothing was started by then.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"tasks: {path}; {error.strerror}") from error
    decoder = msgspec.json.Decoder(Task)
    seen: dict[str, int] = {}
    tasks = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = decoder.decode(line)
            _check(task)
            if task.id in seen:
                raise ValueError(f"id: {task.id!r} is also on line {seen[task.id]}")
        except (ValueError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}:{number}: {error}") from error
        seen[task.id] = number
        tasks.append(task)
    if not tasks:
        raise UsageError(f"tasks: {path}; holds no task")
    return tasks


def identity(task: Task, settings: Mapping[str, Any]) -> str:
    """Return the key of a sample: a hash of its content and of ``settings``.

    ``settings`` are those of the run that change what the sample is (the model, the
    default limits), not how fast it runs.
    """
    content = {"task": msgspec.to_builtins(task), "settings": dict(settings)}
    return hashlib.sha256(
        orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
    ).hexdigest()[:32]


def _check(task: Task) -> None:
    if not task.id.strip():
        raise ValueError(f"id: {task.id!r}; must not be empty")
    if not task.messages:
        raise ValueError("messages: []; must hold at least one message")
    for index, message in enumerate(task.messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}].role: missing; must be a string")
    if task.tool_choice is not None and task.tool_choice not in TOOL_CHOICES:
        raise ValueError(
            f"tool_choice: {task.tool_choice!r}; must be one of"
            f" {', '.join(TOOL_CHOICES)}"
        )
    _check_limits(task.limits)
    _check_environment(task)


def _check_limits(limits: TaskLimits) -> None:
    for field in (
        "max_turns",
        "max_output_tokens",
        "max_total_output_tokens",
        "max_context_tokens",
    ):
        value = getattr(limits, field)
        if value is not None and value < 1:
            raise ValueError(f"limits.{field}: {value}; must be >= 1")
    seconds = {f"tool_timeouts_s.{k}": v for k, v in limits.tool_timeouts_s.items()}
    if limits.sample_timeout_s is not None:
        seconds["sample_timeout_s"] = limits.sample_timeout_s
    for field, value in seconds.items():
        if not value > 0:
            raise ValueError(f"limits.{field}: {value:g}; must be > 0")
    if limits.final_answer_turn and limits.max_turns is None:
        raise ValueError("limits.final_answer_turn: true; needs limits.max_turns")


def _check_environment(task: Task) -> None:
    if task.environment is None:
        return
    kind = task.environment.get("type")
    if not isinstance(kind, str):
        raise ValueError(f"environment.type: {kind!r}; must name an environment type")
    # Building one starts nothing and lets its own settings be checked.
    registry.create(kind, task.environment, task.id)
