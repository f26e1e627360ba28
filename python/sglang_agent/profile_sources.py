"""Reads trajectories for a profile from the files that people have.

- our own traces and run folders;
- SGLang's agentic-trace files: one JSON object with ``conversations``, each a list
  of turns with ``messages`` (what is new) and ``prompt_tokens``;
- JSON lines with one request each: a trajectory id and its usage, spelled as in
  OpenAI's, Anthropic's or SGLang's answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_agent.errors import UsageError
from sglang_agent.profile import Contexts, Turn
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Outcome,
    TrajectoryRecord,
)
from sglang_agent.report.source import read_source
from sglang_agent.trace import BadLine, decode_record, read_lines, trace_file

ID_FIELDS = (
    "trajectory_id",
    "trajectory",
    "routing_key",
    "session_id",
    "conversation_id",
    "sample_id",
    "label",
)
_INPUT_FIELDS = ("input_tokens", "prompt_tokens")
_OUTPUT_FIELDS = ("output_tokens", "completion_tokens")
# Anthropic's usage counts cached input apart from input_tokens.
_APART = ("cache_read_input_tokens", "cache_creation_input_tokens")
# These ended where the work ended; the other outcomes cut a trajectory short.
_WHOLE = (Outcome.COMPLETED, Outcome.BUDGET, Outcome.GRADING)


class Source(msgspec.Struct):
    """What was read from one or more files, and what could not be."""

    trajectories: list[Contexts] = []
    incomplete: int = 0
    bad: list[BadLine] = []


def read_sources(paths: Iterable[Path], id_field: str | None = None) -> Source:
    """Read every file; ``id_field`` names the trajectory id of request lines.

    Trajectories of different files stay apart, whatever their ids. Raises
    :class:`UsageError` for a file that cannot be read at all.
    """
    source = Source()
    for path in paths:
        if path.is_dir():
            run = read_source(path)
            source.bad += run.bad
            for record in run.records:
                _add_record(record, source)
            continue
        file = trace_file(path)
        conversations = _agentic(file)
        if conversations is not None:
            _add_conversations(file, conversations, source)
        else:
            _add_lines(file, id_field, source)
    return source


def _agentic(file: Path) -> list[Any] | None:
    """The conversations of an agentic-trace file; None for any other file."""
    if file.suffix != ".json":
        return None
    try:
        data = msgspec.json.decode(file.read_bytes())
    except msgspec.DecodeError as error:
        raise UsageError(f"{file}: not JSON: {error}") from error
    found = data.get("conversations") if isinstance(data, dict) else None
    if not isinstance(found, list):
        raise UsageError(f"{file}: no list 'conversations', so no agentic trace")
    return found


def _add_conversations(file: Path, conversations: list[Any], source: Source) -> None:
    for number, conversation in enumerate(conversations, start=1):
        try:
            turns = [
                Turn(_count(turn, "prompt_tokens"))
                for turn in conversation
                if turn["messages"]
            ]
            if not turns:
                raise ValueError("no turn with messages")
        except (KeyError, TypeError, ValueError) as error:
            source.bad.append(BadLine(file, number, f"conversation: {_say(error)}"))
            continue
        source.trajectories.append(Contexts(f"{file}#{number}", turns))


def _add_lines(file: Path, id_field: str | None, source: Source) -> None:
    requests: dict[str, list[Turn]] = {}
    for number, line in read_lines(file):
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
            if "stages" in row:
                _add_record(decode_record(line), source)
            else:
                requests.setdefault(_id(row, id_field), []).append(_turn(row))
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            source.bad.append(BadLine(file, number, _say(error)))
    for name, turns in requests.items():
        source.trajectories.append(Contexts(name, _in_order(turns)))


def _add_record(record: TrajectoryRecord, source: Source) -> None:
    turns = record_turns(record)
    if record.outcome in _WHOLE and turns:
        source.trajectories.append(Contexts(record.label, turns))
    else:
        source.incomplete += 1


def record_turns(record: TrajectoryRecord) -> list[Turn]:
    """The inference turns of one of our records, each with its job's duration."""
    jobs = {
        stage.turn: stage.ended_s - stage.started_s
        for stage in record.stages
        if isinstance(stage, EnvironmentStage)
    }
    return [
        Turn(
            stage.input_tokens,
            stage.output_tokens,
            index=stage.turn,
            environment_s=jobs.get(stage.turn),
        )
        for stage in record.stages
        if isinstance(stage, InferenceStage)
    ]


def _turn(row: Mapping[str, Any]) -> Turn:
    usage = row.get("usage", row)
    if not isinstance(usage, Mapping):
        raise ValueError(f"usage is {usage!r}; must be an object")
    apart = sum(_count(usage, name) for name in _APART if usage.get(name))
    given = _first(usage, _INPUT_FIELDS)
    output = next((name for name in _OUTPUT_FIELDS if name in usage), None)
    return Turn(
        _count(usage, given) + apart,
        None if output is None else _count(usage, output),
        index=_optional_count(row, "turn"),
        messages=_digests(row),
        environment_s=_seconds(row, "environment_seconds"),
    )


def _digests(row: Mapping[str, Any]) -> tuple[int, ...] | None:
    messages = row.get("messages")
    if not isinstance(messages, list):
        return None
    return tuple(
        hash(msgspec.json.encode(message, order="deterministic"))
        for message in messages
    )


def _in_order(turns: Sequence[Turn]) -> list[Turn]:
    """By turn index where every line has one, else as they stand in the file."""
    if any(turn.index is None for turn in turns):
        return list(turns)
    return sorted(turns, key=lambda turn: turn.index or 0)


def _id(row: Mapping[str, Any], field: str | None) -> str:
    name = field or _first(row, ID_FIELDS)
    value = row.get(name)
    if not isinstance(value, str | int) or value == "":
        raise ValueError(f"{name} is {value!r}; must be a trajectory id")
    return str(value)


def _first(row: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if name in row:
            return name
    raise ValueError(f"none of the fields {', '.join(names)}")


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}; must be a whole number from 0 on")
    return value


def _optional_count(row: Mapping[str, Any], name: str) -> int | None:
    return None if row.get(name) is None else _count(row, name)


def _seconds(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; must be seconds from 0 on")
    return float(value)


def _say(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no field {error.args[0]!r}"
    return str(error).replace("\n", " ")
