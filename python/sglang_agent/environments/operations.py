"""Answers that every environment gives in the same words."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_agent.records import Operation, OperationResult

RAW_ARGUMENTS = "__raw_arguments__"
"""Where the conversation keeps arguments that are not a JSON object."""


def refusal(operation: Operation, tools: Iterable[str]) -> OperationResult | None:
    """The error for a call that no tool can take: unknown name, broken arguments."""
    known = list(tools)
    if operation.name not in known:
        there_are = ", ".join(known) or "none"
        text = f"unknown tool {operation.name!r}; there are: {there_are}"
        return OperationResult(operation.id, text, is_error=True)
    if RAW_ARGUMENTS in operation.arguments:
        text = f"the arguments of {operation.name} are not a JSON object"
        return OperationResult(operation.id, text, is_error=True)
    return None
