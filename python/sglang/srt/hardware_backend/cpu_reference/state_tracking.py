"""Copies of recurrent state that prefix caching takes during decode."""

from typing import Any

import torch


def track_mamba_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Snapshot the pools ``[layers, slots, ...]`` where the mask says so.

    Row i copies slot ``cache_indices[i]`` to slot ``mamba_track_indices[i]``; rows
    with a negative slot on either side are skipped.
    """
    del check_freed_slots  # negative slots are always skipped
    source = cache_indices[:batch_size].long()
    target = mamba_track_indices[:batch_size].long()
    chosen = mamba_track_mask[:batch_size] & (source >= 0) & (target >= 0)
    if bool(chosen.any()):
        source, target = source[chosen], target[chosen]
        for pool in (conv_states_pool, ssm_states_pool):
            pool[:, target] = pool[:, source]


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """The same for the pools of one layer, ``[slots, ...]``."""
    track_mamba_states_all_layers(
        conv_states.unsqueeze(0), ssm_states.unsqueeze(0), *args, **kwargs
    )
