"""Algorithm 2 of arXiv:2611.16661 as it is printed, and the bound on overtaking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Item:
    """A request as the algorithm sees it; ``request`` is the real one."""

    request: Any
    label: str | None
    queue_time: int
    delta: int = 1
    hit: int = 0
    overtaken: int = 0
    key: tuple[int, int, int] = (1, 0, 0)


@dataclass
class Reference:
    """The policy's state and its three stages, written for clarity alone."""

    capacity: int
    overtake_limit: int | None = None
    labels: list[str] = field(default_factory=list)
    queue: list[Item] = field(default_factory=list)
    clock: int = 0
    queries: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def enter(self, request: Any, label: str | None) -> None:
        self.clock += 1
        self.queue.append(Item(request, label, self.clock))

    def sort(self, prefix_hit: Callable[[Any], int]) -> None:
        for item in self.queue:
            if item.label in self.labels:
                if item.delta == 1:
                    item.hit = prefix_hit(item.request)
                    item.delta = 0
                    self.queries += 1
                item.key = (0, -item.hit, item.queue_time)
            else:
                item.key = (1, 0, item.queue_time)
        self.queue.sort(key=lambda item: item.key)
        if self.overtake_limit is not None:
            self.queue = self._bounded(self.queue, self.overtake_limit)

    @staticmethod
    def _bounded(preferred: list[Item], limit: int) -> list[Item]:
        """Take the first request whose turn would not push another over the limit."""
        left, order = list(preferred), []
        counts = {id(item): item.overtaken for item in left}

        def allowed(choice: Item) -> bool:
            return all(
                counts[id(item)] < limit
                for item in left
                if item.queue_time < choice.queue_time
            )

        while left:
            choice = next(item for item in left if allowed(item))
            left.remove(choice)
            order.append(choice)
            for item in left:
                counts[id(item)] += item.queue_time < choice.queue_time
        return order

    def admit(self, matched: list[int]) -> None:
        """Admit the first requests; ``matched`` is what each one hits by now."""
        count = len(matched)
        admitted, self.queue = self.queue[:count], self.queue[count:]
        for item, hit in zip(admitted, matched, strict=True):
            first_tier = item.key[0] == 0
            self.counts[f"admitted_{'first' if first_tier else 'second'}_tier"] += 1
            if first_tier and hit < item.hit:
                self.counts["stale_hits"] += 1
                self.counts["stale_tokens"] += item.hit - hit
            for other in self.queue:
                other.overtaken += other.queue_time < item.queue_time
            if item.label is not None:
                if item.label in self.labels:
                    self.labels.remove(item.label)
                self.labels.append(item.label)
                self.labels = self.labels[-self.capacity :]

    def remove(self, request: Any) -> None:
        self.queue = [item for item in self.queue if item.request is not request]

    def order(self) -> list[Any]:
        return [item.request for item in self.queue]
