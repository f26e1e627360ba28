"""Everything that decides a simulation's outcome, as one record."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_agent.errors import UsageError
from sglang_agent.simulate.capacity import STATE_SLOTS_PER_REQUEST
from sglang_agent.simulate.cost_model import Deployment

# What the engine sets per worker and a scaled worker must have less of.
ENGINE_PREFIX_MATCH_QUEUE_LIMIT = 128


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate.

    ``ratio`` None leaves the engine's default, and so does ``routing_prefix_capacity``
    (C_A, used with that schedule policy only); ``lbch_load_factor`` is alpha of equation 9,
    ``router_options`` are others of the routing policy's; ``env_concurrency`` None sets no limit.
    ``bypass_environment`` skips environment stages altogether (an inference-only
    replay). ``max_new_tokens`` is the clients' limit on every answer; None asks for
    exactly the recorded lengths, as a real replay does. ``time_limit_s`` ends a batch
    that takes too long, in virtual seconds. ``worker_names`` decide each label's home on
    the hash ring (in a deployment they are URLs); without them it is ``worker-0`` and so
    on. Raises :class:`UsageError` naming field and value.
    """

    deployment: Deployment
    sample_concurrency: int
    workers: int = 1
    schedule_policy: str = "fcfs"
    routing_prefix_capacity: int | None = None
    router_policy: str = "lbch"
    lbch_load_factor: float = 1.25
    router_options: dict[str, float] = {}
    ratio: float | None = None
    env_concurrency: int | None = None
    job_order: str = "caas"
    caas_band_s: float = 30.0
    caas_duration_bucket_s: float = 1.0
    bypass_environment: bool = False
    max_new_tokens: int | None = 4096
    time_limit_s: float | None = None
    max_states_per_path: int = 1
    fast_forward: bool = True
    server_args: list[str] = []
    worker_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("workers", "sample_concurrency"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be >= 1, got {getattr(self, name)!r}")
        for name in (
            "ratio",
            "env_concurrency",
            "time_limit_s",
            "max_new_tokens",
            "routing_prefix_capacity",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be > 0, got {value!r}")
        if self.worker_names and len(set(self.worker_names)) != self.workers:
            raise UsageError(
                f"worker_names must be {self.workers} different ones, got "
                f"{', '.join(self.worker_names)}"
            )
        if self.deployment.cache_strategy not in STATE_SLOTS_PER_REQUEST:
            raise UsageError(
                f"cache_strategy must be one of {', '.join(STATE_SLOTS_PER_REQUEST)}, "
                f"got {self.deployment.cache_strategy!r}"
            )

    @property
    def names(self) -> list[str]:
        """What the workers are called."""
        return list(self.worker_names) or [f"worker-{i}" for i in range(self.workers)]

    def scaled(self, scale: float) -> SimulationSettings:
        """The same for a share of the trajectories: smaller workers, smaller counts.

        The limit of environment jobs stays, as environment times do.
        """
        capacity = self.routing_prefix_capacity
        return msgspec.structs.replace(
            self,
            deployment=self.deployment.scaled(scale),
            sample_concurrency=max(1, round(self.sample_concurrency * scale)),
            routing_prefix_capacity=capacity and max(1, round(capacity * scale)),
        )

    def worker_config(self) -> dict[str, Any]:
        """The worker's side of the settings, as the protocol wants it."""
        d = self.deployment
        return {
            "cost": {**msgspec.structs.asdict(d.passes), "scale": d.scale},
            "kv_bytes_per_token": d.kv_bytes_per_token,
            "state_bytes_per_slot": d.state_bytes_per_slot,
            "cache_bytes": d.cache_bytes,
            "context_length_tokens": d.context_length_tokens,
            "cache_strategy": d.cache_strategy,
            "page_size": d.page_size,
            "chunked_prefill_tokens": d.chunked_prefill_tokens,
            "schedule_policy": self.schedule_policy,
            "ratio": self.ratio,
            "max_states_per_path": self.max_states_per_path,
            "fast_forward": self.fast_forward,
            "server_args": [*self._server_args(), *self.server_args],
        } | self._scaled_limits()

    def _server_args(self) -> list[str]:
        """Flags that follow from the settings; the user's own come after them."""
        capacity = self.routing_prefix_capacity
        if capacity is None or self.schedule_policy != "routing-prefix":
            return []
        return ["--routing-prefix-capacity", str(capacity)]

    def _scaled_limits(self) -> dict[str, Any]:
        scale = self.deployment.scale
        if scale == 1.0:
            return {}
        queue = max(1, round(ENGINE_PREFIX_MATCH_QUEUE_LIMIT * scale))
        return {"prefix_match_queue_limit": queue}
