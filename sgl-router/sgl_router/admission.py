"""How many requests run at once, how many wait, and how fast new ones start."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from sgl_router.wire.errors import MessageError

if TYPE_CHECKING:
    from sgl_router.exchange import Exchange


class Admission:
    """A limit on running requests with a first-come queue, and a token bucket.

    Args:
        max_concurrent: requests that run at once; -1 for no limit.
        queue_size: requests that may wait; further ones get 429 at once.
        queue_timeout_s: longest wait; then 503.
        rate: requests a second that may start, 0 for no limit; short bursts of up to
            ``max_concurrent`` (or one second's worth) are allowed.
    """

    def __init__(
        self,
        max_concurrent: int = -1,
        queue_size: int = 100,
        queue_timeout_s: float = 60.0,
        rate: float = 0.0,
    ) -> None:
        self.max_concurrent = max_concurrent if max_concurrent > 0 else math.inf
        self.queue_size = queue_size
        self.queue_timeout_s = queue_timeout_s
        self.rate = rate
        self.running = 0
        self.outcomes: Counter[str] = Counter()
        self._burst = max_concurrent if max_concurrent > 0 else max(1.0, rate)
        self._tokens = float(self._burst)
        self._refilled_s: float | None = None
        self._waiting: OrderedDict[Exchange, float] = OrderedDict()
        self._advancing = False

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def enter(self, exchange: Exchange) -> bool:
        """True when ``exchange`` may start now; else it is queued or refused."""
        if not self._waiting and self._take(exchange.started_s):
            return True
        if len(self._waiting) >= self.queue_size:
            self.outcomes["rejected"] += 1
            exchange.refuse(
                MessageError(429, "queue_full", "gateway: too many requests; try again")
            )
            return False
        self.outcomes["queued"] += 1
        self._waiting[exchange] = exchange.last_received_s
        return False

    def leave(self, exchange: Exchange, now_s: float) -> None:
        """``exchange`` has ended, whether it was running or still waiting."""
        if exchange.admitted:
            self.running -= 1
        else:
            self._waiting.pop(exchange, None)
        if self._waiting:
            self.advance(now_s)

    def advance(self, now_s: float) -> None:
        """Time out those that waited too long and start those that may."""
        if self._advancing:  # one that was started has ended at once
            return
        self._advancing = True
        try:
            self._advance(now_s)
        finally:
            self._advancing = False

    def _advance(self, now_s: float) -> None:
        while self._waiting:
            exchange, since_s = next(iter(self._waiting.items()))
            if now_s - since_s >= self.queue_timeout_s:
                del self._waiting[exchange]
                self.outcomes["timed_out"] += 1
                text = "gateway: waited too long for a free slot; try again"
                exchange.refuse(MessageError(503, "queue_timeout", text))
            elif self._take(now_s):
                del self._waiting[exchange]
                exchange.start()
            else:
                return

    def _take(self, now_s: float) -> bool:
        if self.running >= self.max_concurrent:
            return False
        if self.rate:
            since_s = now_s if self._refilled_s is None else self._refilled_s
            grown = self._tokens + max(0.0, now_s - since_s) * self.rate
            self._tokens = min(self._burst, grown)
            self._refilled_s = max(since_s, now_s)
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
        self.running += 1
        self.outcomes["admitted"] += 1
        return True
