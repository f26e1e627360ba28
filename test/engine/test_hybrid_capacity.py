"""The capacity model against boot logs, published figures and its own definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from .hybrid_overlay import capacity

CapacityError = capacity.CapacityError
PoolSizes = capacity.PoolSizes
UnitCosts = capacity.UnitCosts

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def costs(**changes: object) -> UnitCosts:
    """70 KiB a token and five 40 MiB slots a request, unless changed."""
    fields = {
        "kv_bytes_per_row": 70 * KIB,
        "state_bytes_per_slot": 40 * MIB,
        "state_slots_per_request": 5,
    }
    return UnitCosts(**(fields | changes))


any_costs = st.builds(
    UnitCosts,
    draft_tokens=st.sampled_from([0, 0, 4, 16]),
    scratch_bytes_per_draft_token=st.integers(1 << 12, 1 << 28),
    draft_request_cap=st.none() | st.integers(1, 500),
    kv_bytes_per_row=st.integers(64, 1 << 18),
    state_bytes_per_slot=st.integers(1 << 12, 1 << 28),
    state_slots_per_request=st.integers(1, 5),
    page_size=st.sampled_from([1, 16, 64]),
    tokens_per_row=st.sampled_from([1, 2, 8]),
)
any_budget = st.integers(1 << 30, 1 << 38)
any_context = st.floats(1, 1e6)
any_ratio = st.floats(1e-3, 1e3)


# --- figures from running servers ------------------------------------------


def test_a_slot_of_a_real_boot_log_is_worth_about_4080_tokens():
    """257 slots in 0.46 + 13.04 GiB, 1,167,552 tokens in 15.03 GiB."""
    slot = (0.46 + 13.04) * GIB / 257
    token = 15.03 * GIB / 1_167_552

    assert slot / token == pytest.approx(4080, rel=0.001)


@pytest.mark.parametrize(("dcp", "ratio"), [(1, 1.77), (8, 14.2)])
def test_the_balance_of_that_server_with_and_without_dcp(dcp: int, ratio: float):
    """With decode context parallelism a row of the pool holds several tokens."""
    server = costs(
        kv_bytes_per_row=round(15.03 * GIB / 1_167_552),
        state_bytes_per_slot=round(13.5 * GIB / 257),
        state_slots_per_request=4,
        tokens_per_row=dcp,
    )

    assert capacity.balancing_ratio(server, 9216) == pytest.approx(ratio, rel=0.003)


@pytest.mark.parametrize(("slots", "cap"), [(257, 51), (451, 90), (474, 94)])
def test_requests_are_capped_by_whole_requests_of_slots(slots: int, cap: int):
    """Three servers with five slots a request logged these caps."""
    assert PoolSizes(kv_tokens=10**6, state_slots=slots).request_limit(costs()) == cap


@pytest.mark.parametrize(
    ("ratio", "slots", "tokens"),
    [(0.3, 402, 161_355), (0.9, 826, 110_475), (3, 1309, 52_515)],
)
def test_pools_of_a_cpu_engine_to_the_unit(ratio: float, slots: int, tokens: int):
    """Three KDA layers and one MLA layer on 64 MiB, half of it static."""
    tiny = costs(
        kv_bytes_per_row=160, state_bytes_per_slot=19_200, state_slots_per_request=3
    )

    assert capacity.size_pools(32 * MIB, ratio, tiny) == PoolSizes(tokens, slots)


# --- figures from users ----------------------------------------------------


def test_long_contexts_want_far_less_state_than_the_default():
    """40 GiB for trajectories of 60,000 tokens: 9 of them, but 5 at the default."""
    unit, budget = costs(), 40 * GIB
    ratio = capacity.balancing_ratio(unit, 60_000)
    at_default = capacity.capacity_at(budget, capacity.DEFAULT_RATIO, unit, 60_000)

    assert ratio == pytest.approx(0.0488, abs=0.0005)
    assert math.floor(capacity.balanced_capacity(budget, unit, 60_000)) == 9
    assert math.floor(at_default.joint) == 5
    assert at_default.binding_pool == "kv"


def test_a_wanted_concurrency_sets_the_ratio():
    """64 requests of 200 MiB state out of 40 GiB, whatever the context."""
    ratio = capacity.ratio_for_concurrency(40 * GIB, costs(), 64)
    kv_bytes, state_bytes = capacity.split_budget(40 * GIB, ratio)

    assert ratio == pytest.approx(0.4545, abs=0.0001)
    assert state_bytes == pytest.approx(64 * 200 * MIB)
    assert kv_bytes / 64 / (70 * KIB) == pytest.approx(6436, abs=1)


def test_the_padding_slot_is_not_a_usable_one():
    """4,000 MiB are 100 slots and 20 requests on paper, 99 and 19 in the engine."""
    unit, budget = costs(), 4000 * MIB
    slots = capacity.state_slots_in(budget, unit)

    assert budget / unit.state_bytes_per_request == 20
    assert slots == 99
    assert PoolSizes(10**9, slots).request_limit(unit) == 19


def test_draft_tokens_cost_bytes_and_no_slots():
    """Intermediate states belong to running requests, not to slots."""
    plain = costs()
    drafting = costs(draft_tokens=12, scratch_bytes_per_draft_token=40 * MIB)

    assert drafting.state_slots_per_request == plain.state_slots_per_request
    assert drafting.state_bytes_per_request == plain.state_bytes_per_request + 480 * MIB
    # The engine: (budget - state * (1 + D)) // (state * (1 + D / S)).
    assert capacity.state_slots_in(4000 * MIB, drafting) == int(
        (4000 - 40 * 13) // (40 * (1 + 12 / 5))
    )


def test_draft_states_are_paid_for_by_running_requests_only():
    """48 requests of 10 draft tokens; far more trajectories fit than that."""
    unit = costs(
        kv_bytes_per_row=KIB,
        state_bytes_per_slot=MIB,
        draft_tokens=10,
        scratch_bytes_per_draft_token=MIB,
        draft_request_cap=48,
    )
    budget, context = 4 * GIB, 12 * KIB  # 12 MiB of KV, 5 of slots, 10 of drafts
    expected = (4096 - 48 * 10) / 17
    ratio = capacity.deployed_ratio(budget, unit, context)
    at_ratio = capacity.capacity_at(budget, ratio, unit, context)
    pools = capacity.size_pools(budget, ratio, unit).capacity(unit, context)

    assert capacity.balanced_capacity(budget, unit, context) == pytest.approx(expected)
    assert at_ratio.kv == pytest.approx(at_ratio.state, rel=1e-4)
    assert pools.kv == pytest.approx(pools.state, rel=0.02)


# --- the paper -------------------------------------------------------------


def test_the_paper_s_three_workloads_imply_one_memory_budget():
    """r_bal and C_ref of section 5.2.1 give M / F_state within 15%."""
    published = {"swe": (0.09, 98), "bfcl": (2.26, 859), "widesearch": (0.10, 98)}
    slot = 1000  # any state footprint: only its multiples matter
    budgets = {}
    for name, (ratio, concurrency) in published.items():
        context = 10**6 / ratio  # F_kv / F_state = 1 / ratio
        unit = costs(
            kv_bytes_per_row=1,
            state_bytes_per_slot=slot * 1000,
            state_slots_per_request=1,
        )
        assert capacity.balancing_ratio(unit, context) == pytest.approx(ratio)
        per_byte = capacity.balanced_capacity(1, unit, context)
        budgets[name] = concurrency / per_byte / unit.state_bytes_per_request

    assert [round(budgets[name]) for name in published] == [1187, 1239, 1078]
    assert max(budgets.values()) / min(budgets.values()) < 1.15


def test_workers_add_up_whole_capacities():
    """Equation 8 rounds down before it multiplies."""
    assert capacity.aggregate_concurrency(9.9, workers=4) == 36


# --- properties ------------------------------------------------------------


@given(any_budget, any_ratio)
def test_a_split_keeps_the_budget_and_the_ratio(budget: int, ratio: float):
    """Equation 1."""
    kv_bytes, state_bytes = capacity.split_budget(budget, ratio)

    assert kv_bytes + state_bytes == pytest.approx(budget)
    assert state_bytes / kv_bytes == pytest.approx(ratio)


@given(any_budget, any_costs, any_context)
def test_at_the_balance_both_pools_hold_the_same(
    budget: int, unit: UnitCosts, context: float
):
    """Equations 5 to 7."""
    balanced = capacity.balanced_capacity(budget, unit, context)
    state_bytes = balanced * unit.state_bytes_per_request
    assume(state_bytes < 0.98 * budget)
    ratio = state_bytes / (budget - state_bytes)
    at_balance = capacity.capacity_at(budget, ratio, unit, context)

    assert at_balance.kv == pytest.approx(at_balance.state)
    assert at_balance.joint == pytest.approx(balanced)
    assert capacity.deployed_ratio(budget, unit, context) == pytest.approx(
        ratio, rel=1e-5
    )
    if unit.draft_request_cap is None:
        assert ratio == pytest.approx(capacity.balancing_ratio(unit, context))


@given(any_budget, any_costs, any_context, any_ratio)
def test_no_ratio_beats_the_balance(
    budget: int, unit: UnitCosts, context: float, ratio: float
):
    """The estimator maximises equation 4."""
    joint = capacity.capacity_at(budget, ratio, unit, context).joint
    best = capacity.balanced_capacity(budget, unit, context)

    assert joint <= best * (1 + 1e-9)


@given(any_budget, any_costs, any_context, any_ratio)
def test_the_allocator_never_promises_more_than_the_bytes(
    budget: int, unit: UnitCosts, context: float, ratio: float
):
    """Pools, padding slot included, fit, and the safe integer is below equation 7."""
    try:
        pools = capacity.size_pools(budget, ratio, unit)
    except CapacityError:
        assume(False)
    drafts = unit.scratch_bytes_per_request and (
        1 + min(unit.draft_request_cap or math.inf, pools.request_limit(unit))
    )
    state_bytes = (
        pools.state_slots + 1
    ) * unit.state_bytes_per_slot + drafts * unit.scratch_bytes_per_request
    kv_bytes = pools.kv_tokens * unit.kv_bytes_per_token
    best = capacity.balanced_capacity(budget, unit, context)

    assert state_bytes + kv_bytes <= budget + 1
    assert pools.kv_tokens % (unit.page_size * unit.tokens_per_row) == 0
    assert pools.safe_concurrency(unit, context) <= best * (1 + 1e-9)


@given(any_budget, any_costs, st.integers(1, 10_000))
def test_a_target_is_met_exactly_or_refused(
    budget: int, unit: UnitCosts, concurrency: int
):
    """The state pool of the returned ratio holds just the wanted requests."""
    if concurrency * unit.state_bytes_per_request >= budget:
        with pytest.raises(CapacityError, match="target concurrency"):
            capacity.ratio_for_concurrency(budget, unit, concurrency)
        return
    ratio = capacity.ratio_for_concurrency(budget, unit, concurrency)
    _, state_bytes = capacity.split_budget(budget, ratio)

    assert state_bytes / unit.state_bytes_per_request == pytest.approx(concurrency)


# --- limits ----------------------------------------------------------------


def test_running_requests_follow_the_smallest_of_four_limits():
    """The flag, half the tokens, the slots, and a guess from the context length."""
    pools, unit = PoolSizes(kv_tokens=100_000, state_slots=2500), costs()

    def limit(pools: PoolSizes = pools, **args: object) -> int:
        return capacity.request_limit(pools, unit, **({"context_length": 1000} | args))

    assert limit() == 500
    assert limit(requested=64) == 64
    assert limit(PoolSizes(40, 2500)) == 20
    assert limit(PoolSizes(100_000, 10**6)) == 4096
    assert limit(PoolSizes(100_000, 10**6), context_length=10**6) == 2048
    assert limit(PoolSizes(100_000, 10**6), context_length=None) == 4096


def test_trajectories_take_whole_pages():
    """A page belongs to one trajectory, so a token over it costs another."""
    paged = costs(page_size=64, state_slots_per_request=1)

    assert paged.kv_tokens_per_trajectory(65) == 128
    assert PoolSizes(256, 100).safe_concurrency(paged, 65) == 2
    assert PoolSizes(256, 100).safe_concurrency(paged, 64) == 4


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "5", None])
def test_unusable_quantities_are_named_with_their_value(value: object):
    """The message is one line with the field, the value and what is allowed."""
    with pytest.raises(CapacityError, match=r"^tokens is .*; it must be .*above 0$"):
        capacity.require_positive("tokens", value)


def test_a_budget_without_room_for_a_slot_or_a_page_is_refused():
    """The engine would raise as well; the plan says what to change."""
    with pytest.raises(CapacityError, match="larger: not one state slot fits"):
        capacity.size_pools(100 * MIB, 0.01, costs())
    with pytest.raises(CapacityError, match="smaller: not one page of KV cache fits"):
        capacity.size_pools(80 * MIB + 50 * KIB, 1e6, costs())
