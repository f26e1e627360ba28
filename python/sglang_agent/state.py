"""Where every active sample is right now; what the views and watchdogs look at."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

from sglang_agent.clock import Clock


class Stage(StrEnum):
    """What an active sample is doing."""

    OPENING = "opening"
    INFERENCE = "inference"
    QUEUED = "queued"
    BACKOFF = "backoff"
    ENVIRONMENT = "environment"
    SCORING = "scoring"
    CLOSING = "closing"


class ActiveSample(NamedTuple):
    """One active sample: its stage, since when (s), and how many turns it has done."""

    label: str
    sample_id: str
    stage: Stage
    since_s: float
    turns: int


class BatchState:
    """Counts and stages of a running batch. Not thread-safe: the event loop's own."""

    def __init__(self, total: int, restored: int, clock: Clock) -> None:
        self.total = total
        self.restored = restored
        self.clock = clock
        self.started_s = clock.now()
        self.last_event_s = self.started_s
        self.turns = 0
        self.outcomes: Counter[str] = Counter()
        self.finished = 0
        self._active: dict[str, ActiveSample] = {}
        self._stages: Counter[Stage] = Counter()

    def move(self, label: str, sample_id: str, stage: Stage) -> None:
        """Note that a sample entered ``stage``."""
        now_s = self.clock.now()
        before = self._active.get(label)
        turns = 0
        if before is not None:
            self._stages[before.stage] -= 1
            turns = before.turns
            if before.stage is Stage.INFERENCE and stage is not Stage.CLOSING:
                turns += 1
                self.turns += 1
        self._stages[stage] += 1
        self._active[label] = ActiveSample(label, sample_id, stage, now_s, turns)
        self.last_event_s = now_s

    def finish(self, label: str, outcome: str) -> None:
        """Note that a sample is over and recorded."""
        sample = self._active.pop(label, None)
        if sample is not None:
            self._stages[sample.stage] -= 1
        self.outcomes[outcome] += 1
        self.finished += 1
        self.last_event_s = self.clock.now()

    def drop(self, label: str) -> None:
        """Forget a sample that was interrupted before it ended."""
        sample = self._active.pop(label, None)
        if sample is not None:
            self._stages[sample.stage] -= 1

    def count(self, stage: Stage) -> int:
        return self._stages[stage]

    @property
    def active(self) -> int:
        return len(self._active)

    def oldest(self, count: int) -> list[ActiveSample]:
        """Return the active samples that have been longest in their stage."""
        return sorted(self._active.values(), key=lambda s: (s.since_s, s.label))[:count]

    def eta_s(self) -> float | None:
        """Return the seconds left at this attempt's own rate; None when unknown.

        Restored samples took no time now and do not count as done by this attempt.
        """
        elapsed_s = self.clock.now() - self.started_s
        left = self.total - self.restored - self.finished
        if left <= 0:
            return 0.0
        if not self.finished or elapsed_s <= 0:
            return None
        return left * elapsed_s / self.finished
