"""The hash ring: 150 virtual nodes a worker, placed by blake3.

A worker's virtual node ``v`` sits at the first 8 bytes, read little-endian, of
``blake3("{url}#{v}")``; a label at the same of ``blake3(label)``. The home worker is
the first one at or after the label's position, clockwise. The shepherd model gateway
(smg) places nodes and keys the same way, so all gateways agree on homes without
talking to each other.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache

from blake3 import blake3

VIRTUAL_NODES = 150
"""Virtual nodes of each worker."""

RING = 2**64
"""Positions on the ring."""

REMEMBERED_LABELS = 4096
"""Labels whose order of workers is kept ready."""


def ring_position(text: str) -> int:
    """Place on the ring, 0 to 2**64 - 1."""
    return int.from_bytes(blake3(text.encode()).digest(length=8), "little")


class HashRing:
    """The ring of one set of workers; immutable, order of arrival irrelevant."""

    def __init__(self, workers: Iterable[str]) -> None:
        nodes = sorted(
            (ring_position(f"{worker}#{node}"), worker)
            for worker in dict.fromkeys(workers)
            for node in range(VIRTUAL_NODES)
        )
        self._positions = [position for position, _ in nodes]
        self._owners = [worker for _, worker in nodes]
        self.order = lru_cache(maxsize=REMEMBERED_LABELS)(self._order)
        """:meth:`_order` with the last labels remembered."""

    def _order(self, label: str) -> tuple[str, ...]:
        """Every worker once, clockwise from the label's home worker."""
        return tuple(dict.fromkeys(self._walk(ring_position(label))))

    def shares(self) -> dict[str, float]:
        """Each worker's part of the ring: the labels it is home to, in expectation.

        Chance leaves them uneven; of two workers, 10% of pairs of URLs have one with
        more than 54.8% (test_router_ring.py).
        """
        arcs = dict.fromkeys(self._owners, 0)
        # The first node's arc begins at the last one, across the end of the ring.
        before = [self._positions[-1:], self._positions[:-1]]
        for owner, start, end in zip(
            self._owners, itertools.chain(*before), self._positions, strict=True
        ):
            arcs[owner] += (end - start) % RING
        return {worker: arc / RING for worker, arc in arcs.items()}

    def _walk(self, position: int) -> Iterator[str]:
        start = bisect_left(self._positions, position)
        yield from self._owners[start:]
        yield from self._owners[:start]
