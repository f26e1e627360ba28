"""Copies of recurrent state that prefix caching takes during decode."""

import torch


def _rows(
    cache_indices: torch.Tensor,
    mask: torch.Tensor,
    track_indices: torch.Tensor,
    batch_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and destination slots of the requests to snapshot now."""
    source = cache_indices[:batch_size].long()
    target = track_indices[:batch_size].long()
    chosen = mask[:batch_size] & (source >= 0) & (target >= 0)
    return source[chosen], target[chosen]


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Snapshot one layer's pools ``[slots, ...]`` where the mask says so."""
    del check_freed_slots  # negative slots are always skipped
    source, target = _rows(
        cache_indices, mamba_track_mask, mamba_track_indices, batch_size
    )
    if source.numel():
        conv_states[target] = conv_states[source]
        ssm_states[target] = ssm_states[source]


def track_mamba_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """The same for pools of all layers, ``[layers, slots, ...]``."""
    del check_freed_slots
    source, target = _rows(
        cache_indices, mamba_track_mask, mamba_track_indices, batch_size
    )
    if source.numel():
        conv_states_pool[:, target] = conv_states_pool[:, source]
        ssm_states_pool[:, target] = ssm_states_pool[:, source]
