"""A deployment as the simulator sees it: pass durations and cache geometry, in a file.

``python -m sglang_agent simulate --cost-model NAME`` takes the name of a file in
``cost_models/`` or a path. Durations follow :mod:`sglang.virtual.cost`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sglang_agent.errors import UsageError

FOLDER = Path(__file__).parent / "cost_models"


class PassCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds per pass, per token, per request and per token of context.

    A prefill pass takes ``pass_s + prefill_token_s * new + prefill_context_s *
    sum(new_i * (before_i + new_i / 2))``, a decode pass ``pass_s + decode_request_s *
    batch + decode_context_s * sum(context_i)``. A policy that matches prefixes adds
    ``waiting_token_s`` for every prompt token of the requests that wait in a pass,
    ``lookup_token_s`` for every one that it looks up, and ``walked_token_s`` for every
    token in the cache when it walks the tree (dfs-weight); see
    :mod:`sglang.virtual.priority`.
    """

    pass_s: float
    prefill_token_s: float
    prefill_context_s: float
    decode_request_s: float
    decode_context_s: float
    waiting_token_s: float = 0.0
    lookup_token_s: float = 0.0
    walked_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
        if self.pass_s <= 0:
            raise ValueError(f"pass_s must be > 0, got {self.pass_s!r}")


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker: what its passes cost and how much its cache holds.

    ``kv_bytes_per_token`` and ``state_bytes_per_slot`` are those of one rank and
    ``cache_bytes`` is the budget M of equation 1. ``request_overhead_s`` is what a turn
    takes outside the scheduler (network, tokenizer). ``fit`` says where the figures
    come from and how far off they are. ``scale`` is set by :meth:`scaled` only.
    """

    name: str
    description: str
    passes: PassCosts
    kv_bytes_per_token: float
    state_bytes_per_slot: float
    cache_bytes: float
    cache_strategy: str
    page_size: int
    chunked_prefill_tokens: int
    context_length_tokens: int
    request_overhead_s: float = 0.0
    fit: dict[str, Any] = {}
    scale: float = 1.0

    def scaled(self, scale: float) -> Deployment:
        """A worker of ``scale`` times the size: cache and throughput.

        Per-token and per-request costs are divided by the scale, the cost of a pass is
        not. A batch of ``scale`` times the trajectories then takes about as long as
        the whole batch takes on the whole worker. Contexts are not scaled, and neither
        are chunks: each leaves a recurrent state, of which a turn has as many as before.

        So are those of ordering the queue, because queue and cache are that much
        smaller; that it is also ordered less often is the worker's to charge.
        """
        passes = PassCosts(
            pass_s=self.passes.pass_s,
            prefill_token_s=self.passes.prefill_token_s / scale,
            prefill_context_s=self.passes.prefill_context_s / scale,
            decode_request_s=self.passes.decode_request_s / scale,
            decode_context_s=self.passes.decode_context_s / scale,
            waiting_token_s=self.passes.waiting_token_s / scale,
            lookup_token_s=self.passes.lookup_token_s / scale,
            walked_token_s=self.passes.walked_token_s / scale,
        )
        return msgspec.structs.replace(
            self,
            passes=passes,
            scale=self.scale * scale,
            cache_bytes=self.cache_bytes * scale,
        )


def names() -> list[str]:
    """The cost models that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def load_deployment(name_or_path: str) -> Deployment:
    """Read a cost model by name or from a file.

    Raises :class:`UsageError` naming the file and the field.
    """
    path = FOLDER / f"{name_or_path}.json"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        raise UsageError(
            f"cost-model: {name_or_path!r} is neither a file nor one of "
            f"{', '.join(names())}"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Deployment)
    except msgspec.MsgspecError as error:
        raise UsageError(f"cost-model: {path}: {error}") from error
