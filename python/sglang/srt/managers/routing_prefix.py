"""Routing-prefix scheduling: prefill recently served trajectories first.

Algorithm 2 of arXiv:2611.16661. The requests of one trajectory share a label (the
routing key). A set A keeps the labels of the last admitted requests. Waiting requests
whose label is in A form the first tier and go by the prefix they hit, longest first;
the others keep their order. The prefix cache is asked once for each request, and only
when its label is in A.
"""

from __future__ import annotations

import logging
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang.srt.managers.routing_prefix_args import POLICY_NAME, resolve_settings

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
    and is the same on all ranks.
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

    def __iter__(self) -> Iterable[str]:
        """Yield the labels, least recent first."""
        return iter(self._labels)

    def touch(self, label: str) -> None:
        """Make ``label`` the most recent one (LRUUpdate)."""
        self._labels.pop(label, None)
        self._labels[label] = None
        if len(self._labels) > self.capacity:
            del self._labels[next(iter(self._labels))]


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
        done = set()
        wanted = iter(preferred)
        for earliest in earliest_first:
            while earliest not in done:
                overtaken = len(ahead) - bisect_right(ahead, _sequence(earliest))
                req = earliest
                if overtaken < self.limit:
                    req = next(r for r in wanted if r not in done)
                placed.append(req)
                done.add(req)
                insort(ahead, _sequence(req))
        return placed


def _sequence(req: Req) -> int:
    return req.routing_prefix_entry.sequence


class RoutingPrefix:
    """The policy of one scheduler: its label set, its order, its counters."""

    def __init__(
        self,
        capacity: int,
        overtake_limit: int | None = None,
        capacity_origin: str = "flag",
    ) -> None:
        self.labels = LabelSet(capacity)
        self.bound = None if overtake_limit is None else OvertakeBound(overtake_limit)
        self.capacity_origin = capacity_origin
        self._entries = 0
        self.counters = dict.fromkeys(COUNTERS, 0)

    def sort(self, waiting_queue: list[Req], prefix_hit: PrefixHit) -> None:
        """Score every waiting request and sort the queue (lines 1 to 12)."""
        labels = self.labels
        queries = 0
        for req in waiting_queue:
            entry = req.routing_prefix_entry
            if entry is None:
                entry = self._enter(req)
            if entry.label in labels:
                if entry.hit_tokens is None:
                    entry.hit_tokens = prefix_hit(req)
                    queries += 1
                entry.key = (0, -entry.hit_tokens, entry.sequence)
            else:
                entry.key = (1, 0, entry.sequence)
        waiting_queue.sort(key=_get_key)
        if self.bound is not None:
            self.bound.reorder(waiting_queue)
        self.counters["prefix_queries"] += queries
        self.counters["prefix_queries_saved"] += len(waiting_queue) - queries

    def _enter(self, req: Req) -> QueueEntry:
        """Give a request its place in the queue; entry order is list order."""
        label = label_of(req)
        valid = label is not None and is_valid_label(label)
        self._entries += 1
        entry = QueueEntry(self._entries, label if valid else None)
        req.routing_prefix_entry = entry
        if req.retraction_count == 0 and not req.rid.startswith(
            HEALTH_CHECK_RID_PREFIX
        ):
            self.counters["labelled" if valid else "unlabelled"] += 1
            self.counters["invalid_labels"] += label is not None and not valid
        return entry

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
                self.labels.touch(entry.label)

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
