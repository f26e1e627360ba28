"""Capacity of a hybrid KV and recurrent-state cache, for a workload.

Equations 1 to 8 of arXiv:2611.16661 (section 3.1) and, next to them, the
allocator's own arithmetic, which works in whole slots and pages and keeps one
padding slot. Nothing here imports torch or another SGLang module, so the
planner, the engine and a simulator can share it.

Sizes are bytes unless a name says otherwise. A ratio is state memory divided by
KV memory, as in ``--mamba-full-memory-ratio``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DEFAULT_RATIO = 0.9
"""What ``--mamba-full-memory-ratio`` falls back to when nobody sets it."""

MOST_STATE = 0.99
"""The largest share of the budget that :func:`deployed_ratio` gives to states.

The engine counts draft states of all requests that the slots could serve, so with
many draft tokens even the whole budget may not buy the slots of the balance.
"""

_GIB = 1 << 30


class CapacityError(ValueError):
    """A quantity that the model cannot work with; names it and its value."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = "missing" if value is None else repr(value)
        super().__init__(f"{field} is {shown}; it must be {allowed}")
        self.field = field
        self.value = value


def require_positive(field: str, value: float) -> float:
    """``value`` if it is a positive finite number, else :class:`CapacityError`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CapacityError(field, value, "a number above 0")
    if not math.isfinite(value) or value <= 0:
        raise CapacityError(field, value, "a finite number above 0")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """What one token and one request cost under a model and a configuration.

    kv_bytes_per_row: bytes of one row of a rank's KV pool, over its layers.
    state_bytes_per_slot: c_state, bytes of one recurrent-state slot on one rank.
    state_slots_per_request: S_state, slots the engine reserves for a request.
    draft_tokens: draft tokens whose intermediate states every *running request*
        keeps under speculative decoding (0 without it). They are no slots: they
        add to a request's footprint and never to S_state.
    scratch_bytes_per_draft_token: bytes of one such intermediate state.
    draft_request_cap: ``--max-running-requests`` per attention-DP rank: no more
        requests than that keep intermediate states. None: as many as fit.
    fixed_state_bytes: bytes taken from the state budget once, whatever its size.
    page_size: tokens a KV page holds.
    tokens_per_row: logical tokens that one row of the KV pool stands for (the
        decode-context-parallel width).
    """

    kv_bytes_per_row: int
    state_bytes_per_slot: int
    state_slots_per_request: int
    draft_tokens: int = 0
    scratch_bytes_per_draft_token: int = 0
    draft_request_cap: int | None = None
    fixed_state_bytes: int = 0
    page_size: int = 1
    tokens_per_row: int = 1

    def __post_init__(self) -> None:
        for field in (
            "kv_bytes_per_row",
            "state_bytes_per_slot",
            "state_slots_per_request",
            "page_size",
            "tokens_per_row",
        ):
            require_positive(field, getattr(self, field))

    @property
    def kv_bytes_per_token(self) -> float:
        """c_kv: bytes one logical token takes on one rank."""
        return self.kv_bytes_per_row / self.tokens_per_row

    @property
    def scratch_bytes_per_request(self) -> int:
        """Intermediate states of one running request under speculation."""
        return self.draft_tokens * self.scratch_bytes_per_draft_token

    @property
    def slot_bytes_per_request(self) -> int:
        """F_state (equation 2) without speculation."""
        return self.state_slots_per_request * self.state_bytes_per_slot

    @property
    def state_bytes_per_request(self) -> int:
        """F_state (equation 2), plus the request's speculative intermediates."""
        return self.slot_bytes_per_request + self.scratch_bytes_per_request

    def kv_bytes_per_trajectory(self, context_tokens: float) -> float:
        """F_kv (equation 2) of trajectories that end at ``context_tokens``."""
        tokens = require_positive("mean final context", context_tokens)
        return tokens * self.kv_bytes_per_token

    def kv_tokens_per_trajectory(self, context_tokens: float) -> int:
        """Tokens the allocator hands out for one trajectory: whole pages."""
        page = self.page_size * self.tokens_per_row
        return math.ceil(context_tokens / page) * page


