"""An environment that does again, in time, what a recorded one did.

No tool runs: each job takes as long as it took when it was recorded and then gives
the recorded answers. With a virtual clock this costs no time at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_agent.clock import Clock, RealClock
from sglang_agent.environments.base import EnvironmentFailure
from sglang_agent.environments.config import parse
from sglang_agent.errors import UsageError
from sglang_agent.records import (
    EnvironmentStage,
    Message,
    Operation,
    OperationResult,
    ToolDefinition,
    TrajectoryRecord,
)
from sglang_agent.trace import read_trace


class RecordedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a ``recorded`` environment.

    ``trace`` is a run folder or a trace; ``sample`` the recorded sample to play
    (default: the one with the sample's own id). ``time_scale`` stretches durations.
    """

    trace: str
    sample: str | None = None
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.time_scale < 0:
            raise ValueError(f"time_scale: {self.time_scale:g}; must be 0 or more")


class RecordedEnvironment:
    """Plays the environment stages of one record in their order.

    ``operations`` need not be those recorded: a replayed model may say something
    else, and what counts is the time the job takes and what it adds to the context.
    """

    def __init__(
        self, record: TrajectoryRecord, clock: Clock, time_scale: float = 1.0
    ) -> None:
        self._record = record
        self._clock = clock
        self._time_scale = time_scale
        self._jobs = [s for s in record.stages if isinstance(s, EnvironmentStage)]
        self._played = 0

    async def open(self) -> Sequence[ToolDefinition]:
        """The recorded tools."""
        return self._record.tools or []

    def server_of(self, operations: Sequence[Operation]) -> str | None:
        """The server of the job that comes next."""
        return self._next().server if self._played < len(self._jobs) else None

    async def run(self, operations: Sequence[Operation]) -> Sequence[OperationResult]:
        """Wait as long as the recorded job took; then its answers, or its failure."""
        job = self._next()
        self._played += 1
        await self._clock.sleep((job.ended_s - job.started_s) * self._time_scale)
        if job.error is not None:
            raise EnvironmentFailure(f"recorded: {job.error}")
        answers = [_content(message) for message in job.response or []]
        missing = [""] * (len(operations) - len(answers))
        return [
            OperationResult(operation.id, text)
            for operation, text in zip(operations, [*answers, *missing], strict=False)
        ]

    async def close(self) -> None:
        """Nothing to release."""

    def _next(self) -> EnvironmentStage:
        if self._played == len(self._jobs):
            raise EnvironmentFailure(
                f"recorded sample {self._record.sample_id!r} has only "
                f"{len(self._jobs)} environment jobs"
            )
        return self._jobs[self._played]


class RecordedFactory:
    """Makes recorded environments; reads each trace once."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, TrajectoryRecord]] = {}

    def create(self, config: Mapping[str, Any], sample_id: str) -> RecordedEnvironment:
        """Find the sample's record, or raise ValueError naming what is missing."""
        settings = parse(config, RecordedConfig)
        records = self._read(settings.trace)
        wanted = settings.sample or sample_id
        if wanted not in records:
            raise ValueError(
                f"environment.sample is {wanted!r}: not in {settings.trace}, "
                f"which has {len(records)} samples"
            )
        return RecordedEnvironment(records[wanted], RealClock(), settings.time_scale)

    def _read(self, trace: str) -> dict[str, TrajectoryRecord]:
        if trace not in self._records:
            try:
                records = read_trace(Path(trace))
            except UsageError as error:
                raise ValueError(f"environment.trace: {error}") from error
            self._records[trace] = {record.sample_id: record for record in records}
        return self._records[trace]


FACTORY = RecordedFactory()


def _content(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
