"""A batch of samples through both gates, each finished one handed on at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from sglang_agent.admission import AdmissionGate
from sglang_agent.records import TrajectoryRecord
from sglang_agent.sample import SamplePlan, SampleRunner, Services

Sink = Callable[[SamplePlan, TrajectoryRecord], Awaitable[None]]
"""Takes a finished sample; the sample counts as done when it returns."""


async def run_batch(
    plans: Iterable[SamplePlan],
    services: Services,
    admission: AdmissionGate,
    sink: Sink,
) -> None:
    """Run all plans, admitted in their order, and return when the last is done.

    When cancelled, running samples are stopped, their environments closed, and none
    of them reaches the sink. An error of the sink ends the batch and is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for plan in plans:
                group.create_task(_run_one(plan, services, admission, sink))
    except BaseExceptionGroup as errors:
        # All fail for one reason (the disk is full); one is enough to tell.
        raise errors.exceptions[0] from None


async def _run_one(
    plan: SamplePlan, services: Services, admission: AdmissionGate, sink: Sink
) -> None:
    submitted_s = services.state.clock.now()
    try:
        async with admission.admit(plan.label) as stay:
            record = await SampleRunner(plan, services).run(
                submitted_s, stay.admitted_s
            )
    except asyncio.CancelledError:
        services.state.drop(plan.label)
        raise
    await sink(plan, record)
    services.state.finish(plan.label, record.outcome.value)
