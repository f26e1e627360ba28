"""Attention of a prefill batch over a paged cache, in plain torch.

SGLang's torch_native backend pads the queries of a resumed request with its whole
prefix and throws that part of the result away. Here only the new tokens are
computed, with a causal mask that is shifted by the prefix.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

#: New tokens per attention call; bounds the mask and the score matrix.
QUERY_BLOCK = 512


def _visible(
    start: int, stop: int, length: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Mask [stop - start, length]: which keys the queries at those places see."""
    query = torch.arange(start, stop, device=device).unsqueeze(1)
    key = torch.arange(length, device=device)
    mask = key <= query
    if window is not None and window > -1:
        mask &= key >= query - window
    return mask


def run_extend(
    _backend: object,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Fill ``output`` [tokens, heads, V] for ``query`` [tokens, heads, K].

    The tokens of all requests are packed; ``k_cache`` and ``v_cache`` are
    [slots, kv_heads, ...], ``req_to_token`` [requests, positions] maps a position
    to its slot. Encoder-decoder models are not offered on this platform.
    """
    if encoder_lens is not None or is_cross_attn:
        raise NotImplementedError("cross attention does not run on this platform")
    done = 0
    for row, length, prefix, count in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_prefix_lens.tolist(),
        extend_seq_lens.tolist(),
        strict=True,
    ):
        slots = req_to_token[row, :length]
        keys = k_cache[slots].transpose(0, 1).to(query.dtype)
        values = v_cache[slots].transpose(0, 1).to(query.dtype)
        for start in range(0, count, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, count)
            seen = prefix + stop if causal else length
            mask = None
            if causal:
                mask = _visible(
                    prefix + start, seen, seen, sliding_window_size, query.device
                )
            part = scaled_dot_product_attention(
                query[done + start : done + stop].transpose(0, 1).unsqueeze(0),
                keys[:, :seen].unsqueeze(0),
                values[:, :seen].unsqueeze(0),
                attn_mask=mask,
                enable_gqa=enable_gqa,
                scale=scaling,
            )
            output[done + start : done + stop] = part.squeeze(0).transpose(0, 1)
        done += count
    return output
