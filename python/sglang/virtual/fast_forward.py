"""Many decode passes at once, whenever the scheduler could not choose otherwise.

Between two events a decode batch only repeats itself: every request gets one more
token. :func:`passes_ahead` says for how many passes that is certain, and
:func:`decode_ahead` brings the scheduler's books to where that many passes would have
brought them. The real loop still does each pass that can change a choice: the one that
finishes a request, retracts, or is the first after an arrival. What a pass evicts is
evicted on the way, and a state checkpoint swaps a request's two tracking slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.runtime_context import get_exec, mamba_track_grid

from sglang.virtual.script import script_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

MAX_PASSES = 4096


def passes_ahead(scheduler: Scheduler, batch: ScheduleBatch) -> int:
    """How many further passes of this decode batch hold no surprise, memory apart."""
    if scheduler.chunked_req is not None:
        return 0
    if scheduler.waiting_queue and not scheduler.running_batch.batch_is_full:
        return 0
    remaining = min(script_of(req).remaining(req) for req in batch.reqs)
    return max(0, min(remaining - 1, MAX_PASSES))


def decode_ahead(scheduler: Scheduler, batch: ScheduleBatch, passes: int) -> int:
    """Do the bookkeeping of up to ``passes`` decode passes of ``batch``.

    Returns how many were done: the one that would retract is left to the real loop.
    """
    passes = _make_room(scheduler, batch, passes)
    if passes == 0:
        return 0
    slots = _allocate(scheduler, batch, passes)
    rows = batch.req_pool_indices[:, None]
    columns = batch.seq_lens[:, None] + torch.arange(passes)
    batch.req_to_token_pool.write((rows, columns), slots.to(torch.int32))
    if get_exec().mamba.enable_mamba_extra_buffer:
        grid = mamba_track_grid(scheduler.tree_cache.page_size)
        for req in batch.reqs:
            _pass_checkpoints(batch, req, passes, grid)
    for req in batch.reqs:
        req.kv.kv_allocated_len += passes
        req.kv.kv_committed_len += passes
        req.decode_batch_idx += passes
        req.output_ids.extend(script_of(req).next_tokens(req, passes))
    batch.seq_lens = batch.seq_lens + passes
    batch.seq_lens_cpu = batch.seq_lens_cpu + passes
    batch.orig_seq_lens = batch.orig_seq_lens + passes
    batch.seq_lens_sum = None
    for _ in range(passes):
        scheduler.new_token_ratio_tracker.decay_step()
    scheduler.forward_ct += passes
    return passes


def _make_room(scheduler: Scheduler, batch: ScheduleBatch, passes: int) -> int:
    """Evict what each pass would have evicted, in order; how many passes then fit.

    A pass first asks for the pages it needs (and retracts if they cannot be had), then
    for one page per request, needed or not.
    """
    tree = scheduler.tree_cache
    allocator = tree.token_to_kv_pool_allocator
    page = allocator.page_size
    ample = len(batch.reqs) * page
    free, taken = allocator.available_size(), 0
    for done, pages in enumerate(_new_pages(batch, page, passes)):
        need = pages * page
        for wanted in (need, ample):
            if free < wanted:
                evict_from_tree_cache(tree, taken + wanted)
                free = allocator.available_size() - taken
            if free < need:
                return done
        taken += need
        free -= need
    return passes


def _new_pages(batch: ScheduleBatch, page: int, passes: int) -> list[int]:
    """How many requests begin a page, pass by pass."""
    begins = np.zeros(passes, dtype=np.int64)
    for length in batch.seq_lens_cpu.tolist():
        begins[-length % page :: page] += 1
    return begins.tolist()


def _pass_checkpoints(batch: ScheduleBatch, req: Req, passes: int, grid: int) -> None:
    """Which tracking slot holds which checkpoint after ``passes`` more tokens."""
    kv = req.kv
    first = kv.kv_committed_len // grid + 1
    last = (kv.kv_committed_len + passes) // grid
    for place in range(first, last + 1):
        kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
        kv.mamba_last_track_seqlen = place * grid
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = batch.req_to_token_pool.get_mamba_ping_pong_other_idx(
            kv.mamba_next_track_idx
        )


def _allocate(scheduler: Scheduler, batch: ScheduleBatch, passes: int) -> torch.Tensor:
    """KV slots for every request and pass, shape (requests, passes)."""
    allocator = scheduler.token_to_kv_pool_allocator
    count = len(batch.reqs)
    if allocator.page_size == 1:
        slots = allocator.alloc(count * passes)
    else:
        before = batch.seq_lens_cpu
        last = batch.req_to_token_pool.req_to_token[
            batch.req_pool_indices, batch.seq_lens - 1
        ]
        slots = allocator.alloc_extend(
            batch.seq_lens,
            before,
            batch.seq_lens + passes,
            before + passes,
            last,
            count * passes,
        )
    if slots is None:
        raise RuntimeError(
            f"fast-forward of {passes} passes x {count} requests does not fit, "
            f"{allocator.available_size()} KV tokens are free"
        )
    return slots.view(count, passes)
