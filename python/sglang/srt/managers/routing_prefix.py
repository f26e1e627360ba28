"""Routing-prefix scheduling: prefill recently served trajectories first.

Algorithm 2 of arXiv:2611.16661. The requests of one trajectory share a label (the
routing key). A set A keeps the labels of the last admitted requests. Waiting requests
whose label is in A form the first tier and go by the prefix they hit, longest first;
the others keep their order. The prefix cache is asked once for each request, and only
when its label is in A.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang.srt.managers.routing_prefix_args import POLICY_NAME, resolve_settings
from sglang.srt.managers.routing_prefix_bound import OvertakeBound

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

MAX_LABEL_BYTES = 128

PrefixHit = Callable[["Req"], int]
"""Asks the prefix cache how many tokens of a request it holds."""

_get_key = attrgetter("routing_prefix_entry.key")


def label_of(req: Req) -> str | None:
    """Return the request's routing key, else its session id, else None."""
    if req.routing_key:
        return req.routing_key
    if req.session is not None:
        return req.session.session_id
    return req.session_id or None


def is_valid_label(label: str) -> bool:
    """Say whether a label is at most 128 bytes of visible ASCII."""
    return (
        len(label) <= MAX_LABEL_BYTES
        and label.isascii()
        and label.isprintable()
        and " " not in label
    )


class QueueEntry:
    """One stay of a request in the waiting queue.

    ``hit_tokens`` is None until the prefix cache was asked (the flag of Algorithm 2).
    ``sequence`` counts queue entries: it orders as the entry time does, but cannot tie
    and is the same on all ranks. ``key`` is the priority key.
    """

    __slots__ = ("hit_tokens", "key", "label", "sequence")

    def __init__(self, sequence: int, label: str | None) -> None:
        self.sequence = sequence
        self.label = label
        self.hit_tokens: int | None = None
        self.key: tuple[int, int, int] = (1, 0, sequence)

    @property
    def first_tier(self) -> bool:
        return self.key[0] == 0


