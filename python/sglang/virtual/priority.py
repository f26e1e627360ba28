"""What ordering the waiting queue takes: counts, and the time they stand for.

Only the counts reach the virtual clock, so that equal runs stay equal on any machine.
A policy that matches prefixes goes over the prompts of all waiting requests in every
pass, looks some of them up in the cache, and may walk the cached tree. Policies that
match none (and lpm when its queue is too long) are charged nothing.

A worker that is simulated at a fraction of its size orders its queue less often,
because fewer requests come and go. Each of its calculations therefore stands for
several, see :func:`calculations_of`, and the counts are those of the whole worker but
for the length of its queue and the size of its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CacheAwarePolicy, SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

from sglang.virtual.cost import PassCost


class PriorityMeter:
    """Counts one scheduler's priority calculations.

    ``waiting_tokens`` are the prompt tokens of waiting requests, summed over passes;
    ``lookup_tokens`` those of prefix queries; ``walked_tokens`` what the tree held
    each time that it was walked: all three times the calculations that each one stands
    for. ``passes`` tells how many forward passes there have been.
    """

    def __init__(self, cost: PassCost, passes: Callable[[], int]) -> None:
        self._cost = cost
        self._passes = passes
        self._passes_before = 0
        self._inside = False
        self._looked_up = 0
        self._walked = 0
        self._due_ns = 0
        self.calls = 0
        self.waiting_tokens = 0.0
        self.lookup_tokens = 0.0
        self.walked_tokens = 0.0
        self.charged_ns = 0

    def attach(self, policy: SchedulePolicy) -> None:
        """Count what ``policy`` does from now on."""
        tree = policy.tree_cache
        tree.match_prefix = self._counting_lookup(tree.match_prefix)
        tree.dfs_weight_order = self._counting_walk(tree, tree.dfs_weight_order)
        policy.calc_priority = self._measuring(policy, policy.calc_priority)

    def take_ns(self) -> int:
        """Nanoseconds to charge for what was done since the last call."""
        due_ns, self._due_ns = self._due_ns, 0
        self.charged_ns += due_ns
        return due_ns

    def _measuring(
        self, policy: SchedulePolicy, calc_priority: Callable[..., None]
    ) -> Callable[..., None]:
        def measured(waiting_queue: list[Req], *args: Any, **kwargs: Any) -> None:
            waiting = _waiting_tokens(policy, waiting_queue)
            self._looked_up = self._walked = 0
            self._inside = True
            try:
                calc_priority(waiting_queue, *args, **kwargs)
            finally:
                self._inside = False
            self._count(waiting)

        return measured

    def _count(self, waiting: int) -> None:
        """Charge one calculation, and the others that it stands for."""
        passes = self._passes()
        since = max(1, passes - self._passes_before)
        self._passes_before = passes
        times = calculations_of(since, self._cost.scale)
        self.calls += 1
        self.waiting_tokens += times * waiting
        self.lookup_tokens += times * self._looked_up
        self.walked_tokens += times * self._walked
        self._due_ns += round(
            times * self._cost.priority_ns(waiting, self._looked_up, self._walked)
        )

    def _counting_lookup(self, match_prefix: Callable[..., Any]) -> Callable[..., Any]:
        def counted(params: Any) -> Any:
            if self._inside:
                self._looked_up += len(params.key)
            return match_prefix(params)

        return counted

    def _counting_walk(
        self, tree: BasePrefixCache, dfs_weight_order: Callable[..., list[int]]
    ) -> Callable[..., list[int]]:
        def counted(node_handles: Sequence[Any]) -> list[int]:
            self._walked += tree.full_evictable_size() + tree.full_protected_size()
            return dfs_weight_order(node_handles)

        return counted


def calculations_of(passes: int, scale: float) -> float:
    """Calculations of the whole worker in ``passes`` passes with one at ``scale``.

    What made the queue be ordered once at ``scale`` happens ``1 / scale`` times in the
    whole worker. At random, and with at most one calculation a pass, that many events
    fall into ``passes * (1 - (1 - 1 / passes) ** (1 / scale))`` different passes.
    """
    return passes * (1 - (1 - 1 / passes) ** (1 / scale))


def _waiting_tokens(policy: SchedulePolicy, waiting_queue: list[Req]) -> int:
    """Prompt tokens that the policy goes over, 0 unless it matches prefixes."""
    active = policy._determine_active_policy(waiting_queue)
    if policy.routing_prefix is None and not isinstance(active, CacheAwarePolicy):
        return 0
    return sum(len(req.origin_input_ids) + len(req.output_ids) for req in waiting_queue)
