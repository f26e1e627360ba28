"""BFCL multi-turn tasks: stateful tools, a user who goes on asking, its own checker.

One trajectory is one task. When the model answers without a call, the user's next
request follows; when there is none left, the task's own checker replays the calls
beside the right ones and compares states and answers.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import keyword
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sglang_agent.environments import bfcl_data
from sglang_agent.environments.base import UserTurn
from sglang_agent.environments.bfcl_data import Entry
from sglang_agent.environments.blocking import run_blocking
from sglang_agent.environments.config import parse
from sglang_agent.environments.operations import refusal
from sglang_agent.records import Message, Operation, OperationResult, ToolDefinition

SERVER = "bfcl"
STEPS_PER_TURN = 20
_CHECKER = "eval_checker.multi_turn_eval"
_gradings = itertools.count(1)


class BfclConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a ``bfcl`` environment: the id of the task."""

    entry: str


class BfclEnvironment:
    """The state and the user of one task."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._methods: dict[str, Callable[..., Any]] = {}
        self._tools: dict[str, ToolDefinition] = {}
        self._withheld: dict[str, ToolDefinition] = {}
        # The calls made, as text, by user turn and step: what the checker takes.
        self._calls: list[list[list[str]]] = [[]]
        self._overrun = False

    async def open(self) -> Sequence[ToolDefinition]:
        """Build the classes and load the task's state into them."""
        self._methods = await run_blocking(make_methods, self._entry)
        late = {n for names in self._entry.missed_function.values() for n in names}
        for class_name in self._entry.involved_classes:
            for tool in bfcl_data.documentation(class_name):
                name = tool["function"]["name"]
                (self._withheld if name in late else self._tools)[name] = tool
        return list(self._tools.values())

    def server_of(self, operations: Sequence[Operation]) -> str | None:
        """All tasks share one limit: they share this process."""
        return SERVER

    async def run(self, operations: Sequence[Operation]) -> Sequence[OperationResult]:
        """Call the methods in order, in a thread."""
        return await run_blocking(self._step, operations)

    async def next_user_turn(self) -> UserTurn | None:
        """The user's next request, with tools that are offered from now on."""
        turn = len(self._calls)
        if self._overrun or turn == len(self._entry.question):
            return None
        self._calls.append([])
        messages = self._entry.question[turn]
        late = self._entry.missed_function.get(str(turn), [])
        if not late:
            return UserTurn(messages)
        self._tools |= {name: self._withheld.pop(name) for name in late}
        return UserTurn(messages or [_more_tools()], list(self._tools.values()))

    async def score(self, messages: Sequence[Message]) -> float:
        """1 when the task's checker accepts the calls, else 0."""
        return float(await run_blocking(self._accepted))

    async def close(self) -> None:
        """The state goes with the object."""

    def _step(self, operations: Sequence[Operation]) -> list[OperationResult]:
        steps = self._calls[-1]
        if len(steps) == STEPS_PER_TURN:
            self._overrun = True
            text = f"the limit of {STEPS_PER_TURN} steps for one request is reached"
            return [OperationResult(o.id, text, is_error=True) for o in operations]
        steps.append([])
        return [self._call(operation, steps[-1]) for operation in operations]

    def _call(self, operation: Operation, made: list[str]) -> OperationResult:
        # As on the leaderboard, a withheld tool that is called all the same does run.
        known = self._tools if operation.name not in self._withheld else self._withheld
        refused = refusal(operation, known)
        if refused is not None:
            return refused
        if not all(map(_is_keyword_name, operation.arguments)):
            names = ", ".join(operation.arguments)
            return OperationResult(
                operation.id, f"no parameter names: {names}", is_error=True
            )
        made.append(call_text(operation.name, operation.arguments))
        try:
            value = self._methods[operation.name](**operation.arguments)
        except Exception as error:
            text = f"Error during execution: {error}"
            return OperationResult(operation.id, text, is_error=True)
        return OperationResult(operation.id, _text(value))

    def _accepted(self) -> bool:
        truth = bfcl_data.ground_truth(self._entry.category)[self._entry.id]
        if self._overrun or len(self._calls) != len(truth):
            return False
        return check(self._entry, self._calls, truth)


class BfclFactory:
    """Makes the environment of a task from its id."""

    def create(self, config: Mapping[str, Any], sample_id: str) -> BfclEnvironment:
        """Find the task; raises ValueError when there is no such id."""
        return BfclEnvironment(bfcl_data.entry(parse(config, BfclConfig).entry))


FACTORY = BfclFactory()


def make_methods(entry: Entry) -> dict[str, Callable[..., Any]]:
    """The tools of a task's classes, each bound to an object in the task's state."""
    stateless = bfcl_data.package(
        "constants.executable_backend_config"
    ).STATELESS_CLASSES
    methods: dict[str, Callable[..., Any]] = {}
    for class_name in entry.involved_classes:
        instance = bfcl_data.make_class(class_name)
        if class_name not in stateless:
            state = copy.deepcopy(entry.initial_config.get(class_name, {}))
            instance._load_scenario(state, long_context=entry.long_context)
        for name, method in inspect.getmembers(instance, inspect.ismethod):
            if not name.startswith("_"):
                methods[name] = method
    return methods


def check(
    entry: Entry, calls: Sequence[Sequence[Sequence[str]]], truth: list[list[str]]
) -> bool:
    """Ask the package's own checker.

    It evaluates the calls as Python text, which is safe because the text is made by
    :func:`call_text` from names and JSON values. It keeps its objects as globals
    under the name it is given, so every grading gets a name of its own, and they are
    removed afterwards.
    """
    checker = bfcl_data.package(f"{_CHECKER}.multi_turn_checker")
    name = f"grading{next(_gradings)}"
    steps = [[list(step) for step in turn if step] for turn in calls]
    try:
        verdict = checker.multi_turn_checker(
            steps, truth, msgspec.to_builtins(entry), entry.category, name
        )
    finally:
        kept = vars(sys.modules[f"bfcl_eval.{_CHECKER}.multi_turn_utils"])
        for key in [key for key in kept if key.startswith(f"{name}_")]:
            del kept[key]
    return bool(verdict["valid"])


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as Python text, from a known name and JSON values."""
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def _is_keyword_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _more_tools() -> Message:
    prompts = bfcl_data.package("constants.default_prompts")
    text = prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
    return {"role": "user", "content": text}


def _text(value: Any) -> str:
    """What the leaderboard shows a model: text as it is, objects as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except TypeError:
            return str(value)
    return str(value)
