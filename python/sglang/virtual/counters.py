"""What a virtual worker counts, and how it measures CPU time."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang.virtual.cost import NS, context_products
from sglang.virtual.protocol import Statistics


@dataclass
class Meter:
    """CPU and wall seconds spent in one function, and prompt tokens it looks up."""

    calls: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    tokens: int = 0
    inside: bool = False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, measured."""

        def metered(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            self.inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = False
                self.cpu_s += time.thread_time() - cpu
                self.wall_s += time.perf_counter() - wall
                self.calls += 1

        return metered

    def wrap_lookup(self, match_prefix: Callable[..., Any]) -> Callable[..., Any]:
        """``match_prefix``, counting what the measured function looks up."""

        def counted(params: Any) -> Any:
            if self.inside:
                self.tokens += len(params.key)
            return match_prefix(params)

        return counted


@dataclass
class Counters:
    """Sums over all passes; durations are virtual nanoseconds."""

    priority: Meter = field(default_factory=Meter)
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

    def statistics(self, engine: dict[str, Any]) -> Statistics:
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
            priority_calls=self.priority.calls,
            priority_tokens=self.priority.tokens,
            priority_cpu_s=self.priority.cpu_s,
            priority_wall_s=self.priority.wall_s,
            waiting_peak=self.waiting_peak,
            cpu_s=time.process_time(),
            peak_memory_bytes=peak_kib * 1024,
            engine=engine,
        )
