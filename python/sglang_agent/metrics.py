"""The runner's Prometheus metrics; no label of a trajectory is ever a metric label."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_agent.progress import Facts
from sglang_agent.records import EnvironmentStage, TrajectoryRecord
from sglang_agent.report.alarms import FlatReuse
from sglang_agent.state import Stage
from sglang_agent.watch import LoopWatch, StallWatch

PREFIX = "sglang_agent"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class RunMetrics:
    """Reads gauges when asked and observes durations as samples finish."""

    def __init__(
        self, facts: Facts, loop: LoopWatch, stalls: StallWatch, reuse: FlatReuse
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Levels(facts, loop, stalls, reuse))
        self._turn = self._histogram("turn_seconds", "Duration of inference turns.")
        self._queue = self._histogram(
            "env_job_queue_seconds", "Time environment jobs waited for a slot."
        )
        self._run = self._histogram(
            "env_job_run_seconds", "Time environment jobs held a slot."
        )

    def observe(self, record: TrajectoryRecord) -> None:
        """Take in the stages of a finished sample."""
        for stage in record.stages:
            if isinstance(stage, EnvironmentStage):
                self._queue.observe(stage.started_s - stage.queued_s)
                self._run.observe(stage.ended_s - stage.started_s)
            else:
                self._turn.observe(stage.end_s - stage.start_s)

    def render(self) -> bytes:
        """Return the metrics in the text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"{PREFIX}_{name}", text, registry=self._registry, buckets=SECONDS
        )


class _Levels(Collector):
    """What can be read off the gates and the state at any moment."""

    def __init__(
        self, facts: Facts, loop: LoopWatch, stalls: StallWatch, reuse: FlatReuse
    ) -> None:
        self._facts = facts
        self._loop = loop
        self._stalls = stalls
        self._reuse = reuse

    def collect(self) -> Iterable[Metric]:
        facts, state = self._facts, self._facts.state
        samples = facts.admission.statistics()
        jobs = facts.actions.statistics()
        yield _gauge("sample_concurrency", "The limit CS.", samples.capacity)
        yield _gauge("samples_active", "Admitted, not yet over.", samples.running)
        yield _gauge("samples_waiting", "Not yet admitted.", samples.waiting)
        yield _gauge("samples_restored", "Done by earlier attempts.", state.restored)
        yield _gauge("env_concurrency", "The limit CE.", jobs.capacity)
        yield _gauge("env_jobs_running", "Environment jobs in a slot.", jobs.running)
        yield _gauge("env_jobs_waiting", "Jobs waiting for a slot.", jobs.waiting)
        yield _gauge(
            "inference_in_flight", "Turns in flight.", state.count(Stage.INFERENCE)
        )
        yield _gauge(
            "event_loop_lag_seconds", "Present lag of the loop.", self._loop.lag_s()
        )
        yield _gauge(
            "event_loop_lag_worst_seconds", "Worst lag so far.", self._loop.worst_s
        )
        yield _counter("turns", "Inference turns completed.", state.turns)
        yield _counter("env_jobs_abandoned", "Jobs left behind.", jobs.abandoned)
        yield _counter(
            "reuse_alarms", "Workers whose cache reuse stopped.", self._reuse.alarms
        )
        yield _counter("stall_warnings", "Stall warnings.", self._stalls.warnings)
        finished = CounterMetricFamily(
            f"{PREFIX}_samples_finished",
            "Samples over, by outcome.",
            labels=["outcome"],
        )
        for outcome, count in sorted(state.outcomes.items()):
            finished.add_metric([outcome], count)
        yield finished


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)
