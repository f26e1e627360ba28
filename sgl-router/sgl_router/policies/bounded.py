"""LBCH: consistent hashing on the trajectory label with a bound on load.

Algorithm 1 and equation 9 of arXiv:2611.16661.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from sgl_router.policies.base import (
    Choice,
    Policy,
    PolicyError,
    least_loaded,
    total_load,
)
from sgl_router.policies.ring import HashRing


class BoundedConsistentHashing(Policy):
    """Home worker while it is within the bound, else the first successor that is.

    A worker is eligible when its load is at most ``(total + 1) / workers * load_factor``
    over the workers in ``loads``. The walk goes clockwise from the home worker; when
    nobody is eligible (impossible with a factor of at least 1 and true counts) the
    request stays at home.

    Args:
        workers: URLs of the registered workers.
        load_factor: alpha, the allowed multiple of the mean load; finite, at least 1.
        balance_abs_threshold: requests a worker may be above the mean before the
            factor counts at all (0: the paper's rule). Keeps affinity at tiny loads.
    """

    name = "bounded_consistent_hashing"
    branches = ("home", "spill", "fallback", "unlabelled")

    def __init__(
        self,
        workers: Iterable[str] = (),
        *,
        load_factor: float = 1.25,
        balance_abs_threshold: float = 0.0,
    ) -> None:
        if not (math.isfinite(load_factor) and load_factor >= 1.0):
            raise PolicyError(
                f"lbch load factor: {load_factor!r} is not allowed; "
                "give a finite number of at least 1.0"
            )
        if not (math.isfinite(balance_abs_threshold) and balance_abs_threshold >= 0):
            raise PolicyError(
                f"lbch balance abs threshold: {balance_abs_threshold!r} is not "
                "allowed; give a finite number of requests, at least 0"
            )
        self.load_factor = load_factor
        self.balance_abs_threshold = balance_abs_threshold
        self._turn = 0
        super().__init__(workers)

    def update_workers(self, workers: Iterable[str]) -> None:
        workers = tuple(workers)
        self._ring = HashRing(workers)
        self._homes = {worker: Choice(worker, "home") for worker in workers}

    def home_shares(self) -> Mapping[str, float]:
        return self._ring.shares()

    def bound(self, loads: Mapping[str, int]) -> float:
        """The highest load that is still eligible, before the request is added."""
        mean = (total_load(loads) + 1) / len(loads)
        bound = mean * self.load_factor
        gap = self.balance_abs_threshold
        return max(bound, mean + gap) if gap else bound

    def choose(
        self, label: str | None, loads: Mapping[str, int], text: str | None = None
    ) -> Choice:
        if not loads:
            raise ValueError("loads: empty; at least one worker is needed")
        if label is None:
            self._turn += 1
            return Choice(least_loaded(loads, self._turn), "unlabelled")
        bound = self.bound(loads)
        home = None
        for worker in self._ring.order(label):
            load = loads.get(worker)
            if load is None:
                continue
            if load <= bound:
                return Choice(worker, "spill") if home else self._homes[worker]
            home = home or worker
        if home is None:
            raise ValueError(f"loads: no registered worker among {list(loads)}")
        return Choice(home, "fallback")
