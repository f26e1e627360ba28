"""Runs the inspect-ai example with a scripted model; prints what came of it."""

from __future__ import annotations

import json
import sys
from typing import Any

import inspect_ai
import inspect_ai_task
from inspect_ai.model import ModelOutput, ModelUsage, get_model

MODEL = "mockllm/model"


def answer(messages: list[Any], *_: Any) -> ModelOutput:
    """Call the shell, read what it printed, say it."""
    last = messages[-1]
    if last.role == "tool":
        output = ModelOutput.from_content(MODEL, last.text)
    else:
        count = {"command": f"seq {messages[0].text.split()[5]} | wc -l"}
        output = ModelOutput.for_tool_call(MODEL, "shell", count)
    # Without a usage inspect counts tokens, with a table from the network.
    output.usage = ModelUsage(input_tokens=9, output_tokens=9)
    return output


(log,) = inspect_ai.eval(
    inspect_ai_task.count_lines(4),
    model=get_model(MODEL, custom_outputs=answer),
    log_dir=sys.argv[1],
    display="none",
)
statistics = inspect_ai_task.ACTIONS.statistics()
found = {
    "status": log.status,
    "error": log.error and log.error.message,
    "accuracy": log.results and log.results.scores[0].metrics["accuracy"].value,
    "peak_running": statistics.peak_running,
    "running": statistics.running,
}
print(json.dumps(found))  # noqa: T201
