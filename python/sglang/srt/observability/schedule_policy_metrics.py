"""What the waiting-queue policy costs and does, for Prometheus."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_policy import SchedulePolicy

Method = TypeVar("Method", bound=Callable[..., Any])


def measure_priority_time(calc_priority: Method) -> Method:
    """Add the CPU seconds of every call to the policy's ``priority_seconds``."""

    @functools.wraps(calc_priority)
    def measured(policy: SchedulePolicy, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return calc_priority(policy, *args, **kwargs)
        finally:
            policy.priority_seconds += time.thread_time() - start

    return measured


class SchedulePolicyMetrics:
    """Counters of one scheduler's policy, brought up to date by :meth:`log`.

    The policy keeps plain numbers, so that its passes do not pay for metrics.
    """

    def __init__(
        self, labels: dict[str, str], counter_cls: Any, gauge_cls: Any
    ) -> None:
        self._labels = labels
        self._counter_cls = counter_cls
        self._gauge_cls = gauge_cls
        self._logged: dict[str, float] = {}
        self._counters: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        self._policy: SchedulePolicy | None = None
        self._seconds = counter_cls(
            name="sglang:schedule_priority_seconds_total",
            documentation="CPU seconds spent ordering the waiting queue.",
            labelnames=labels.keys(),
        )

    def watch(self, policy: SchedulePolicy) -> None:
        """Take the figures from ``policy`` from now on."""
        self._policy = policy
        self._logged.clear()
        if policy.routing_prefix is not None and not self._counters:
            self._add_routing_prefix()

    def _add_routing_prefix(self) -> None:
        from sglang.srt.managers.routing_prefix import COUNTERS, GAUGES

        for name, text in COUNTERS.items():
            self._counters[name] = self._counter_cls(
                name=f"sglang:routing_prefix_{name}_total",
                documentation=text,
                labelnames=self._labels.keys(),
            )
        for name, text in GAUGES.items():
            self._gauges[name] = self._gauge_cls(
                name=f"sglang:routing_prefix_{name}",
                documentation=text,
                labelnames=self._labels.keys(),
                multiprocess_mode="mostrecent",
            )

    def log(self) -> None:
        """Add what happened since the last call."""
        if self._policy is None:
            return
        self._add("seconds", self._seconds, self._policy.priority_seconds)
        if self._policy.routing_prefix is None:
            return
        state = self._policy.routing_prefix.snapshot()
        for name, counter in self._counters.items():
            self._add(name, counter, state[name])
        for name, gauge in self._gauges.items():
            gauge.labels(**self._labels).set(state[name])

    def _add(self, name: str, counter: Any, total: float) -> None:
        counter.labels(**self._labels).inc(total - self._logged.get(name, 0))
        self._logged[name] = total
