"""Equations 1 to 8 for a deployment, as far as a simulation needs them."""

from __future__ import annotations

import math
from typing import NamedTuple

from sglang_agent.simulate.cost_model import Deployment

DEFAULT_RATIO = 0.9
"""The engine's own ``--mamba-full-memory-ratio``."""

# State slots that the engine reserves for each running request, without overlap.
STATE_SLOTS_PER_REQUEST = {"no_buffer": 3, "extra_buffer": 4}


class Capacity(NamedTuple):
    """What a ratio gives for trajectories of a mean final context."""

    ratio: float
    kv_trajectories: float
    state_trajectories: float

    @property
    def trajectories(self) -> float:
        """C(r; D) of equation 4."""
        return min(self.kv_trajectories, self.state_trajectories)

    @property
    def reference_concurrency(self) -> int:
        """The integer per worker, at least 1."""
        return max(1, math.floor(self.trajectories))


def state_footprint_bytes(deployment: Deployment) -> float:
    """F_state of equation 2."""
    slots = STATE_SLOTS_PER_REQUEST[deployment.cache_strategy]
    return slots * deployment.state_bytes_per_slot


def balanced_ratio(deployment: Deployment, mean_final_context_tokens: float) -> float:
    """r_bal of equation 6."""
    kv_footprint = mean_final_context_tokens * deployment.kv_bytes_per_token
    return state_footprint_bytes(deployment) / kv_footprint


def capacity(
    deployment: Deployment, ratio: float, mean_final_context_tokens: float
) -> Capacity:
    """Equations 1 to 4 at ``ratio``."""
    kv_bytes = deployment.cache_bytes / (1 + ratio)
    return Capacity(
        ratio=ratio,
        kv_trajectories=kv_bytes
        / (mean_final_context_tokens * deployment.kv_bytes_per_token),
        state_trajectories=kv_bytes * ratio / state_footprint_bytes(deployment),
    )