class LabelSet:
    """The labels of recent admissions, at most ``capacity``, least recent dropped."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._labels: dict[str, None] = {}

    def __contains__(self, label: str | None) -> bool:
        return label in self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def __iter__(self) -> Iterator[str]:
        """Yield the labels, least recent first."""
        return iter(self._labels)

    def touch(self, label: str) -> list[str]:
        """Make ``label`` the most recent one (LRUUpdate).

        Returns the labels that came in or went out.
        """
        if label in self._labels:
            del self._labels[label]
            self._labels[label] = None
            return []
        self._labels[label] = None
        if len(self._labels) <= self.capacity:
            return [label]
        oldest = next(iter(self._labels))
        del self._labels[oldest]
        return [label, oldest]


class RoutingPrefix:
    """The policy of one scheduler: its label set, its order, its counters.

    The waiting queue stays sorted between passes: others only append to it or remove
    from it. So a pass looks at the requests that are new and at those whose label came
    into the set or went out of it, and leaves the rest alone.
    """

    def __init__(
        self,
        capacity: int,
        overtake_limit: int | None = None,
        capacity_origin: str = "flag",
    ) -> None:
        self.labels = LabelSet(capacity)
        self.bound = None if overtake_limit is None else OvertakeBound(overtake_limit)
        self.capacity_origin = capacity_origin
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._entries = 0
        self._by_label: dict[str, list[QueueEntry]] = {}
        # Labels whose membership changed since the last pass, as an ordered set.
        self._changed: dict[str, None] = {}

    def sort(self, waiting_queue: list[Req], prefix_hit: PrefixHit) -> None:
        """Score the waiting requests and sort the queue (lines 1 to 12)."""
        new = _take_new(waiting_queue)
        if self.bound is not None:
            waiting_queue.sort(key=_get_key)
        moving = self._take_changed(waiting_queue) + new
        for req in new:
            self._enter(req)
        queries = sum(self._score(req, prefix_hit) for req in moving)
        for req in moving:
            insort(waiting_queue, req, key=_get_key)
        if self.bound is not None:
            self.bound.reorder(waiting_queue)
        self._forget_aborted(waiting_queue)
        self.counters["prefix_queries"] += queries
        self.counters["prefix_queries_saved"] += len(waiting_queue) - queries

    def _enter(self, req: Req) -> None:
        """Give a request its place in the order of entry."""
        label = label_of(req)
        valid = label is not None and is_valid_label(label)
        self._entries += 1
        entry = QueueEntry(self._entries, label if valid else None)
        req.routing_prefix_entry = entry
        self._index(entry)
        if req.retraction_count == 0 and not req.rid.startswith(
            HEALTH_CHECK_RID_PREFIX
        ):
            self.counters["labelled" if valid else "unlabelled"] += 1
            self.counters["invalid_labels"] += label is not None and not valid

    def _take_changed(self, waiting_queue: list[Req]) -> list[Req]:
        """Take the requests out of the queue that change tier, in queue order."""
        entries = [
            entry
            for label in self._changed
            for entry in self._by_label.get(label, ())
            if (label in self.labels) != entry.first_tier
        ]
        self._changed.clear()
        entries.sort(key=attrgetter("key"))
        taken = (_take(waiting_queue, entry) for entry in entries)
        return [req for req in taken if req is not None]

    def _forget_aborted(self, waiting_queue: list[Req]) -> None:
        """Rebuild the index when most of it belongs to requests that were aborted."""
        if len(self._by_label) <= 2 * len(waiting_queue) + 64:
            return
        self._by_label.clear()
        for req in waiting_queue:
            self._index(req.routing_prefix_entry)

    def _index(self, entry: QueueEntry) -> None:
        if entry.label is not None:
            self._by_label.setdefault(entry.label, []).append(entry)

    def _score(self, req: Req, prefix_hit: PrefixHit) -> bool:
        """Set the priority key; return whether the prefix cache was asked."""
        entry = req.routing_prefix_entry
        if entry.label not in self.labels:
            entry.key = (1, 0, entry.sequence)
            return False
        asked = entry.hit_tokens is None
        if asked:
            entry.hit_tokens = prefix_hit(req)
        entry.key = (0, -entry.hit_tokens, entry.sequence)
        return asked

    def admit(self, can_run_list: list[Req]) -> None:
        """Update the label set with the admitted requests (lines 14 to 16).

        A request that continues a chunked prefill left the queue before and is not
        admitted again. A pass that admits nothing was blocked by the queue's head.
        """
        if not can_run_list:
            self.counters["blocked_passes"] += 1
        for req in can_run_list:
            entry = req.routing_prefix_entry
            if entry is None:
                continue
            req.routing_prefix_entry = None
            self._count_admission(entry, req.num_matched_prefix_tokens)
            if self.bound is not None:
                self.bound.admit(entry.sequence)
            if entry.label is not None:
                self._leave(entry)
                self._changed.update(dict.fromkeys(self.labels.touch(entry.label)))

    def _leave(self, entry: QueueEntry) -> None:
        waiting = self._by_label[entry.label]
        waiting.remove(entry)
        if not waiting:
            del self._by_label[entry.label]

    def _count_admission(self, entry: QueueEntry, matched_tokens: int) -> None:
        if not entry.first_tier:
            self.counters["admitted_second_tier"] += 1
            return
        self.counters["admitted_first_tier"] += 1
        lost = entry.hit_tokens - matched_tokens
        if lost > 0:
            self.counters["stale_hits"] += 1
            self.counters["stale_tokens"] += lost

    def snapshot(self) -> dict[str, Any]:
        """Return settings and counters, for ``/server_info``; no label is in it."""
        return {
            "capacity": self.labels.capacity,
            "capacity_origin": self.capacity_origin,
            "overtake_limit": None if self.bound is None else self.bound.limit,
            "labels_held": len(self.labels),
            **self.counters,
        }


def _take_new(waiting_queue: list[Req]) -> list[Req]:
    """Take the requests out of the queue that have not been in a pass yet.

    They are at its end, in order of entry; a request that yielded an optimistic prefill
    is at its front.
    """
    first, last = 0, len(waiting_queue)
    while first < last and waiting_queue[first].routing_prefix_entry is None:
        first += 1
    while last > first and waiting_queue[last - 1].routing_prefix_entry is None:
        last -= 1
    new = waiting_queue[:first] + waiting_queue[last:]
    del waiting_queue[last:], waiting_queue[:first]
    return new


def _take(waiting_queue: list[Req], entry: QueueEntry) -> Req | None:
    """Take the request of ``entry`` out of the sorted queue; None if it has left."""
    at = bisect_left(waiting_queue, entry.key, key=_get_key)
    if at == len(waiting_queue):
        return None
    req = waiting_queue[at]
    if req.routing_prefix_entry is not entry:
        return None
    del waiting_queue[at]
    return req


COUNTERS = {
    "labelled": "Requests that entered the waiting queue with a label.",
    "unlabelled": "Requests that entered the waiting queue without a valid label.",
    "invalid_labels": "Unlabelled requests whose label was too long or not ASCII.",
    "admitted_first_tier": "Admitted requests whose label was in the label set.",
    "admitted_second_tier": "Admitted requests whose label was not in the label set.",
    "prefix_queries": "Prefix queries made to order the waiting queue.",
    "prefix_queries_saved": (
        "Prefix queries that matching every waiting request in every pass would have "
        "made on top."
    ),
    "stale_hits": "Admitted requests that hit less than was recorded for them.",
    "stale_tokens": "Tokens by which recorded hits exceeded the actual ones.",
    "blocked_passes": "Passes that admitted nothing: the head of the queue did not fit.",
}
"""Counts since start, with their descriptions."""

GAUGES = {
    "capacity": "Labels that the label set can hold.",
    "labels_held": "Labels of recently admitted requests that the label set holds.",
}
"""Levels, with their descriptions."""


def create_routing_prefix(
    policy: str, max_running_requests: int | None
) -> RoutingPrefix | None:
    """Return the policy's state as configured, or None for another policy."""
    if policy != POLICY_NAME:
        return None
    settings = resolve_settings(max_running_requests)
    logger.info(
        "Routing-prefix scheduling: capacity %d (%s), overtake limit %s",
        settings.capacity,
        settings.capacity_origin,
        settings.overtake_limit,
    )
    return RoutingPrefix(
        settings.capacity, settings.overtake_limit, settings.capacity_origin
    )


def falls_back_to_fcfs(policy: str, prefix_cache_disabled: bool) -> bool:
    """Say whether the policy has no prefix cache to ask, and log it."""
    if policy != POLICY_NAME or not prefix_cache_disabled:
        return False
    logger.warning(
        "--schedule-policy routing-prefix needs the prefix cache, which is disabled; "
        "falling back to fcfs"
    )
    return True
