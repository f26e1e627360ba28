"""Cache-aware routing: guess from the prompt text which worker holds the prefix.

When loads are unbalanced take the least loaded worker; otherwise the worker that was
sent the longest matching prefix, if that covers enough of the prompt; otherwise the
least loaded one. Prefixes are remembered as a chain of hashes over blocks of characters
instead of a radix tree, so a match is exact to one block.

Of several workers that were sent the same prefix, the least loaded one is taken, as smg
does. SGLang's own gateway takes the one that was sent it first: with a system prompt
that makes up enough of a first request, every new conversation goes to one worker until
the loads are unbalanced. ``first_holder`` gives that rule, to compare with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from sgl_router.policies.base import Choice, Policy, PolicyError, least_loaded

BLOCK_CHARACTERS = 64
"""Characters hashed at a time: the granularity of a match."""


class CacheAware(Policy):
    """Longest remembered prefix, unless the loads are too far apart.

    Args:
        workers: URLs of the registered workers.
        cache_threshold: share of the prompt (0 to 1) that must match.
        balance_abs_threshold: requests between the most and the least loaded worker
            that must be exceeded before affinity is given up.
        balance_rel_threshold: multiple of the least load that must be exceeded too.
        max_tree_size: characters remembered over all workers; the least recently
            used blocks are dropped.
        first_holder: of equal matches take the worker that was sent the prefix first.
    """

    name = "cache_aware"
    branches = ("prefix", "miss", "imbalance")
    needs_text = True

    def __init__(
        self,
        workers: Iterable[str] = (),
        *,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        max_tree_size: int = 2**26,
        first_holder: bool = False,
    ) -> None:
        if not 0.0 <= cache_threshold <= 1.0:
            raise PolicyError(
                f"cache threshold: {cache_threshold!r} is not allowed; give 0.0 to 1.0"
            )
        if max_tree_size < BLOCK_CHARACTERS:
            raise PolicyError(
                f"max tree size: {max_tree_size!r} is not allowed; "
                f"give at least {BLOCK_CHARACTERS} characters"
            )
        self.cache_threshold = cache_threshold
        self.balance_abs_threshold = balance_abs_threshold
        self.balance_rel_threshold = balance_rel_threshold
        self._max_blocks = max_tree_size // BLOCK_CHARACTERS
        self._first_holder = first_holder
        self._holders: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._firsts: dict[int, str] = {}
        self._turn = 0
        super().__init__(workers)

    def update_workers(self, workers: Iterable[str]) -> None:
        known = frozenset(workers)
        for entry in [entry for entry in self._holders if entry[0] not in known]:
            del self._holders[entry]
            self._forget_first(*entry)

    def choose(
        self, label: str | None, loads: Mapping[str, int], text: str | None = None
    ) -> Choice:
        blocks = list(_block_hashes(text or ""))
        choice = self._choose(loads, blocks)
        self._remember(choice.worker, blocks)
        return choice

    def _choose(self, loads: Mapping[str, int], blocks: list[int]) -> Choice:
        self._turn += 1
        lowest, highest = min(loads.values()), max(loads.values())
        if (
            highest - lowest > self.balance_abs_threshold
            and highest > self.balance_rel_threshold * lowest
        ):
            return Choice(least_loaded(loads, self._turn), "imbalance")
        matched = {worker: self._matched(worker, blocks) for worker in loads}
        best = max(matched.values())
        if not blocks or best == 0 or best < self.cache_threshold * len(blocks):
            return Choice(least_loaded(loads, self._turn), "miss")
        holders = {worker: loads[worker] for worker, n in matched.items() if n == best}
        first = self._firsts.get(blocks[best - 1])
        if first in holders:
            return Choice(first, "prefix")
        return Choice(least_loaded(holders, self._turn), "prefix")

    def _matched(self, worker: str, blocks: list[int]) -> int:
        """Leading blocks that ``worker`` was sent."""
        for count, block in enumerate(blocks):
            if (worker, block) not in self._holders:
                return count
        return len(blocks)

    def _remember(self, worker: str, blocks: list[int]) -> None:
        for block in reversed(blocks):  # the head is dropped last
            self._holders[worker, block] = None
            self._holders.move_to_end((worker, block))
            if self._first_holder:
                self._firsts.setdefault(block, worker)
        while len(self._holders) > self._max_blocks:
            dropped, _ = self._holders.popitem(last=False)
            self._forget_first(*dropped)

    def _forget_first(self, worker: str, block: int) -> None:
        if self._firsts.get(block) == worker:
            del self._firsts[block]


def _block_hashes(text: str) -> Iterator[int]:
    """One hash per full block, each covering everything before it too."""
    chained = 0
    for start in range(0, len(text) - BLOCK_CHARACTERS + 1, BLOCK_CHARACTERS):
        chained = hash((chained, text[start : start + BLOCK_CHARACTERS]))
        yield chained
