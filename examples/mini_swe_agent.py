"""mini-swe-agent under one limit: threads, an ordered slot for every command.

Its agents are synchronous and run in threads. Two small wrappers are all it takes:
the model tells the trajectory of each turn, the environment holds a slot while a
command runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment

from sglang_agent import ActionScheduler, Trajectory


class TimedModel:
    """Any mini-swe-agent model; reports its turns to the trajectory."""

    def __init__(self, model: Any, trajectory: Trajectory) -> None:
        self._model = model
        self._trajectory = trajectory

    def query(self, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        start_s = time.monotonic()
        answer: dict[str, Any] = self._model.query(messages, **more)
        self._trajectory.complete_turn(time.monotonic() - start_s)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class ScheduledEnvironment(LocalEnvironment):
    """A local shell whose commands wait for their turn."""

    def __init__(
        self, actions: ActionScheduler, trajectory: Trajectory, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._actions = actions
        self._trajectory = trajectory

    def execute(self, action: dict[str, Any], cwd: str = "", **more: Any) -> Any:
        with self._actions.slot_sync(self._trajectory, server="shell"):
            return super().execute(action, cwd, **more)


def run_batch(
    tasks: Sequence[str],
    make_model: Callable[[str], Any],
    folder: Path,
    actions: ActionScheduler,
    sample_concurrency: int = 16,
) -> dict[str, dict[str, Any]]:
    """Solve every task in a thread of its own; returns what each agent submitted."""

    def solve(task: str) -> dict[str, Any]:
        trajectory = Trajectory(label=task)
        where = folder / task
        where.mkdir(parents=True, exist_ok=True)
        agent = DefaultAgent(
            TimedModel(make_model(task), trajectory),
            ScheduledEnvironment(actions, trajectory, cwd=str(where)),
            system_template="You solve tasks with shell commands.",
            instance_template="{{task}}",
            cost_limit=0.0,
        )
        result: dict[str, Any] = agent.run(task)
        return result

    with ThreadPoolExecutor(sample_concurrency) as pool:
        return dict(zip(tasks, pool.map(solve, tasks), strict=True))
