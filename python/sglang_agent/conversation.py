"""What a sample says next: the contract, and the conversation of a live task.

The runner knows only the loop of equation 10 (ask, act, ask again). Which context a
turn is asked with, and what its answer means, is the conversation's business: a live
task appends messages, a replay appends recorded token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import orjson

from sglang_agent.environments.base import UserTurn
from sglang_agent.inference import TurnAnswer, TurnRequest
from sglang_agent.records import Message, Operation, OperationResult, ToolDefinition


class BudgetExhausted(Exception):
    """The sample used up a limit of its own (turns, tokens) without an end."""


class Conversation(Protocol):
    """One trajectory's context and how it grows; used by one task at a time."""

    def next_request(self) -> TurnRequest:
        """Return the next turn. Raises :class:`BudgetExhausted` at a limit."""

    def accept(self, answer: TurnAnswer) -> Sequence[Operation]:
        """Append the answer; return the job it asks for, empty when it is final.

        Raises :class:`BudgetExhausted` when a token limit cut it in a tool call.
        """

    def respond(self, results: Sequence[OperationResult]) -> list[Message] | None:
        """Append a job's results; return the messages for the trace, if any."""

    def transcript(self) -> Sequence[Message]:
        """Return the messages so far, for scoring."""


@runtime_checkable
class RefusingConversation(Protocol):
    """A conversation that takes no more calls at some point; optional."""

    def refuse(self) -> list[Message] | None:
        """Answer calls that came too late to be run, so that an answer follows.

        Return the messages for the trace, None when there were no such calls.
        """


@runtime_checkable
class UserConversation(Protocol):
    """A conversation that can take a further request of the user; optional."""

    def say(self, turn: UserTurn) -> list[Message]:
        """Append the request; return the messages for the trace."""


class ConversationLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a conversation; None is unbounded.

    ``max_output_tokens`` is for one turn, ``max_total_output_tokens`` for all of them.
    With ``final_answer_turn`` no call of the last turn that ``max_turns`` allows is
    run, so that the sample completes. That turn still offers the tools: without them
    servers leave them out of the prompt, and its cached prefix is lost. Only a model
    that calls all the same is told no, and asked once more without tool calls.
    """

    max_turns: int | None = None
    max_output_tokens: int | None = None
    max_total_output_tokens: int | None = None
    max_context_tokens: int | None = None
    final_answer_turn: bool = False


REFUSAL = "error: no tool calls are left; give the final answer now"


class ChatConversation:
    """A live task: OpenAI messages, tool calls parsed into operations."""

    def __init__(
        self,
        label: str,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        limits: ConversationLimits,
        *,
        tool_choice: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._label = label
        self._messages = list(messages)
        self._tools = list(tools)
        self._limits = limits
        self._tool_choice = tool_choice
        self._sampling = dict(sampling or {})
        self._turns = 0
        self._output_tokens = 0
        self._context_tokens = 0
        self._late_calls: Sequence[Mapping[str, Any]] = ()
        self._refused = False

    def next_request(self) -> TurnRequest:
        self._check_budget()
        self._turns += 1
        return TurnRequest(
            label=self._label,
            turn=self._turns,
            messages=self._messages,
            tools=self._tools or None,
            tool_choice=self._choice() if self._tools else None,
            max_tokens=self._tokens_left(),
            sampling=self._sampling,
        )

    def accept(self, answer: TurnAnswer) -> Sequence[Operation]:
        message = answer.message or {"role": "assistant", "content": ""}
        self._messages.append(message)
        self._output_tokens += answer.output_tokens
        self._context_tokens = answer.input_tokens + answer.output_tokens
        calls = message.get("tool_calls") or ()
        if self._refused:
            return ()
        if self._is_final_turn():
            self._late_calls = calls
            return ()
        if answer.truncated and self._tool_choice == "required" and not calls:
            raise BudgetExhausted(
                f"turn {self._turns} was cut at {answer.output_tokens} tokens before"
                " its tool call was complete"
            )
        return [_operation(call) for call in calls]

    def respond(self, results: Sequence[OperationResult]) -> list[Message]:
        added: list[Message] = [
            {"role": "tool", "tool_call_id": result.id, "content": result.content}
            for result in results
        ]
        self._messages.extend(added)
        return added

    def refuse(self) -> list[Message] | None:
        calls, self._late_calls = self._late_calls, ()
        if not calls:
            return None
        self._refused = True
        return self.respond([OperationResult(str(c.get("id")), REFUSAL) for c in calls])

    def say(self, turn: UserTurn) -> list[Message]:
        self._messages.extend(turn.messages)
        if turn.tools is not None:
            self._tools = list(turn.tools)
        return turn.messages

    def transcript(self) -> Sequence[Message]:
        return self._messages

    def _is_final_turn(self) -> bool:
        return self._limits.final_answer_turn and self._turns == self._limits.max_turns

    def _choice(self) -> str | None:
        if self._refused:
            return "none"
        if self._is_final_turn() and self._tool_choice == "required":
            return "auto"
        return self._tool_choice

    def _check_budget(self) -> None:
        limits = self._limits
        for name, used, limit in (
            ("max_turns", self._turns - self._refused, limits.max_turns),
            (
                "max_total_output_tokens",
                self._output_tokens,
                limits.max_total_output_tokens,
            ),
            ("max_context_tokens", self._context_tokens, limits.max_context_tokens),
        ):
            if limit is not None and used >= limit:
                raise BudgetExhausted(
                    f"{name} {limit} reached after {self._turns} turns"
                )

    def _tokens_left(self) -> int | None:
        limits = [self._limits.max_output_tokens]
        if self._limits.max_total_output_tokens is not None:
            limits.append(self._limits.max_total_output_tokens - self._output_tokens)
        return min((limit for limit in limits if limit is not None), default=None)


def _operation(call: Mapping[str, Any]) -> Operation:
    """Read one tool call; broken arguments stay visible to the environment.

    Models do produce arguments that are no JSON object. That is the model's error,
    which its environment answers, so it must not end the sample.
    """
    function = call.get("function") or {}
    raw = function.get("arguments") or "{}"
    try:
        arguments = orjson.loads(raw) if isinstance(raw, str) else raw
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"__raw_arguments__": raw}
    return Operation(str(call.get("id")), str(function.get("name")), arguments)
