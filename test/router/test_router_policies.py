"""Policies as pure objects: the paper's rule, its edges, and what never changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_router.policies import (
    POLICIES,
    BoundedConsistentHashing,
    CacheAware,
    ConsistentHashing,
    PolicyError,
    make_policy,
    policy_names,
)

WORKERS = [f"http://10.0.0.{i}:8000" for i in range(1, 9)]
labels = st.text(
    st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=128
)
factors = st.floats(1.0, 4.0)


def fill(policy, loads, label, count):
    """Place ``count`` requests that stay open; the workers in order of placement."""
    placed = []
    for _ in range(count):
        worker = policy.pick(label, loads)
        loads[worker] += 1
        placed.append(worker)
    return placed


def idle(count):
    return dict.fromkeys(WORKERS[:count], 0)


@pytest.mark.parametrize(
    ("workers", "requests", "expected"),
    [(2, 20, [13, 7]), (4, 20, [7, 6, 6, 1]), (2, 4, [3, 1])],
)
def test_held_open_requests_of_one_label_fill_the_chain(workers, requests, expected):
    policy = make_policy("lbch", WORKERS[:workers], load_factor=1.25)
    loads = idle(workers)
    fill(policy, loads, "trajectory", requests)
    assert sorted(loads.values(), reverse=True) == expected


def test_spill_follows_the_ring():
    policy = BoundedConsistentHashing(WORKERS)
    order = policy._ring.order("trajectory")
    placed = fill(policy, idle(8), "trajectory", 5)
    assert list(dict.fromkeys(placed)) == list(order[: len(set(placed))])


def test_branches_are_named():
    policy = BoundedConsistentHashing(WORKERS[:2])
    loads = idle(2)
    branches = []
    for _ in range(3):
        choice = policy.choose("a", loads)
        loads[choice.worker] += 1
        branches.append(choice.branch)
    assert branches == ["home", "home", "spill"]
    assert policy.choose(None, loads).branch == "unlabelled"


def test_fallback_keeps_the_request_at_home():
    """Cannot happen with true counts; a planted bound shows the branch works."""
    policy = BoundedConsistentHashing(WORKERS[:3])
    home = policy.pick("a", idle(3))
    policy.bound = lambda loads: -1.0
    assert policy.choose("a", idle(3)) == (home, "fallback")


def test_absolute_gap_keeps_affinity_at_tiny_loads():
    strict = BoundedConsistentHashing(WORKERS[:4])
    loose = BoundedConsistentHashing(WORKERS[:4], balance_abs_threshold=2)
    home = strict.pick("a", idle(4))
    loads = idle(4) | {home: 1}
    assert strict.choose("a", loads).branch == "spill"
    assert loose.choose("a", loads) == (home, "home")


@pytest.mark.parametrize("factor", [0.99, 0.0, -1.0, float("nan"), float("inf")])
def test_factor_below_one_is_refused(factor):
    with pytest.raises(PolicyError, match="at least 1"):
        make_policy("lbch", load_factor=factor)


def test_bad_names_and_options_are_refused():
    with pytest.raises(PolicyError, match=r"'lbhc' is unknown; allowed: lbch"):
        make_policy("lbhc")
    with pytest.raises(PolicyError, match=r"no option 'alpha'; allowed: balance_abs"):
        make_policy("lbch", alpha=1.25)
    with pytest.raises(PolicyError, match="cache threshold"):
        make_policy("cache_aware", cache_threshold=1.5)


@given(
    st.lists(st.tuples(labels, st.booleans()), max_size=80), factors, st.integers(1, 8)
)
def test_bound_holds_at_every_placement(steps, factor, count):
    """A picked worker was within equation 9, home first, then ring order."""
    policy = BoundedConsistentHashing(WORKERS[:count], load_factor=factor)
    loads = idle(count)
    for label, ends in steps:
        worker, branch = policy.choose(label, loads)
        bound = (sum(loads.values()) + 1) / count * factor
        assert loads[worker] <= bound
        order = policy._ring.order(label)
        before = order[: order.index(worker)]
        assert all(loads[skipped] > bound for skipped in before)
        assert branch == ("home" if not before else "spill")
        loads[worker] += 1
        if ends:
            loads[max(loads, key=loads.__getitem__)] -= 1


@given(st.sampled_from(sorted(POLICIES)), st.lists(st.none() | labels, max_size=40))
def test_same_calls_give_the_same_answers(name, calls):
    outcomes = []
    for _ in range(2):
        policy = make_policy(name, WORKERS[:5])
        loads = idle(5)
        placed = []
        for label in calls:
            placed.append(policy.choose(label, loads, text=(label or "") * 50))
            loads[placed[-1].worker] += 1
        outcomes.append(placed)
    assert outcomes[0] == outcomes[1]
    assert {choice.branch for choice in outcomes[0]} <= set(POLICIES[name].branches)


@given(st.sampled_from(sorted(POLICIES)), st.none() | labels, st.data())
def test_only_offered_workers_are_picked(name, label, data):
    policy = make_policy(name, WORKERS)
    offered = data.draw(st.lists(st.sampled_from(WORKERS), min_size=1, unique=True))
    loads = {worker: data.draw(st.integers(0, 30)) for worker in offered}
    before = dict(loads)
    assert policy.pick(label, loads, "text") in loads
    assert loads == before


def test_few_keys_move_when_a_worker_leaves_and_all_return_with_it():
    policy = ConsistentHashing(WORKERS[:5])
    keys = [f"session-{i}" for i in range(1000)]
    before = {key: policy.pick(key, idle(5)) for key in keys}
    gone = WORKERS[2]
    without = {worker: 0 for worker in WORKERS[:5] if worker != gone}
    policy.update_workers(without)
    after = {key: policy.pick(key, without) for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert moved == [key for key in keys if before[key] == gone]
    assert 100 <= len(moved) <= 300
    policy.update_workers(WORKERS[:5])
    assert {key: policy.pick(key, idle(5)) for key in keys} == before


def test_an_unhealthy_worker_is_skipped_like_a_removed_one():
    policy = BoundedConsistentHashing(WORKERS[:5])
    home = policy.pick("a", idle(5))
    healthy = {worker: 0 for worker in idle(5) if worker != home}
    removed = BoundedConsistentHashing(healthy)
    assert policy.pick("a", healthy) == removed.pick("a", healthy)


def test_order_of_arrival_does_not_matter():
    forward, backward = ConsistentHashing(WORKERS), ConsistentHashing(WORKERS[::-1])
    for i in range(200):
        assert forward.pick(f"k{i}", idle(8)) == backward.pick(f"k{i}", idle(8))


def test_unlabelled_requests_are_spread_by_load():
    policy = BoundedConsistentHashing(WORKERS[:4])
    loads = idle(4) | {WORKERS[0]: 5}
    fill(policy, loads, None, 9)
    assert sorted(loads.values()) == [3, 3, 3, 5]


def test_round_robin_takes_turns_and_least_load_balances():
    assert fill(make_policy("round_robin"), idle(3), "a", 6) == WORKERS[:3] * 2
    loads = idle(3)
    fill(make_policy("least_load"), loads, "a", 9)
    assert set(loads.values()) == {3}


def test_power_of_two_never_picks_the_most_loaded_of_its_pair():
    policy = make_policy("power_of_two", seed=7)
    loads = idle(2) | {WORKERS[0]: 3}
    assert {policy.pick(None, loads) for _ in range(20)} == {WORKERS[1]}


def test_random_is_seeded_and_reaches_everybody():
    drawn = [make_policy("random", seed=1).pick("a", idle(4)) for _ in range(3)]
    assert len(set(drawn)) == 1
    policy = make_policy("random", seed=1)
    assert {policy.pick("a", idle(4)) for _ in range(100)} == set(WORKERS[:4])


def test_cache_aware_follows_the_longest_prefix():
    policy = CacheAware(WORKERS[:3])
    first = "a" * 1000
    home = policy.choose(None, idle(3), first)
    assert home.branch == "miss"
    again = policy.choose(None, idle(3) | {home.worker: 5}, first + "b" * 500)
    assert again == (home.worker, "prefix")
    other = policy.choose(None, idle(3) | {home.worker: 5}, "c" * 1000)
    assert other.branch == "miss"
    assert other.worker != home.worker


def test_cache_aware_gives_affinity_up_when_loads_are_far_apart():
    policy = CacheAware(WORKERS[:2], balance_abs_threshold=4)
    text = "a" * 640
    home = policy.pick(None, idle(2), text)
    choice = policy.choose(None, idle(2) | {home: 5}, text)
    assert choice.branch == "imbalance"
    assert choice.worker != home


@pytest.mark.parametrize("first_holder", [False, True])
def test_cache_aware_shares_a_common_prefix_or_leaves_it_to_its_first_holder(
    first_holder: bool,
) -> None:
    """As many agents do: every first request begins with the same system prompt."""
    policy = CacheAware(WORKERS[:2], first_holder=first_holder, balance_abs_threshold=4)
    loads = idle(2)
    branches = []
    for number in range(60):
        text = "s" * 640 + f"{number:03d}" * 200
        choice = policy.choose(None, loads, text)
        branches.append(choice.branch)
        loads[choice.worker] += 1
    assert branches[0] == "miss"
    assert "imbalance" in branches
    if first_holder:
        assert sorted(loads.values()) == [24, 36]  # as far apart as is allowed
    else:
        assert sorted(loads.values()) == [30, 30]


def test_cache_aware_forgets_which_worker_was_first():
    policy = CacheAware(WORKERS[:2], first_holder=True, balance_abs_threshold=0)
    text = "a" * 640
    first = policy.pick(None, idle(2), text)
    other = policy.pick(None, idle(2) | {first: 9}, text)
    assert other != first
    assert policy.pick(None, idle(2), text) == first
    policy.update_workers([other])
    assert policy.pick(None, {other: 0}, text) == other


def test_cache_aware_forgets_the_least_recently_used_and_removed_workers():
    policy = CacheAware(WORKERS[:1], max_tree_size=640)
    for letter in "abc":
        policy.pick(None, idle(1), letter * 640)
    assert policy.choose(None, idle(1), "c" * 640).branch == "prefix"
    assert policy.choose(None, idle(1), "a" * 640).branch == "miss"
    policy.update_workers([])
    assert policy.choose(None, idle(1), "a" * 640).branch == "miss"


def test_importing_the_policies_needs_no_server():
    """The simulator imports them without the gateway's dependencies."""
    code = (
        "import sys; import sgl_router.policies; "
        "loaded = {'uvloop', 'httptools', 'aiohttp', 'starlette', 'uvicorn'}"
        " & set(sys.modules); sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_every_name_makes_a_policy():
    for name in policy_names():
        assert make_policy(name, WORKERS).pick("a", idle(8)) in WORKERS
