"""How long a pass takes: the virtual clock's only source of time.

A prefill pass that computes ``n_i`` new tokens after ``p_i`` cached or earlier ones
takes ``pass + prefill_token * sum(n_i) + prefill_context * sum(n_i * (p_i + n_i / 2))``;
a decode pass over requests with contexts ``c_i`` takes ``pass + decode_request * batch
+ decode_context * sum(c_i)``. Ordering the waiting queue for a pass comes on top
(:mod:`sglang.virtual.priority` says of what): ``waiting_token * waiting + lookup_token *
looked up + walked_token * walked``. Durations are rounded to whole nanoseconds each, so that
adding up many passes is exact in any grouping.
"""

from __future__ import annotations

import numpy as np

from sglang.virtual.protocol import CostModel

NS = 1e9


def context_products(new_and_prefix: list[tuple[int, int]]) -> float:
    """Token pairs that attention looks at: sum of new * (prefix + new / 2)."""
    return sum(new * (prefix + new / 2) for new, prefix in new_and_prefix)


class PassCost:
    """The cost model with its coefficients in nanoseconds."""

    def __init__(self, model: CostModel) -> None:
        self._pass = model.pass_s * NS
        self._prefill_token = model.prefill_token_s * NS
        self._prefill_context = model.prefill_context_s * NS
        self._decode_request = model.decode_request_s * NS
        self._decode_context = model.decode_context_s * NS
        self._waiting_token = model.waiting_token_s * NS
        self._lookup_token = model.lookup_token_s * NS
        self._walked_token = model.walked_token_s * NS
        self.scale = model.scale
        self.floor_ns = max(1, int(self._pass))

    def prefill_ns(self, new_and_prefix: list[tuple[int, int]]) -> int:
        """One prefill pass; pairs of (new tokens, tokens before them)."""
        new_tokens = sum(new for new, _ in new_and_prefix)
        return round(
            self._pass
            + self._prefill_token * new_tokens
            + self._prefill_context * context_products(new_and_prefix)
        )

    def priority_ns(self, waiting: int, looked_up: int, walked: int) -> float:
        """Ordering the queue once; all three in tokens. Not rounded."""
        return (
            self._waiting_token * waiting
            + self._lookup_token * looked_up
            + self._walked_token * walked
        )

    def decode_ns(self, batch: int, context_tokens: int) -> int:
        """One decode pass of ``batch`` requests."""
        return int(self.decode_series_ns(batch, context_tokens, 1)[0])

    def decode_series_ns(
        self, batch: int, context_tokens: int, passes: int
    ) -> np.ndarray:
        """``passes`` decode passes in a row, each adding a token per request."""
        contexts = context_tokens + batch * np.arange(passes, dtype=np.float64)
        durations = (
            self._pass + self._decode_request * batch + self._decode_context * contexts
        )
        return np.rint(durations).astype(np.int64)
