"""Circuit breaker of one worker; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CircuitState(StrEnum):
    """``closed`` takes requests, ``open`` takes none, ``half_open`` is on trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a circuit opens and closes.

    Attributes:
        failure_threshold: consecutive failures that open it; 0 never opens it.
        success_threshold: consecutive successes on trial that close it.
        open_s: seconds an open circuit waits before its trial.
        window_s: failures further apart than this do not add up.
    """

    failure_threshold: int = 10
    success_threshold: int = 3
    open_s: float = 60.0
    window_s: float = 120.0


class CircuitBreaker:
    """Counts outcomes of requests; a busy answer (429) is neither good nor bad."""

    __slots__ = ("_failures", "_last_failure_s", "_opened_s", "_successes", "settings")

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self._failures = 0
        self._successes = 0
        self._last_failure_s = 0.0
        self._opened_s: float | None = None

    @property
    def consecutive_failures(self) -> int:
        """Failures since the last success."""
        return self._failures

    def state(self, now_s: float) -> CircuitState:
        """The state at ``now_s``."""
        if self._opened_s is None:
            return CircuitState.CLOSED
        if now_s - self._opened_s < self.settings.open_s:
            return CircuitState.OPEN
        return CircuitState.HALF_OPEN

    def record_success(self, now_s: float) -> None:
        """A request was answered; on trial enough of these close the circuit."""
        self._failures = 0
        if self.state(now_s) is CircuitState.HALF_OPEN:
            self._successes += 1
            if self._successes >= self.settings.success_threshold:
                self.reset()

    def record_failure(self, now_s: float) -> None:
        """A request failed; enough in a row, or one on trial, open the circuit."""
        if now_s - self._last_failure_s > self.settings.window_s:
            self._failures = 0
        self._last_failure_s = now_s
        self._failures += 1
        threshold = self.settings.failure_threshold
        on_trial = self.state(now_s) is CircuitState.HALF_OPEN
        if on_trial or (
            self._opened_s is None and threshold and self._failures >= threshold
        ):
            self._opened_s = now_s
            self._successes = 0

    def reset(self) -> None:
        """Close the circuit and forget what was counted."""
        self._failures = self._successes = 0
        self._opened_s = None
