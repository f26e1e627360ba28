"""Asks the prefix cache how much of a waiting request it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.common import match_kv_cache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


def prefix_hit(req: Req, tree_cache: BasePrefixCache) -> int:
    """Return the tokens of ``req`` that admission would find in the cache.

    As admission does, it matches all but the last token. Of prompts of 100,000 tokens
    every copy counts: none is made unless there is output already, or the last token
    ends a page.
    """
    token_ids = req.origin_input_ids
    if req.output_ids:
        token_ids = token_ids + req.output_ids
    limit = _needed_limit(
        len(token_ids),
        req._compute_max_prefix_len(len(token_ids)),
        tree_cache.page_size,
    )
    match_kv_cache(req, tree_cache, token_ids, max_prefix_len=limit)
    return req.num_matched_prefix_tokens


def _needed_limit(length: int, limit: int, page_size: int) -> int | None:
    """Return ``limit``, or None where no whole page lies between it and ``length``.

    Only whole pages match. A key of token pairs is one shorter than its tokens.
    """
    return None if (limit - 1) // page_size == length // page_size else limit
