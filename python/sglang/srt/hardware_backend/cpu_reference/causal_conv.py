"""Depthwise causal convolution with a per-request window, in plain torch.

The window pool is ``[slots, dim, width - 1]``, newest input last. Callers may pass
transposed views; everything here indexes slots first and never assumes strides.
"""

import torch
import torch.nn.functional as F


def _activate(x: torch.Tensor, activation: bool | str | None) -> torch.Tensor:
    if activation is True or activation in ("silu", "swish"):
        return F.silu(x)
    if activation in (None, False):
        return x
    raise ValueError(f"activation: {activation!r} is not one of silu, swish, None")


def _convolve(
    padded: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``padded`` [T + width - 1, dim], ``weight`` [dim, width] -> [T, dim]."""
    width = weight.shape[1]
    length = padded.shape[0] - width + 1
    taps = weight.t().to(padded.dtype)
    out = padded[:length] * taps[0]
    for i in range(1, width):
        out.addcmul_(padded[i : i + length], taps[i])
    return out if bias is None else out + bias.to(out.dtype)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: bool | str | None = "silu",
    pad_slot_id: int = -1,
    **_: object,
) -> torch.Tensor:
    """Prefill of sequences packed along the last axis of ``x`` [dim, T].

    Sequence i starts from the window at slot ``cache_indices[i]`` where
    ``has_initial_state[i]``, else from zeros; the slot receives its last
    ``width - 1`` inputs. Rows with slot ``pad_slot_id`` give zero. Returns
    [dim, T], a transposed view of a token-major result.
    """
    del query_start_loc  # seq_lens_cpu says the same without a copy
    tokens = x.t()
    out = torch.zeros(tokens.shape, dtype=x.dtype, device=x.device)
    state_len = weight.shape[1] - 1
    count = len(seq_lens_cpu)
    slots = range(count) if cache_indices is None else cache_indices.tolist()
    resumed = [False] * count
    if has_initial_state is not None:
        resumed = has_initial_state.tolist()
    start = 0
    for length, slot, resume in zip(seq_lens_cpu, slots, resumed, strict=False):
        part = tokens[start : start + length].float()
        start += length
        if slot == pad_slot_id or length == 0:
            continue
        window = part.new_zeros(state_len, part.shape[1])
        if resume:
            window.copy_(conv_states[slot].t())
        padded = torch.cat((window, part))
        result = _activate(_convolve(padded, weight, bias), activation)
        out[start - length : start] = result.to(out.dtype)
        conv_states[slot] = padded[-state_len:].t().to(conv_states.dtype)
    return out.t()


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    **unsupported: object,
) -> torch.Tensor:
    """One token ``x`` [B, dim] for each of B requests; windows move by one.

    Rows with slot ``pad_slot_id`` give zero. Circular windows and speculative
    verification are not offered on this platform. Returns [B, dim].
    """
    given = [
        name
        for name, value in unsupported.items()
        if value not in (None, False) and name != "metadata"
    ]
    if cache_seqlens is not None or given or x.dim() != 2:
        raise NotImplementedError(
            f"only single-token updates run on this platform (got {given or 'other'})"
        )
    if conv_state_indices is None:
        slots = torch.arange(x.shape[0], device=x.device)
    else:
        slots = conv_state_indices.long()
    live = slots != pad_slot_id
    rows = torch.where(live, slots, 0)
    window = torch.cat((conv_state[rows].float(), x.float().unsqueeze(-1)), dim=-1)
    out = (window * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    out = _activate(out, activation)
    if bool(live.all()):
        conv_state[rows] = window[..., 1:].to(conv_state.dtype)
    else:
        conv_state[rows[live]] = window[live][..., 1:].to(conv_state.dtype)
        out = out * live[:, None]
    return out.to(x.dtype)
