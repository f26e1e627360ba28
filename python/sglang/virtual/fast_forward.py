"""Many decode passes at once, whenever the scheduler could not choose otherwise.

Between two events a decode batch only repeats itself: every request gets one more
token. :func:`passes_ahead` says for how many passes that is certain, and
:func:`decode_ahead` brings the scheduler's books to where that many passes would have
brought them. The real loop still does each pass that can change a choice: the one that
finishes a request, evicts, retracts, crosses a state checkpoint, or is the first after
an arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import get_exec, mamba_track_grid

from sglang.virtual.script import script_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

MAX_PASSES = 4096


def passes_ahead(scheduler: Scheduler, batch: ScheduleBatch) -> int:
    """How many further passes of this decode batch hold no surprise."""
    if scheduler.chunked_req is not None:
        return 0
    if scheduler.waiting_queue and not scheduler.running_batch.batch_is_full:
        return 0
    reqs = batch.reqs
    limit = min(script_of(req).remaining(req) for req in reqs) - 1
    limit = min(limit, MAX_PASSES, _kv_room(scheduler, reqs))
    if get_exec().mamba.enable_mamba_extra_buffer:
        grid = mamba_track_grid(scheduler.tree_cache.page_size)
        limit = min(limit, min(grid - 1 - r.kv.kv_committed_len % grid for r in reqs))
    return max(0, limit)


def _kv_room(scheduler: Scheduler, reqs: Sequence[Req]) -> int:
    """Passes that fit without touching the tree, one page in hand per request.

    Eviction order depends on what is asked for at once, so it is left to real passes.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    page = allocator.page_size
    spare = allocator.available_size() - 2 * page * len(reqs)
    return spare // len(reqs) // page * page if page > 1 else spare // len(reqs)


def decode_ahead(scheduler: Scheduler, batch: ScheduleBatch, passes: int) -> None:
    """Do the bookkeeping of ``passes`` decode passes of ``batch``."""
    slots = _allocate(scheduler, batch, passes)
    rows = batch.req_pool_indices[:, None]
    columns = batch.seq_lens[:, None] + torch.arange(passes)
    batch.req_to_token_pool.write((rows, columns), slots.to(torch.int32))
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
