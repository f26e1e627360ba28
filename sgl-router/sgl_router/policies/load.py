"""Policies that look at load or at nothing: they ignore the label."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from sgl_router.policies.base import Choice, Policy, least_loaded


class LeastLoad(Policy):
    """The worker with the fewest in-flight requests; equals take turns."""

    name = "least_load"
    branches = ("least_load",)

    def __init__(self, workers: Iterable[str] = ()) -> None:
        self._turn = -1
        super().__init__(workers)

    def choose(
        self, label: str | None, loads: Mapping[str, int], text: str | None = None
    ) -> Choice:
        self._turn += 1
        return Choice(least_loaded(loads, self._turn), "least_load")


class RoundRobin(Policy):
    """The workers in turn."""

    name = "round_robin"
    branches = ("next",)

    def __init__(self, workers: Iterable[str] = ()) -> None:
        self._turn = -1
        super().__init__(workers)

    def choose(
        self, label: str | None, loads: Mapping[str, int], text: str | None = None
    ) -> Choice:
        self._turn += 1
        workers = list(loads)
        return Choice(workers[self._turn % len(workers)], "next")


class Random(Policy):
    """A uniform draw from a generator seeded with ``seed``."""

    name = "random"
    branches = ("draw",)

    def __init__(self, workers: Iterable[str] = (), *, seed: int = 0) -> None:
        self._random = random.Random(seed)
        super().__init__(workers)

    def choose(
        self, label: str | None, loads: Mapping[str, int], text: str | None = None
    ) -> Choice:
        return Choice(self._random.choice(list(loads)), "draw")


class PowerOfTwo(Policy):
    """The less loaded of two workers drawn at random (the first when equal)."""

    name = "power_of_two"
    branches = ("less_loaded",)

    def __init__(self, workers: Iterable[str] = (), *, seed: int = 0) -> None:
        self._random = random.Random(seed)
        super().__init__(workers)

    def choose(
        self, label: str | None, loads: Mapping[str, int], text: str | None = None
    ) -> Choice:
        workers = list(loads)
        drawn = self._random.sample(workers, min(2, len(workers)))
        return Choice(min(drawn, key=loads.__getitem__), "less_loaded")