# --------------------------------------------------------------------------
# The continuous model: equations 1 to 8
# --------------------------------------------------------------------------


def split_budget(budget: float, ratio: float) -> tuple[float, float]:
    """Bytes for (KV cache, recurrent state) at ``ratio`` (equation 1)."""
    require_positive("ratio", ratio)
    return budget / (1 + ratio), budget * ratio / (1 + ratio)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Trajectories each pool can keep (equation 3), and both (equation 4)."""

    kv: float
    state: float

    @property
    def joint(self) -> float:
        """Trajectories that keep both kinds of cache at once (equation 4)."""
        return min(self.kv, self.state)

    @property
    def binding_pool(self) -> str:
        """``"kv"`` or ``"state"``, whichever holds fewer; ``"both"`` if equal."""
        if math.isclose(self.kv, self.state, rel_tol=1e-9):
            return "both"
        return "kv" if self.kv < self.state else "state"


def capacity_at(
    budget: float, ratio: float, costs: UnitCosts, context_tokens: float
) -> Capacity:
    """Continuous capacity of both pools at ``ratio`` (equations 1 to 3).

    The state budget counts draft states of every request its slots could serve;
    what a cap of running requests leaves of that goes to the KV cache.
    """
    kv_bytes, state_bytes = split_budget(budget, ratio)
    state = state_bytes / costs.state_bytes_per_request
    if costs.draft_request_cap is not None and state > costs.draft_request_cap:
        undrafted = state - costs.draft_request_cap
        kv_bytes += undrafted * costs.scratch_bytes_per_request
    return Capacity(kv_bytes / costs.kv_bytes_per_trajectory(context_tokens), state)


def balancing_ratio(costs: UnitCosts, context_tokens: float) -> float:
    """The ratio at which both pools hold equally many (equations 5 and 6)."""
    return costs.state_bytes_per_request / costs.kv_bytes_per_trajectory(context_tokens)


def balanced_capacity(budget: float, costs: UnitCosts, context_tokens: float) -> float:
    """Joint capacity when both pools hold equally many (equation 7).

    Where fewer requests run than fit, only those pay for draft states.
    """
    footprint = costs.kv_bytes_per_trajectory(context_tokens)
    everyone = budget / (footprint + costs.state_bytes_per_request)
    cap = costs.draft_request_cap
    if cap is None or everyone <= cap:
        return everyone
    drafts = cap * costs.scratch_bytes_per_request
    return (budget - drafts) / (footprint + costs.slot_bytes_per_request)


def deployed_ratio(budget: float, costs: UnitCosts, context_tokens: float) -> float:
    """The ratio that planner and engine deploy: the balancing one, to six digits.

    A pasted flag and a profile given to the server then make the same pools. With
    draft states for fewer requests than fit, the balance depends on ``budget``.
    """
    state_bytes = balanced_capacity(budget, costs, context_tokens) * (
        costs.state_bytes_per_request
    )
    state_bytes = min(state_bytes, MOST_STATE * budget)
    return float(f"{state_bytes / (budget - state_bytes):.6g}")


def ratio_for_concurrency(budget: float, costs: UnitCosts, concurrency: int) -> float:
    """The ratio whose state pool holds exactly ``concurrency`` requests.

    Raises:
        CapacityError: when their states alone need the whole budget.
    """
    state_bytes = require_positive("target concurrency", concurrency) * (
        costs.state_bytes_per_request
    )
    if state_bytes >= budget:
        most = math.ceil(budget / costs.state_bytes_per_request) - 1
        raise CapacityError(
            "target concurrency", concurrency, f"at most {most} with this budget"
        )
    return state_bytes / (budget - state_bytes)


def aggregate_concurrency(per_worker: float, workers: int) -> int:
    """Reference concurrency of ``workers`` equal workers (equation 8)."""
    require_positive("workers", workers)
    return workers * math.floor(per_worker)


# --------------------------------------------------------------------------
# The allocator: whole slots, whole pages, one padding slot
# --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Pools as the engine sizes them.

    kv_tokens: logical tokens of the KV pool, whole pages.
    state_slots: usable state slots; the padding slot is not among them.
    """

    kv_tokens: int
    state_slots: int

    def request_limit(self, costs: UnitCosts) -> int:
        """Requests that can run at once for want of state slots."""
        return self.state_slots // costs.state_slots_per_request

    def capacity(self, costs: UnitCosts, context_tokens: float) -> Capacity:
        """Equation 3 over the pools as sized, in continuous trajectories."""
        return Capacity(
            kv=self.kv_tokens / require_positive("mean final context", context_tokens),
            state=self.state_slots / costs.state_slots_per_request,
        )

    def safe_concurrency(self, costs: UnitCosts, context_tokens: float) -> int:
        """Whole trajectories that keep both kinds of cache in these pools."""
        tokens = costs.kv_tokens_per_trajectory(context_tokens)
        return min(self.kv_tokens // tokens, self.request_limit(costs))


def state_slots_in(state_budget: float, costs: UnitCosts) -> int:
    """Usable slots of ``state_budget`` bytes: one slot more is padding.

    With speculation the budget also pays for the intermediates of one padding
    request and of every request that the slots let run. At most 0 slots means
    that the budget does not hold a single one.
    """
    state = costs.scratch_bytes_per_draft_token
    drafts_per_slot = costs.draft_tokens / costs.state_slots_per_request
    padding = costs.state_bytes_per_slot + costs.scratch_bytes_per_request
    # In the engine's order of operations, so that both round alike.
    per_slot = state * (1 + drafts_per_slot) + (costs.state_bytes_per_slot - state)
    return int((state_budget - costs.fixed_state_bytes - padding) // per_slot)


def size_pools(budget: int, ratio: float, costs: UnitCosts) -> PoolSizes:
    """Pools the engine makes of ``budget`` bytes at ``ratio``.

    The steps and their order, floats in GiB included, are those of the engine's
    allocator, so that the result equals it to the unit.

    Raises:
        CapacityError: when either pool would be empty.
    """
    budget_gib = require_positive("cache budget", budget) / _GIB
    state_gib = budget_gib * ratio / (1 + require_positive("ratio", ratio))
    slots = state_slots_in(state_gib * _GIB, costs)
    if slots <= 0:
        raise CapacityError("ratio", ratio, "larger: not one state slot fits")
    if scratch := costs.scratch_bytes_per_request:
        requests = slots // costs.state_slots_per_request
        if costs.draft_request_cap is not None:
            requests = min(costs.draft_request_cap, requests)
        budget_gib -= scratch * (requests + 1) / _GIB
    state_bytes = (slots + 1) * costs.state_bytes_per_slot + costs.fixed_state_bytes
    kv_bytes = int((budget_gib - state_bytes / _GIB) * _GIB)
    return PoolSizes(kv_tokens=_kv_tokens_in(kv_bytes, ratio, costs), state_slots=slots)


def _kv_tokens_in(kv_bytes: int, ratio: float, costs: UnitCosts) -> int:
    rows = kv_bytes // costs.kv_bytes_per_row
    rows = rows // costs.page_size * costs.page_size
    if rows <= 0:
        raise CapacityError("ratio", ratio, "smaller: not one page of KV cache fits")
    return rows * costs.tokens_per_row


def request_limit(
    pools: PoolSizes,
    costs: UnitCosts,
    *,
    context_length: int | None,
    requested: int | None = None,
) -> int:
    """The engine's ``max_running_requests`` per attention-DP rank.

    ``requested`` is ``--max-running-requests`` per rank. Without it the engine
    guesses between 2048 and 4096 from the model's ``context_length`` in tokens;
    where that is not known either, the upper end is assumed.
    """
    rows = pools.kv_tokens // costs.tokens_per_row
    if requested is None:
        guess = 4096 if context_length is None else int(rows / context_length * 512)
        requested = max(min(guess, 4096), 2048)
    return min(requested, rows // 2, pools.request_limit(costs))
