"""Signs that the cache does not do its work; nothing else would show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sglang_agent.records import InferenceStage, TrajectoryRecord
from sglang_agent.report.stages import inferences

FLAT_TURNS = 50
LEAST_REQUESTS = 10
_QUESTION = (
    "do the workers report cached tokens (--enable-cache-report), and does the cached "
    "state cover the shared prefix?"
)


class FlatReuse:
    """Notices a worker whose cached-token counter has stopped growing.

    Fed with every finished turn, in the order they end. Turns after a trajectory's
    first share a prefix with the turn before, so ``limit`` of them in a row without
    one cached token mean that reuse has stopped, however healthy the rest looks.
    """

    def __init__(self, limit: int = FLAT_TURNS) -> None:
        self._limit = limit
        self._flat: dict[str | None, int] = defaultdict(int)
        self._worked: set[str | None] = set()
        self.alarms = 0

    def observe(self, stage: InferenceStage) -> str | None:
        """Count one turn; the alarm's line at the moment it is raised."""
        if stage.turn < 2:
            return None
        if stage.cached_tokens > 0:
            self._flat[stage.worker] = 0
            self._worked.add(stage.worker)
            return None
        self._flat[stage.worker] += 1
        if self._flat[stage.worker] != self._limit:
            return None
        self.alarms += 1
        return self._line(stage.worker)

    def _line(self, worker: str | None) -> str:
        turns = (
            f"no cached token in {self._limit} turns in a row that continue a context"
        )
        if worker in self._worked:
            return f"cache reuse has stopped on worker {worker or 'unknown'}: {turns}"
        return f"no cache reuse on worker {worker or 'unknown'}: {turns}; {_QUESTION}"


def flat_reuse(records: Sequence[TrajectoryRecord]) -> list[str]:
    """The alarms that :class:`FlatReuse` would have raised during the run."""
    watch = FlatReuse()
    turns = sorted(inferences(records), key=lambda stage: stage.end_s)
    return [line for line in map(watch.observe, turns) if line]


def broken_reuse(records: Sequence[TrajectoryRecord]) -> str | None:
    """Says from which turn on no request of the batch found anything cached."""
    requests: dict[int, int] = defaultdict(int)
    cached: dict[int, int] = defaultdict(int)
    for stage in inferences(records):
        requests[stage.turn] += 1
        cached[stage.turn] += stage.cached_tokens
    broken: list[int] = []
    for turn in sorted(requests, reverse=True):
        if turn < 2 or cached[turn] > 0:
            break
        broken.append(turn)
    count = sum(requests[turn] for turn in broken)
    if count < LEAST_REQUESTS:
        return None
    return (
        f"broken reuse: 0 cached tokens in all {count} requests from turn {broken[-1]} "
        f"on; {_QUESTION}"
    )
