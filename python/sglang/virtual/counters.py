"""What a virtual worker counts."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

from sglang.virtual.cost import NS, context_products
from sglang.virtual.priority import PriorityMeter
from sglang.virtual.protocol import Statistics


@dataclass
class Counters:
    """Sums over all passes; durations are virtual nanoseconds."""

    prefill_passes: int = 0
    decode_passes: int = 0
    fast_forwarded_passes: int = 0
    prefill_tokens: int = 0
    prefill_context_products: float = 0.0
    decode_request_steps: int = 0
    decode_context_steps: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    finished: int = 0
    retractions: int = 0
    waiting_peak: int = 0

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        return self.prefill_passes + self.decode_passes

    def prefill(self, pairs: list[tuple[int, int]], duration_ns: int) -> None:
        """Count one prefill pass; pairs of (new tokens, tokens before them)."""
        self.prefill_passes += 1
        self.prefill_tokens += sum(new for new, _ in pairs)
        self.prefill_context_products += context_products(pairs)
        self.prefill_ns += duration_ns

    def decode(
        self, passes: int, requests: int, first_context_tokens: int, duration_ns: int
    ) -> None:
        """Count ``passes`` decode passes in a row, of ``requests`` each."""
        steps = passes * requests
        self.decode_passes += passes
        self.decode_request_steps += steps
        self.decode_context_steps += (
            passes * first_context_tokens + steps * (passes - 1) // 2
        )
        self.decode_ns += duration_ns

    def statistics(
        self, priority: PriorityMeter, priority_cpu_s: float, engine: dict[str, Any]
    ) -> Statistics:
        """The counters as they go over the wire."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Statistics(
            prefill_passes=self.prefill_passes,
            decode_passes=self.decode_passes,
            fast_forwarded_passes=self.fast_forwarded_passes,
            prefill_tokens=self.prefill_tokens,
            prefill_seconds=self.prefill_ns / NS,
            decode_seconds=self.decode_ns / NS,
            prefill_context_products=self.prefill_context_products,
            decode_request_steps=self.decode_request_steps,
            decode_context_steps=self.decode_context_steps,
            finished=self.finished,
            retractions=self.retractions,
            priority_calls=priority.calls,
            priority_waiting_tokens=round(priority.waiting_tokens),
            priority_tokens=round(priority.lookup_tokens),
            priority_walked_tokens=round(priority.walked_tokens),
            priority_seconds=priority.charged_ns / NS,
            priority_cpu_s=priority_cpu_s,
            waiting_peak=self.waiting_peak,
            cpu_s=time.process_time(),
            peak_memory_bytes=peak_kib * 1024,
            engine=engine,
        )
