"""What each trajectory of a trace does, reduced to token counts and durations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from sglang_agent.errors import UsageError
from sglang_agent.records import EnvironmentStage, InferenceStage, TrajectoryRecord
from sglang_agent.simulate.wire import Segment

# One letter of the text that a prefix-matching router sees stands for so many tokens.
TOKENS_PER_LETTER = 4


class Job(NamedTuple):
    """An environment job: how long it took and on which server."""

    duration_s: float
    server: str | None


class TurnScript(NamedTuple):
    """One inference turn and what follows it.

    ``added`` is what the context gained since the turn before. When the context was
    rewritten, ``restart`` is what it begins with instead: the part of the prompt that
    other trajectories share, or nothing. None: the context goes on.
    """

    restart: list[Segment] | None
    added: Segment
    output: Segment
    job: Job | None


class TrajectoryScript(NamedTuple):
    """A whole trajectory; its first turn restarts."""

    label: str
    sample_id: str
    turns: list[TurnScript]

    @property
    def final_context_tokens(self) -> int:
        """Tokens in the cache when the last turn ends: one trajectory's L_kv."""
        total = 0
        for turn in self.turns:
            if turn.restart is not None:
                total = sum(segment.length for segment in turn.restart)
            total += turn.added.length + turn.output.length + 1
        return total


def script_of(record: TrajectoryRecord) -> TrajectoryScript:
    """Reduce a recorded trajectory.

    Raises :class:`UsageError` when it holds no inference turn.
    """
    jobs = {s.turn: s for s in record.stages if isinstance(s, EnvironmentStage)}
    head = _head(record)
    turns: list[TurnScript] = []
    context = 0
    for stage in record.stages:
        if not isinstance(stage, InferenceStage):
            continue
        restart = None
        if stage.input_tokens < context or not turns:
            restart = _cut(head, stage.input_tokens)
            context = sum(segment.length for segment in restart)
        added = stage.input_tokens - context
        name = f"{record.label}\0{stage.turn}"
        output = max(stage.output_tokens, 1)
        turns.append(
            TurnScript(
                restart=restart,
                added=Segment(_seed(f"{name}\0in"), added),
                output=Segment(_seed(f"{name}\0out"), output - 1),
                job=_job(jobs.get(stage.turn)),
            )
        )
        context += added + output
    if not turns:
        raise UsageError(f"trace: {record.label!r} holds no inference turn")
    return TrajectoryScript(record.label, record.sample_id, turns)


def mean_final_context(scripts: Sequence[TrajectoryScript]) -> float:
    """L_kv(D) of equation 2."""
    return sum(s.final_context_tokens for s in scripts) / len(scripts)


def text_of(segments: Iterable[Segment]) -> str:
    """Letters that share prefixes as the tokens do, for routers that match text."""
    return "".join(_letters_of(segment) for segment in segments)


def _letters_of(segment: Segment) -> str:
    count = -(-segment.length // TOKENS_PER_LETTER)
    word = f"{segment.seed:016x}"
    return (word * (count // len(word) + 1))[:count]


def _head(record: TrajectoryRecord) -> Segment | None:
    """The part of the first prompt that other trajectories have as well."""
    if record.shared_tokens:
        return Segment(_seed("shared head"), record.shared_tokens)
    messages = record.initial_messages or []
    common = [m for m in messages if m.get("role") in ("system", "developer")]
    first = next((s for s in record.stages if isinstance(s, InferenceStage)), None)
    if first is None or not (common or record.tools):
        return None
    shared = msgspec.json.encode([common, record.tools], order="deterministic")
    own = msgspec.json.encode([m for m in messages if m not in common])
    share = len(shared) / (len(shared) + len(own))
    digest = hashlib.blake2b(shared, digest_size=16).hexdigest()
    return Segment(_seed(digest), int(first.input_tokens * share))


def _cut(head: Segment | None, length: int) -> list[Segment]:
    """At most ``length`` tokens of the head."""
    if head is None:
        return []
    return [Segment(head.seed, min(head.length, length))]


def _job(stage: EnvironmentStage | None) -> Job | None:
    if stage is None:
        return None
    return Job(max(stage.ended_s - stage.started_s, 0.0), stage.server)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
