"""How long to wait before trying again: exponential, with full jitter above a floor."""

from __future__ import annotations

import random


class Backoff:
    """Delays between half and one and a half times ``base_s`` doubled per attempt.

    One seeded generator serves all callers of a run, so the retries of jobs that
    failed together spread over a whole ``base_s`` instead of forming a herd.
    """

    def __init__(self, base_s: float, max_s: float, seed: int = 0) -> None:
        self.base_s = base_s
        self.max_s = max_s
        self._random = random.Random(seed)

    def delay_s(self, attempt: int, at_least_s: float = 0.0) -> float:
        """Return the wait after failed attempt number ``attempt``, from 1.

        ``at_least_s`` is what the other side asked for; jitter is added to it.
        """
        spread_s = min(self.max_s, self.base_s * 2.0 ** (attempt - 1))
        jitter = self._random.random()
        if at_least_s > 0.0:
            return at_least_s + jitter * self.base_s
        return spread_s * (0.5 + jitter)
