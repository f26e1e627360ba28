"""Conversations that say again what a recorded trajectory said, as to length."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_agent.errors import UsageError
from sglang_agent.inference import InferenceFailure, TurnAnswer, TurnRequest
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Message,
    Operation,
    OperationResult,
    TrajectoryRecord,
)
from sglang_agent.simulate.script import TrajectoryScript
from sglang_agent.simulate.wire import Segment

# What a replayed turn asks of the environment; the recorded job takes its place.
JOB = Operation(id="replayed", name="replayed", arguments={})

# Low ids are often special tokens.
FIRST_TOKEN = 16

_MASK = (1 << 64) - 1


def seeded_ids(segment: Segment, vocab_size: int) -> list[int]:
    """Token ids that follow from the segment's seed; a longer one starts the same."""
    span = vocab_size - FIRST_TOKEN
    return [
        FIRST_TOKEN + _mix(segment.seed + index) % span
        for index in range(segment.length)
    ]


def _mix(number: int) -> int:
    """SplitMix64's output function."""
    z = (number * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class TokenReplay:
    """Token-exact, for ``/generate``: seeded ids of the recorded counts.

    What the model generated goes into the context, what was added to it is seeded.
    """

    def __init__(self, script: TrajectoryScript, vocab_size: int) -> None:
        self._script = script
        self._vocab_size = vocab_size
        self._context: list[int] = []
        self._done = 0

    def next_request(self) -> TurnRequest:
        """See :class:`~sglang_agent.conversation.Conversation`."""
        turn = self._script.turns[self._done]
        if turn.restart is not None:
            self._context = []
        for segment in (*(turn.restart or ()), turn.added):
            self._context.extend(seeded_ids(segment, self._vocab_size))
        return TurnRequest(
            label=self._script.label,
            turn=self._done + 1,
            input_ids=self._context,
            exact_tokens=turn.output.length + 1,
        )

    def accept(self, answer: TurnAnswer) -> Sequence[Operation]:
        """Take the answer in; a job is asked for unless it was the last turn."""
        wanted = self._script.turns[self._done].output.length + 1
        if answer.output_ids is None or len(answer.output_ids) != wanted:
            got = "no" if answer.output_ids is None else len(answer.output_ids)
            raise InferenceFailure(
                f"turn {self._done + 1}: the server gave {got} output ids, "
                f"{wanted} were asked for"
            )
        self._context = [*self._context, *answer.output_ids]
        self._done += 1
        return [] if self._done == len(self._script.turns) else [JOB]

    def respond(self, results: Sequence[OperationResult]) -> list[Message] | None:
        """The response's tokens come with the next request."""
        return None

    def transcript(self) -> Sequence[Message]:
        """There are no messages."""
        return []


class ChatReplay:
    """Over any OpenAI-compatible chat route: generated text, recorded responses.

    Recorded tool results are sent as user messages, because a generated answer need
    not call the tool that the recorded one did; calls that it makes stay in the context
    as text. The tools are offered in every turn. Raises :class:`UsageError` when the
    trace holds no messages.
    """

    def __init__(self, record: TrajectoryRecord) -> None:
        if record.initial_messages is None:
            raise UsageError(
                f"trace: {record.label!r} holds no messages; replay it with "
                "--api generate"
            )
        self._record = record
        self._messages: list[Message] = list(record.initial_messages)
        self._turns = [s for s in record.stages if isinstance(s, InferenceStage)]
        self._jobs = {
            s.turn: s for s in record.stages if isinstance(s, EnvironmentStage)
        }
        self._done = 0

    def next_request(self) -> TurnRequest:
        """See :class:`~sglang_agent.conversation.Conversation`."""
        return TurnRequest(
            label=self._record.label,
            turn=self._done + 1,
            messages=self._messages,
            tools=self._record.tools,
            max_tokens=max(self._turns[self._done].output_tokens, 1),
            sampling={"ignore_eos": True},
        )

    def accept(self, answer: TurnAnswer) -> Sequence[Operation]:
        """Take the generated text in; a job is asked for unless it was the last turn."""
        text = _text_of(answer.message or {})
        self._messages.append({"role": "assistant", "content": text})
        self._done += 1
        return [] if self._done == len(self._turns) else [JOB]

    def respond(self, results: Sequence[OperationResult]) -> list[Message] | None:
        """Append what the environment answered when it was recorded."""
        job = self._jobs.get(self._turns[self._done - 1].turn)
        recorded = job.response if job is not None and job.response else []
        added: list[Message] = [
            {"role": "user", "content": str(m.get("content") or "")} for m in recorded
        ]
        self._messages.extend(added)
        return added

    def transcript(self) -> Sequence[Message]:
        """The messages so far."""
        return self._messages


def _text_of(message: Message) -> str:
    """What was generated, whether the server took it for text or for tool calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = [f"{call['name']} {call['arguments']}" for call in calls]
    return "\n".join(filter(None, [message.get("content"), *said]))
