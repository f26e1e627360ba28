"""Runs samples on virtual time with a scripted model and environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_agent import ActionScheduler, AdmissionGate, VirtualClock
from sglang_agent.backoff import Backoff
from sglang_agent.batch import run_batch
from sglang_agent.conversation import ChatConversation, ConversationLimits
from sglang_agent.inference import TurnAnswer, TurnRequest
from sglang_agent.jobs import JobLimits, JobRunner
from sglang_agent.records import Operation, OperationResult, TrajectoryRecord
from sglang_agent.sample import SamplePlan, Services
from sglang_agent.state import BatchState

Run = Callable[[Sequence[Operation]], Awaitable[Sequence[OperationResult]]]


class Model:
    """Calls one tool for ``tool_turns`` turns of ``turn_s`` seconds, then answers."""

    def __init__(self, clock: VirtualClock, turn_s: float, tool_turns: int) -> None:
        self.clock = clock
        self.turn_s = turn_s
        self.tool_turns = tool_turns
        self.requests: list[TurnRequest] = []

    async def complete(self, request: TurnRequest) -> TurnAnswer:
        self.requests.append(request)
        start_s = self.clock.now()
        await self.clock.sleep(self.turn_s)
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if request.turn <= self.tool_turns:
            function = {"name": "look", "arguments": "{}"}
            call = {"id": f"c{request.turn}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return TurnAnswer(
            message=message,
            input_tokens=10,
            output_tokens=5,
            cached_tokens=0,
            start_s=start_s,
            first_token_s=None,
            end_s=self.clock.now(),
        )

    async def close(self) -> None:
        pass


class World:
    """An environment kind; ``run`` decides what a job does."""

    def __init__(self, run: Run, score: Callable[[], float] | None = None) -> None:
        self.run = run
        self.score = score
        self.opened = self.closed = 0

    def make(self) -> Any:
        return _Scored(self) if self.score is not None else _Instance(self)


class _Instance:
    def __init__(self, world: World) -> None:
        self._world = world

    async def open(self) -> list[dict[str, Any]]:
        self._world.opened += 1
        return [{"type": "function", "function": {"name": "look"}}]

    def server_of(self, operations: Sequence[Operation]) -> str | None:
        return "box"

    async def run(self, operations: Sequence[Operation]) -> Sequence[OperationResult]:
        return await self._world.run(operations)

    async def close(self) -> None:
        self._world.closed += 1


class _Scored(_Instance):
    async def score(self, messages: Sequence[Any]) -> float:
        assert self._world.score is not None
        return self._world.score()


@dataclass
class Batch:
    """One batch on virtual time; ``execute`` runs it and returns the records."""

    world: World
    clock: VirtualClock = field(default_factory=VirtualClock)
    samples: int = 1
    tool_turns: int = 1
    turn_s: float = 1.0
    cs: int = 100
    ce: int = 100
    limits: JobLimits = field(default_factory=JobLimits)
    sample_timeout_s: float | None = None
    sample_retries: int = 0
    grace_s: float = 2.0

    def __post_init__(self) -> None:
        self.model = Model(self.clock, self.turn_s, self.tool_turns)
        self.records: list[TrajectoryRecord] = []
        self.actions = ActionScheduler(self.ce, grace_s=self.grace_s, clock=self.clock)
        self.admission = AdmissionGate(self.cs, clock=self.clock)
        self.state = BatchState(self.samples, 0, self.clock)

    def execute(
        self, beside: Callable[[asyncio.Task[None]], Awaitable[None]] | None = None
    ) -> list[TrajectoryRecord]:
        async def main() -> None:
            task = asyncio.create_task(self.run())
            if beside is not None:
                await beside(task)
            await task

        self.clock.run(main())
        return self.records

    async def run(self) -> None:
        services = Services(
            inference=self.model,
            jobs=JobRunner(self.actions, Backoff(1.0, 30.0)),
            state=self.state,
            origin_s=0.0,
            sample_retries=self.sample_retries,
        )
        plans = [self.plan(n) for n in range(self.samples)]
        await run_batch(plans, services, self.admission, self.keep)

    def plan(self, n: int) -> SamplePlan:
        def converse(tools: Sequence[dict[str, Any]]) -> ChatConversation:
            first = [{"role": "user", "content": f"task {n}"}]
            return ChatConversation(f"s{n}", first, tools, ConversationLimits())

        return SamplePlan(
            key=f"k{n}",
            label=f"s{n}",
            sample_id=f"s{n}",
            environment=self.world.make,
            converse=converse,
            job_limits=self.limits,
            sample_timeout_s=self.sample_timeout_s,
        )

    async def keep(self, plan: SamplePlan, record: TrajectoryRecord) -> None:
        self.records.append(record)


def ok(operations: Sequence[Operation]) -> list[OperationResult]:
    return [OperationResult(o.id, "seen") for o in operations]
