"""The same work in inspect-ai: its own loop, a mock model, a tool that returns.

Run by the Python of an environment with inspect-ai. The model answers in process, so
inspect is spared the HTTP that our own runner does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
import time
from typing import Any

import inspect_ai
import workload
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, execute_tools, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver, use_tools
from inspect_ai.tool import Tool, tool

MODEL = "mockllm/model"


@tool
def look() -> Tool:
    async def execute(turn: int) -> str:
        """Look it up.

        Args:
            turn: Which turn this is.
        """
        return "found"

    return execute


def answer(messages: list[Any], *_: Any) -> ModelOutput:
    turns = sum(message.role == "assistant" for message in messages)
    if turns < workload.TURNS - 1:
        output = ModelOutput.for_tool_call(MODEL, "look", {"turn": turns})
    else:
        output = ModelOutput.from_content(MODEL, "the answer")
    output.usage = ModelUsage(input_tokens=10 * len(messages), output_tokens=8)
    return output


@solver
def tool_loop() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        while True:
            state = await generate(state, tool_calls="none")
            if not state.output.message.tool_calls:
                return state
            done = await execute_tools(state.messages, state.tools)
            state.messages.extend(done.messages)

    return solve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=workload.TRAJECTORIES)
    options = parser.parse_args()
    workload.pin(workload.CLIENT_CORE)
    samples = [
        Sample(id=n, input=f"Task {n}: look it up.")
        for n in range(options.trajectories)
    ]
    work = Task(dataset=samples, solver=[use_tools(look()), tool_loop()])
    model = get_model(MODEL, custom_outputs=answer)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    (log,) = inspect_ai.eval(
        work,
        model=model,
        max_samples=workload.SAMPLE_CONCURRENCY,
        max_connections=workload.SAMPLE_CONCURRENCY,
        log_dir=tempfile.mkdtemp(prefix="bench-inspect-"),
        display="none",
    )
    wall_s, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    if log.status != "success":
        raise SystemExit(f"inspect ended with {log.status}: {log.error}")
    turns = options.trajectories * workload.TURNS
    version = importlib.metadata.version("inspect-ai")
    print(
        json.dumps(
            {
                "contender": f"inspect-ai {version}",
                "turns": turns,
                "turns_per_s_whole": turns / wall_s,
                "turns_per_cpu_s": turns / cpu_s,
            }
        )
    )


if __name__ == "__main__":
    main()
