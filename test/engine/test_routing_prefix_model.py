"""The policy over the real unified cache equals the printed algorithm, step by step."""

from __future__ import annotations

from array import array
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .routing_prefix_reference import Reference

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(400),  # the import alone takes minutes on a busy machine
    pytest.mark.filterwarnings("ignore"),  # SGLang warns while it is imported
]

POOL_TOKENS = 600
TRAJECTORIES = 8

COUNTS = ("admitted_first_tier", "admitted_second_tier", "stale_hits", "stale_tokens")
LABELS = [None, "", "a", "b", "c", "d", "e", "f", "a b", "x" * 129]

arrivals = st.tuples(
    st.just("arrive"),
    st.sampled_from(range(len(LABELS))),
    st.integers(0, TRAJECTORIES - 1),
    st.integers(2, 60),
)
passes = st.tuples(st.just("pass"), st.integers(0, 3))
rest = st.one_of(
    st.tuples(st.just("evict"), st.integers(1, 200)),
    st.tuples(st.just("retract"), st.integers(0, 7)),
    st.tuples(st.just("abort"), st.integers(0, 15)),
)
histories = st.lists(st.one_of(arrivals, arrivals, passes, passes, rest), max_size=40)


@pytest.fixture(scope="module", autouse=True)
def _context() -> None:
    from sglang.test.unified_allocator_fixtures import setup_allocator_context

    setup_allocator_context()


class World:
    """A real cache, queue and policy beside the reference, driven by one history."""

    def __init__(self, core: str, capacity: int, limit: int | None) -> None:
        import torch
        from sglang.srt.managers.schedule_policy import SchedulePolicy
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from sglang.srt.managers.routing_prefix import RoutingPrefix

        self.allocator = TokenToKVPoolAllocator(
            POOL_TOKENS, torch.float16, "cpu", MagicMock(), need_sort=False
        )
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.policy = SchedulePolicy(
            "routing-prefix", self.cache, False, False, False, max_running_requests=1
        )
        self.policy.routing_prefix = RoutingPrefix(capacity, limit)
        self.reference = Reference(capacity, limit)
        self.queue: list[Any] = []
        self.running: list[Any] = []
        self.queries = 0
        self.created = 0
        match = self.cache.match_prefix

        def counted(params: Any) -> Any:
            self.queries += 1
            return match(params)

        self.match = match
        self.cache.match_prefix = counted

    def arrive(self, label: int, trajectory: int, length: int) -> None:
        self.add(LABELS[label], trajectory, length)

    def add(self, label: str | None, trajectory: int, length: int) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        start = 1000 * trajectory
        # Trajectories 0 and 1 share everything: labels and prompts are independent.
        tokens = array("q", range(start if trajectory > 1 else 0, start + length))
        self.created += 1
        req = Req(
            rid=str(self.created % 5),  # ids may repeat
            origin_input_text="",
            origin_input_ids=tokens[:length],
            sampling_params=SamplingParams(max_new_tokens=4),
            routing_key=label,
        )
        self._enter(req)

    def _enter(self, req: Any) -> None:
        label = req.routing_key or None
        if label is not None and (len(label) > 128 or " " in label):
            label = None
        self.queue.append(req)
        self.reference.enter(req, label)

    def oracle(self, req: Any) -> int:
        """Ask the cache for a hit without touching the request or the count."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = req.origin_input_ids + req.output_ids
        result = self.match(MatchPrefixParams(key=RadixKey(tokens, None)))
        return min(result.device_prefix_len, len(tokens) - 1)

    def run_pass(self, admit: int) -> None:
        policy = self.policy.routing_prefix
        before, expected = self.queries, self.reference.queries
        self.reference.sort(self.oracle)
        self.policy.calc_priority(self.queue)

        assert self.queue == self.reference.order()
        assert self.queries - before == self.reference.queries - expected

        can_run = self.queue[:admit]
        chunk = self.running[-1:]  # continues: in the batch, not in the queue
        for req in can_run:
            self._prefill(req)
        policy.admit(chunk + can_run)
        self.queue = self.queue[admit:]
        self.reference.admit([req.num_matched_prefix_tokens for req in can_run])
        self.running += can_run

        assert list(policy.labels) == self.reference.labels
        for name in COUNTS:
            assert policy.counters[name] == self.reference.counts[name], name

    def _prefill(self, req: Any) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        req.num_matched_prefix_tokens = self.oracle(req)
        tokens = req.origin_input_ids + req.output_ids
        missing = len(tokens) - self.allocator.available_size()
        if missing > 0:
            self.cache.evict(EvictParams(num_tokens=missing))
        value = self.allocator.alloc(len(tokens))
        result = self.cache.insert(
            InsertParams(key=RadixKey(tokens, None), value=value)
        )
        self.allocator.free(value[: result.prefix_len])

    def evict(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens))

    def retract(self, index: int) -> None:
        if self.running:
            req = self.running.pop(index % len(self.running))
            req.output_ids.append(7)
            req.reset_for_retract()
            self._enter(req)

    def abort(self, index: int) -> None:
        if self.queue:
            req = self.queue.pop(index % len(self.queue))
            self.reference.remove(req)


def drive(world: World, history: list[tuple[Any, ...]]) -> None:
    actions = {
        "arrive": world.arrive,
        "pass": world.run_pass,
        "evict": world.evict,
        "retract": world.retract,
        "abort": world.abort,
    }
    for name, *arguments in history:
        actions[name](*arguments)
    while world.queue:
        world.run_pass(1)
    world.run_pass(0)


@pytest.mark.parametrize("core", ["rust", "python"])
@settings(deadline=None, max_examples=60)
@given(history=histories, capacity=st.integers(1, 5))
def test_the_policy_is_the_algorithm(
    core: str, history: list[tuple[Any, ...]], capacity: int
) -> None:
    drive(World(core, capacity, None), history)


@settings(deadline=None, max_examples=60)
@given(history=histories, capacity=st.integers(1, 5), limit=st.integers(0, 4))
def test_the_bound_is_exact(
    history: list[tuple[Any, ...]], capacity: int, limit: int
) -> None:
    world = World("rust", capacity, limit)
    drive(world, history)

    assert not world.reference.queue


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("waiting", [128, 129, 400])
def test_twenty_recent_labels_cost_twenty_queries(core: str, waiting: int) -> None:
    world = World(core, 64, None)
    recent = [f"recent-{number}" for number in range(20)]
    for number, label in enumerate(recent):
        world.add(label, number + 2, 30)
    world.run_pass(20)
    for number in range(waiting - 20):
        world.add(f"cold-{number}", number + 30, 9)
    for number, label in enumerate(recent):
        world.add(label, number + 2, 40)
    asked = []
    for _ in range(2):
        before = world.queries
        world.run_pass(0)
        asked.append(world.queries - before)

    assert asked == [20, 0]
    assert sorted(req.routing_key for req in world.queue[:20]) == sorted(recent)


def test_the_index_does_not_keep_aborted_requests() -> None:
    world = World("rust", 4, None)
    world.arrive(2, 2, 9)
    world.run_pass(0)
    for number in range(500):
        world.add(f"gone-{number}", 2, 9)
        world.run_pass(0)
        world.abort(-1)
        world.run_pass(0)

    assert len(world.policy.routing_prefix._by_label) < 100
