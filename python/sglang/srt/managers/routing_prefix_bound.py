"""A bound on how often a waiting request may be overtaken by later ones."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def _sequence(req: Req) -> int:
    return req.routing_prefix_entry.sequence


class OvertakeBound:
    """Keeps any waiting request from being overtaken by more than ``limit`` later ones.

    Of two waiting requests the earlier one has been overtaken at least as often, so in
    any order only the earliest one left can be at its limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Sorted, and only what is later than the earliest request that waits.
        self._admitted: list[int] = []

    def admit(self, sequence: int) -> None:
        """Note that the request that entered as ``sequence`` left the queue."""
        insort(self._admitted, sequence)

    def reorder(self, waiting_queue: list[Req]) -> None:
        """Move a request forward to where its limit would otherwise be exceeded."""
        if not waiting_queue:
            self._admitted.clear()
            return
        earliest_first = sorted(waiting_queue, key=_sequence)
        self._forget_before(_sequence(earliest_first[0]))
        waiting_queue[:] = self._bounded(waiting_queue, earliest_first)

    def _forget_before(self, sequence: int) -> None:
        del self._admitted[: bisect_right(self._admitted, sequence)]

    def _bounded(self, preferred: list[Req], earliest_first: list[Req]) -> list[Req]:
        ahead = list(self._admitted)
        placed: list[Req] = []
        done: set[int] = set()
        wanted = iter(preferred)
        for earliest in earliest_first:
            while _sequence(earliest) not in done:
                overtaken = len(ahead) - bisect_right(ahead, _sequence(earliest))
                req = earliest
                if overtaken < self.limit:
                    req = next(r for r in wanted if _sequence(r) not in done)
                placed.append(req)
                done.add(_sequence(req))
                insort(ahead, _sequence(req))
        return placed
