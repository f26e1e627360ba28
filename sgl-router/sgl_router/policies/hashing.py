"""Consistent hashing without a load bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sgl_router.policies.base import Choice, Policy, least_loaded
from sgl_router.policies.ring import HashRing


class ConsistentHashing(Policy):
    """Every request of a label goes to its home worker, whatever the load.

    The first worker of ``loads`` clockwise from the label. Requests without a label
    go to the least loaded worker.
    """

    name = "consistent_hashing"
    branches = ("home", "unlabelled")

    def __init__(self, workers: Iterable[str] = ()) -> None:
        self._turn = 0
        super().__init__(workers)

    def update_workers(self, workers: Iterable[str]) -> None:
        self._ring = HashRing(workers)

    def home_shares(self) -> Mapping[str, float]:
        return self._ring.shares()

    def choose(
        self, label: str | None, loads: Mapping[str, int], text: str | None = None
    ) -> Choice:
        if label is None:
            self._turn += 1
            return Choice(least_loaded(loads, self._turn), "unlabelled")
        for worker in self._ring.order(label):
            if worker in loads:
                return Choice(worker, "home")
        raise ValueError(f"loads: no registered worker among {list(loads)}")
