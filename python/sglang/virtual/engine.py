"""The event loop of a virtual worker: real scheduling passes, invented durations."""

from __future__ import annotations

import ctypes
import ctypes.util
import heapq
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.runtime_context import get_schedule

from sglang.virtual import fast_forward
from sglang.virtual.boot import boot
from sglang.virtual.cost import PassCost
from sglang.virtual.counters import Counters
from sglang.virtual.priority import PriorityMeter
from sglang.virtual.protocol import (
    Finished,
    Progress,
    Ready,
    Request,
    Statistics,
    WorkerConfig,
)
from sglang.virtual.script import Script, script_of
from sglang.virtual.tokens import PromptBuilder, tokens_of

# Finished requests leave holes that glibc does not give back by itself.
_TRIM_EVERY_REQUESTS = 160


class VirtualEngine:
    """One scheduler, its virtual clock and its counters."""

    def __init__(self, config: WorkerConfig, cleanup: ExitStack) -> None:
        self._config = config
        self._cost = PassCost(config.cost)
        self._counters = Counters()
        self._priority = PriorityMeter(self._cost, lambda: self._counters.passes)
        self._prompts = PromptBuilder()
        self._arrivals: list[tuple[int, int, Request]] = []
        self._sequence = itertools.count()
        self._now_ns = 0
        self._nothing_to_run = True
        self._scheduler = boot(config, cleanup)
        self._priority.attach(self._scheduler.policy)
        self._libc = ctypes.CDLL(ctypes.util.find_library("c"))

    # -- what the protocol asks for ---------------------------------------------

    def ready(self) -> Ready:
        """The pools, as the engine built them."""
        scheduler = self._scheduler
        return Ready(
            kv_tokens=scheduler.max_total_num_tokens,
            state_slots=scheduler.req_to_token_pool.mamba_allocator.size,
            max_running_requests=scheduler.max_running_requests,
            ratio=get_schedule().mamba_full_memory_ratio,
            step_floor_ns=self._cost.floor_ns,
        )

    def advance(
        self, until_ns: int, requests: Sequence[Request], forget: Sequence[str]
    ) -> Progress:
        """See :class:`sglang.virtual.protocol.Advance`."""
        for request in requests:
            heapq.heappush(
                self._arrivals, (request.arrival_ns, next(self._sequence), request)
            )
        for label in forget:
            self._prompts.forget(label)
        finished: list[Finished] = []
        with torch.no_grad():
            while not finished and self._catch_up(until_ns):
                finished = self._step(until_ns)
        return Progress(
            now_ns=self._now_ns,
            quiet_until_ns=self._quiet_until_ns(),
            waiting=len(self._scheduler.waiting_queue),
            running=len(self._scheduler.running_batch.reqs),
            finished=finished,
        )

    def statistics(self) -> Statistics:
        """Counters so far."""
        seconds = self._scheduler.policy.priority_seconds
        return self._counters.statistics(
            self._priority, seconds, self._engine_counters()
        )

    def check_idle(self) -> None:
        """Run the scheduler's own leak checks (they raise), unless work is left."""
        if self._nothing_to_run:
            with torch.no_grad():
                self._scheduler.on_idle()

    # -- one turn of the loop ----------------------------------------------------

    def _catch_up(self, until_ns: int) -> bool:
        """Take due arrivals in; False when no pass may start before ``until_ns``."""
        if self._nothing_to_run:
            if not self._arrivals or self._arrivals[0][0] >= until_ns:
                return False
            self._sleep_until(self._arrivals[0][0])
        if self._now_ns >= until_ns:
            return False
        while self._arrivals and self._arrivals[0][0] <= self._now_ns:
            self._submit(heapq.heappop(self._arrivals)[2])
        return True

    def _sleep_until(self, moment_ns: int) -> None:
        if moment_ns > self._now_ns:
            self._scheduler.on_idle()
            self._now_ns = moment_ns
        self._nothing_to_run = False

    def _submit(self, request: Request) -> None:
        tokens = self._prompts.build(request.label, request.prompt)
        script = Script(tokens_of(request.output), request.arrival_ns)
        self._scheduler.submit(request, tokens, script)

    def _step(self, until_ns: int) -> list[Finished]:
        """One iteration of the event loop, and the passes that merely repeat it."""
        scheduler = self._scheduler
        self._counters.waiting_peak = max(
            self._counters.waiting_peak, len(scheduler.waiting_queue)
        )
        batch = scheduler.next_batch()
        self._now_ns += self._priority.take_ns()
        if batch:
            self._run(batch)
        self._nothing_to_run = not batch
        scheduler.last_batch = batch
        if self._config.check_every_step:
            scheduler.invariant_checker.self_check_during_busy()
        finished = [self._record(req) for req in scheduler.take_finished()]
        if batch and not finished and batch.forward_mode.is_decode():
            self._fast_forward(batch, until_ns)
        return finished

    def _run(self, batch: ScheduleBatch) -> None:
        if batch.forward_mode.is_decode():
            count = len(batch.reqs)
            context = _context_tokens(batch)
            duration_ns = self._cost.decode_ns(count, context)
            self._counters.decode(1, count, context, duration_ns)
        else:
            pairs = list(zip(batch.extend_lens, batch.prefix_lens, strict=True))
            duration_ns = self._cost.prefill_ns(pairs)
            self._counters.prefill(pairs, duration_ns)
        reqs = list(batch.reqs)
        result = self._scheduler.run_batch(batch)
        self._now_ns += duration_ns
        self._scheduler.process_batch_result(batch, result)
        for req in reqs:
            script = script_of(req)
            if script.first_token_ns is None and len(req.output_ids) > 0:
                script.first_token_ns = self._now_ns

    def _fast_forward(self, batch: ScheduleBatch, until_ns: int) -> None:
        if not self._config.fast_forward:
            return
        limit_ns = min(until_ns, self._arrivals[0][0] if self._arrivals else until_ns)
        passes = fast_forward.passes_ahead(self._scheduler, batch)
        if passes < 1 or self._now_ns >= limit_ns:
            return
        count = len(batch.reqs)
        # The books still show the pass that has just run: one token less a request.
        context = _context_tokens(batch) + count
        ends = self._now_ns + np.cumsum(
            self._cost.decode_series_ns(count, context, passes)
        )
        # A pass starts when the one before it ends, and only before the limit.
        passes = 1 + int(np.searchsorted(ends[:-1], limit_ns, side="left"))
        passes = fast_forward.decode_ahead(self._scheduler, batch, passes)
        if passes == 0:
            return
        end_ns = int(ends[passes - 1])
        self._counters.decode(passes, count, context, end_ns - self._now_ns)
        self._counters.fast_forwarded_passes += passes
        self._now_ns = end_ns

    def _record(self, req: Req) -> Finished:
        counters = self._counters
        counters.finished += 1
        counters.retractions += req.retraction_count
        if counters.finished % _TRIM_EVERY_REQUESTS == 0:
            self._libc.malloc_trim(0)
        script = script_of(req)
        reason = req.finished_reason or req.to_finish
        return Finished(
            id=req.rid,
            input_tokens=len(req.origin_input_ids),
            output_tokens=len(req.output_ids),
            cached_tokens=req.cached_tokens,
            arrival_ns=script.arrival_ns,
            first_token_ns=script.first_token_ns or self._now_ns,
            finished_ns=self._now_ns,
            retractions=req.retraction_count,
            error=reason.message if isinstance(reason, FINISH_ABORT) else None,
        )

    def _quiet_until_ns(self) -> int | None:
        floor_ns = self._cost.floor_ns
        # A pass that is under way ends before the next arrival is looked at.
        moments = [
            max(self._now_ns, arrival_ns) + floor_ns
            for arrival_ns, _, _ in self._arrivals[:1]
        ]
        passes = self._scheduler.shortest_remaining()
        if passes is not None and not self._nothing_to_run:
            moments.append(self._now_ns + passes * floor_ns)
        return min(moments, default=None)

    def _engine_counters(self) -> dict[str, Any]:
        """What our own policy counts about itself, if it is the active one."""
        routing_prefix = self._scheduler.policy.routing_prefix
        if routing_prefix is None:
            return {}
        return {"routing_prefix": routing_prefix.snapshot()}


def _context_tokens(batch: ScheduleBatch) -> int:
    return int(batch.seq_lens_cpu.sum())
