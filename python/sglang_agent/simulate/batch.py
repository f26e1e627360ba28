"""One batch on the virtual clock, from the first admission to the last answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from sglang_agent.actions import ActionScheduler
from sglang_agent.admission import AdmissionGate
from sglang_agent.clock import VirtualClock
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Outcome,
    Stage,
    TrajectoryRecord,
)
from sglang_agent.simulate import wire
from sglang_agent.simulate.errors import RequestRefused
from sglang_agent.simulate.fleet import NS, Fleet, RoutingPolicy, VirtualWorker
from sglang_agent.simulate.script import Job, TrajectoryScript, TurnScript, text_of
from sglang_agent.simulate.settings import SimulationSettings
from sglang_agent.simulate.workers import WorkerPool
from sglang_agent.trajectory import Trajectory

# Stands for "no limit" where a gate wants a number.
_UNLIMITED = 1 << 30


class SimulationResult(NamedTuple):
    """What a simulated batch leaves: a trace like a live run's, and the workers' counters.

    ``timed_out`` says that the time limit ended the batch; the trajectories that were
    still active or waiting then are recorded as cancelled.
    """

    records: list[TrajectoryRecord]
    timed_out: bool
    pools: wire.Ready
    workers: list[wire.Statistics]


def simulate(
    scripts: Sequence[TrajectoryScript],
    settings: SimulationSettings,
    policy_factory: Callable[[Sequence[str]], RoutingPolicy],
    pool: WorkerPool,
    on_done: Callable[[TrajectoryRecord], None] = lambda _: None,
) -> SimulationResult:
    """Run ``scripts`` in submission order and return what happened.

    ``policy_factory`` builds the routing policy from the workers' names. Raises
    :class:`~sglang_agent.simulate.errors.SimulationError` with the cause when a worker
    fails.
    """
    clock = VirtualClock()
    with ExitStack() as cleanup:
        channels = [
            pool.start(settings.worker_config()) for _ in range(settings.workers)
        ]
        for channel in channels:
            cleanup.callback(channel.close)
        names = settings.names
        workers = [
            VirtualWorker(name, channel, clock)
            for name, channel in zip(names, channels, strict=True)
        ]
        for worker in workers:
            clock.add_source(worker)
        batch = _Batch(settings, clock, Fleet(workers, policy_factory(names)), on_done)
        timed_out = clock.run(batch.run(scripts))
        return SimulationResult(
            records=[batch.records[script.label] for script in scripts],
            timed_out=timed_out,
            pools=channels[0].ready,
            workers=[channel.stop() for channel in channels],
        )


class _Batch:
    """The agent side: both gates, and one task per trajectory."""

    def __init__(
        self,
        settings: SimulationSettings,
        clock: VirtualClock,
        fleet: Fleet,
        on_done: Callable[[TrajectoryRecord], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._fleet = fleet
        self._on_done = on_done
        self._admission = AdmissionGate(settings.sample_concurrency, clock=clock)
        self._actions = ActionScheduler(
            settings.env_concurrency or _UNLIMITED,
            settings.job_order,
            band_s=settings.caas_band_s,
            duration_bucket_s=settings.caas_duration_bucket_s,
            clock=clock,
        )
        self.records: dict[str, TrajectoryRecord] = {}

    async def run(self, scripts: Sequence[TrajectoryScript]) -> bool:
        """Run all; True when the time limit ended the batch."""
        try:
            async with (
                self._clock.timeout(self._settings.time_limit_s),
                asyncio.TaskGroup() as tasks,
            ):
                for script in scripts:
                    tasks.create_task(self._trajectory(script))
        except TimeoutError:
            return True
        except ExceptionGroup as group:
            # A worker's failure reaches every trajectory; one cause is enough.
            raise group.exceptions[0] from group
        return False

    async def _trajectory(self, script: TrajectoryScript) -> None:
        run = _TrajectoryRun(script, self._settings, self._clock)
        try:
            async with self._admission.admit(script.label) as admission:
                run.admitted_s = admission.admitted_s
                for turn in script.turns:
                    await self._turn(run, turn)
                    if turn.job is not None and not self._settings.bypass_environment:
                        await self._job(run, turn.job)
            self._keep(run, Outcome.COMPLETED)
        except RequestRefused as error:
            self._keep(run, Outcome.INFERENCE, str(error))
        except asyncio.CancelledError:
            self._keep(run, Outcome.CANCELLED, "the time limit was reached")
            raise
        self._fleet.forget(script.label)

    def _keep(
        self, run: _TrajectoryRun, outcome: Outcome, error: str | None = None
    ) -> None:
        record = run.record(outcome, error)
        self.records[record.label] = record
        self._on_done(record)

    async def _turn(self, run: _TrajectoryRun, turn: TurnScript) -> None:
        start_s = self._clock.now()
        overhead_s = self._settings.deployment.request_overhead_s
        if overhead_s > 0:
            await self._clock.sleep(overhead_s)
        request = run.next_request(turn)
        worker, finished = await self._fleet.complete(
            request, lambda: text_of(request.prompt)
        )
        end_s = self._clock.now()
        run.trajectory.complete_turn(end_s - start_s)
        run.stages.append(
            InferenceStage(
                turn=run.trajectory.turns,
                input_tokens=finished.input_tokens,
                output_tokens=finished.output_tokens,
                cached_tokens=finished.cached_tokens,
                start_s=start_s,
                first_token_s=finished.first_token_ns / NS,
                end_s=end_s,
                worker=worker,
            )
        )

    async def _job(self, run: _TrajectoryRun, job: Job) -> None:
        async with self._actions.slot(run.trajectory, server=job.server) as slot:
            await self._clock.sleep(job.duration_s)
            ended_s = self._clock.now()
        run.stages.append(
            EnvironmentStage(
                turn=run.trajectory.turns,
                operations=[],
                queued_s=slot.queued_s,
                started_s=slot.started_s,
                ended_s=ended_s,
                server=job.server,
            )
        )


class _TrajectoryRun:
    """One trajectory's context so far, and the stages it has been through."""

    def __init__(
        self,
        script: TrajectoryScript,
        settings: SimulationSettings,
        clock: VirtualClock,
    ) -> None:
        self._script = script
        self._max_new_tokens = settings.max_new_tokens
        self._clock = clock
        self._prompt: list[wire.Segment] = []
        self._submitted_s = clock.now()
        self.admitted_s = self._submitted_s
        self.trajectory = Trajectory(script.label)
        self.stages: list[Stage] = []

    def next_request(self, turn: TurnScript) -> wire.Request:
        """Extend the context by what the turn adds, and by what it will answer."""
        if turn.restart is not None:
            self._prompt = turn.restart
        prompt = [*self._prompt, turn.added]
        # The stop token that ends the answer stays in the context.
        self._prompt = [*prompt, turn.output, wire.STOP]
        exact = turn.output.length + 1
        limit = self._max_new_tokens
        return wire.Request(
            id=f"{self._script.label}.{self.trajectory.turns + 1}",
            label=self._script.label,
            arrival_ns=round(self._clock.now() * NS),
            prompt=prompt,
            output=turn.output,
            max_new_tokens=exact if limit is None else max(limit, exact),
            ignore_eos=limit is None,
        )

    def record(self, outcome: Outcome, error: str | None) -> TrajectoryRecord:
        """The finished line of the trace."""
        return TrajectoryRecord(
            label=self._script.label,
            sample_id=self._script.sample_id,
            submitted_s=self._submitted_s,
            admitted_s=self.admitted_s,
            ended_s=self._clock.now(),
            outcome=outcome,
            error=error,
            stages=self.stages,
        )
