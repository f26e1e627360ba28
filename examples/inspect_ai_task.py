"""An inspect-ai task whose tool calls wait in order of chain depth.

inspect limits samples, and subprocesses by a semaphore. Here its tool takes a slot of
one scheduler instead; the trajectory is kept in the sample's store. Each assistant
message is a completed turn, and inspect has timed it.
"""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ModelOutput
from inspect_ai.solver import TaskState, basic_agent, sample_state
from inspect_ai.tool import Tool, tool
from inspect_ai.util import subprocess

from sglang_agent import ActionScheduler, Trajectory

ACTIONS = ActionScheduler(capacity=3, policy="caas")


def trajectory_of(state: TaskState) -> Trajectory:
    """Bring the sample's trajectory up to date with the turns it has done."""
    trajectory: Trajectory = state.store.get("trajectory", None) or Trajectory(
        f"{state.sample_id}-{state.epoch}"
    )
    state.store.set("trajectory", trajectory)
    turns = sum(isinstance(m, ChatMessageAssistant) for m in state.messages)
    last: ModelOutput = state.output
    while trajectory.turns < turns:
        trajectory.complete_turn(last.time or 0.0)
    return trajectory


@tool
def shell() -> Tool:
    async def execute(command: str) -> str:
        """Run a shell command and return what it printed.

        Args:
            command: What to run.
        """
        state = sample_state()
        assert state is not None
        async with ACTIONS.slot(trajectory_of(state), server="shell"):
            done = await subprocess(["sh", "-c", command], timeout=30)
        return done.stdout

    return execute


@task
def count_lines(samples: int = 8) -> Task:
    """A small local task: count lines with the shell, submit the number."""
    return Task(
        dataset=[
            Sample(
                id=f"s{n}", input=f"How many lines does seq {n} print?", target=str(n)
            )
            for n in range(1, samples + 1)
        ],
        solver=basic_agent(tools=[shell()], message_limit=20),
    )
