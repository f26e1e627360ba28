"""An inspect-ai task whose tool calls wait in order of chain depth.

The loop is inspect's usual one: generate, run the tools that were called, go on. One
scheduler for the process takes the place of the sandbox or subprocess semaphore.
"""

from __future__ import annotations

import time

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import execute_tools
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, solver, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import subprocess

from sglang_agent import ActionScheduler, Trajectory

ACTIONS = ActionScheduler(capacity=3, policy="caas")


@tool
def shell() -> Tool:
    async def execute(command: str) -> str:
        """Run a shell command and return what it printed.

        Args:
            command: What to run.
        """
        done = await subprocess(["sh", "-c", command], timeout=30)
        return done.stdout

    return execute


@solver
def tool_loop() -> Solver:
    """Generate and act until the model answers without a call."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        trajectory = Trajectory(label=f"{state.sample_id}-{state.epoch}")
        while not state.completed:
            start_s = time.monotonic()
            state = await generate(state, tool_calls="none")
            trajectory.complete_turn(time.monotonic() - start_s)
            if not state.output.message.tool_calls:
                break
            async with ACTIONS.slot(trajectory):
                done = await execute_tools(state.messages, state.tools)
            state.messages.extend(done.messages)
        return state

    return solve


@task
def count_lines(samples: int = 8) -> Task:
    """A small local task: count lines with the shell and say the number."""
    return Task(
        dataset=[
            Sample(
                id=f"s{n}", input=f"How many lines does seq {n} print?", target=str(n)
            )
            for n in range(1, samples + 1)
        ],
        solver=[use_tools(shell()), tool_loop()],
        scorer=includes(),
    )
