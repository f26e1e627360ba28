"""The figures of the report against small batches worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_agent.records import Outcome
from sglang_agent.report import build_report, render_text
from sglang_agent.report.alarms import FlatReuse
from sglang_agent.report.imbalance import request_imbalance, unevenness
from sglang_agent.report.plots import write_plots
from sglang_agent.report.spans import counts, time_to

from .report_data import inference, job, trajectory

HUNDRED = [trajectory(f"s{i}", [], ended=float(i + 1)) for i in range(100)]


def test_completion_times_and_tails_of_equation_21() -> None:
    report = build_report(HUNDRED, {})
    assert (report.t90_s, report.t95_s, report.t100_s) == (90.0, 95.0, 100.0)
    assert (report.l5_s, report.l10_s) == (5.0, 10.0)
    assert report.makespan_s == 100.0


def test_time_counts_from_the_first_admission() -> None:
    late = [
        trajectory("a", [], ended=12.0, submitted_s=0.0, admitted_s=10.0),
        trajectory("b", [], ended=15.0, submitted_s=0.0, admitted_s=11.0),
    ]
    report = build_report(late, {})
    assert report.makespan_s == 5.0
    assert report.admission_wait_s.max == 11.0


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_the_share_is_reached_and_not_before(ends: list[float], percent: float) -> None:
    ends.sort()
    instant = time_to(percent, ends)
    needed = len(ends) * percent / 100 - 1e-6
    assert sum(end <= instant for end in ends) >= needed
    assert sum(end < instant for end in ends) < needed + 1e-5


def test_one_trajectory_worked_out_by_hand() -> None:
    stages = [
        inference(1, 0.0, 4.0, input_tokens=100, output_tokens=21, worker="w0"),
        job(1, 4.0, 5.0, 8.0),
        inference(2, 8.0, 10.0, input_tokens=200, cached_tokens=120, worker="w1"),
    ]
    report = build_report([trajectory("a", stages, ended=10.0)], {})
    assert report.turns == 2
    assert (report.input_tokens, report.cached_tokens) == (300, 120)
    assert report.new_prefill_tokens == 180
    assert report.reuse == pytest.approx(0.4)
    assert [row.reuse for row in report.by_turn] == [0.0, 0.6]
    assert [row.first_token_s.mean for row in report.by_turn] == [2.0, 1.0]
    assert [row.per_output_token_s.mean for row in report.by_turn] == [0.1, 0.1]
    assert report.inflight_inference.mean == pytest.approx(0.6)
    assert report.running_jobs.mean == pytest.approx(0.3)
    assert report.waiting_jobs.mean == pytest.approx(0.1)
    assert report.queue_s.mean == 1.0
    assert report.service_s.mean == 3.0
    assert report.first_token_s.mean == pytest.approx(1.5)
    assert report.per_output_token_s.max == pytest.approx(0.1)
    [server] = report.by_server
    assert (server.server, server.jobs) == ("sqlite", 1)
    assert [w.request_share for w in report.workers] == [0.5, 0.5]
    assert report.gamma == pytest.approx(10 / 32)
    assert report.beta is None  # never more than one request in flight


def test_imbalance_of_two_workers_is_the_papers() -> None:
    spans = {"w0": [(0.0, 10.0), (0.0, 5.0), (0.0, 5.0)], "w1": [(0.0, 5.0)]}
    # 0 to 5 s: |3 - 1| / 4 = 0.5; from 5 s on one request is left and does not count.
    assert request_imbalance(spans) == pytest.approx(0.5)
    assert unevenness([30.0, 10.0]) == pytest.approx(abs(30 - 10) / 40)


def test_a_worker_without_requests_counts_when_it_is_named() -> None:
    stages = [inference(1, 0.0, 1.0, worker="w0")]
    report = build_report([trajectory("a", stages, 1.0)], {"workers": ["w0", "w1"]})
    assert [w.requests for w in report.workers] == [1, 0]
    assert report.gamma == 1.0


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=8).filter(any))
def test_unevenness_is_the_sum_over_pairs(loads: list[int]) -> None:
    pairs = sum(abs(a - b) for place, a in enumerate(loads) for b in loads[place + 1 :])
    expected = pairs / ((len(loads) - 1) * sum(loads))
    assert unevenness([float(load) for load in loads]) == pytest.approx(expected)
    assert unevenness([5.0] * len(loads)) == 0.0
    assert unevenness([float(sum(loads))] + [0.0] * (len(loads) - 1)) == pytest.approx(
        1
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 50)), min_size=1
    )
)
def test_request_imbalance_agrees_with_sampling_every_second(
    requests: list[tuple[int, int, int]],
) -> None:
    spans: dict[str, list[tuple[float, float]]] = {str(w): [] for w in range(4)}
    for worker, start, length in requests:
        spans[str(worker)].append((float(start), float(start + length)))
    sampled = []
    for second in range(100):
        loads = [
            float(sum(start <= second < end for start, end in mine))
            for mine in spans.values()
        ]
        if sum(loads) > 1:
            sampled.append(unevenness(loads) or 0.0)
    expected = math.fsum(sampled) / len(sampled) if sampled else None
    assert request_imbalance(spans) == pytest.approx(expected)


def test_a_slot_handed_over_is_not_counted_twice() -> None:
    assert max(n for _, n in counts([(0.0, 1.0), (1.0, 2.0), (2.0, 2.0)])) == 1


def test_a_failure_is_never_a_score() -> None:
    records = [
        trajectory("a", [], 1.0, score=1.0),
        trajectory("b", [], 1.0, score=0.5),
        trajectory("c", [], 1.0, outcome=Outcome.GRADING, error="scorer broke"),
        trajectory("d", [], 1.0, outcome=Outcome.ENVIRONMENT, score=0.0),
        trajectory("e", [], 1.0),
    ]
    report = build_report(records, {})
    assert report.failed == {"environment": 1, "grading": 1}
    assert report.completed == 3
    assert report.scores == msgspec.structs.replace(
        report.scores, scored=2, unscored=3, mean=0.75
    )
    assert "mean 0.75 over 2, 3 unscored" in render_text(report)


def test_attempts_of_a_resumed_run_are_added_up() -> None:
    attempts = [
        {"started_at": 1000.0, "ended_at": 1030.0},
        {"started_at": 4630.0, "ended_at": 4650.0},
    ]
    report = build_report(HUNDRED, {"attempts": attempts})
    assert report.resumed
    assert report.attempts is not None
    assert report.attempts.active_s == 50.0
    assert report.attempts.gap_s == 3600.0
    assert report.attempts.wall_s == 3650.0
    assert "resumed: 2 attempts, 50.0 s at work" in render_text(report)
    assert not build_report(HUNDRED, {"attempts": attempts[:1]}).resumed


def test_the_tail_names_who_and_why() -> None:
    short = [trajectory(f"s{i}", [inference(1, 0, 1)], 1.0) for i in range(30)]
    long = trajectory(
        "long", [inference(turn, turn - 1, turn) for turn in range(1, 10)], 9.0
    )
    waiting = trajectory(
        "waiting", [inference(1, 0.0, 1.0), job(1, 1.0, 7.0, 8.0)], 8.0
    )
    late = trajectory("late", [inference(1, 6.0, 7.0)], 7.0, admitted_s=6.0)
    slow = trajectory("slow", [inference(1, 5.0, 6.9)], 6.9)
    dead = trajectory("dead", [], 6.5, outcome=Outcome.ENVIRONMENT, error="gone")
    report = build_report([*short * 2, long, waiting, late, slow, dead], {})
    ids = [sample.sample_id for sample in report.tail]
    assert ids == ["long", "waiting", "late", "slow"]
    why = {sample.sample_id: sample.why for sample in report.tail}
    assert why["long"] == "long: 9 turns, median 1; inference: 100% of its time"
    assert why["waiting"] == "waiting for an environment slot: 75% of its time"
    assert why["late"].startswith("waiting for admission: 86%")
    assert why["slow"] == "opening its environment: 72% of its time"
    assert report.opening_s.max == 6.5  # the dead one never got past it
    assert report.tail[1].last_stage == "environment job of turn 1 (sqlite)"


def test_broken_reuse_is_flagged_with_its_turn() -> None:
    def batch(cached: int) -> list[str]:
        records = [
            trajectory(
                f"s{i}",
                [
                    inference(1, 0, 1, cached_tokens=16),
                    inference(2, 1, 2, cached_tokens=cached),
                    inference(3, 2, 3, cached_tokens=cached),
                ],
                3.0,
            )
            for i in range(20)
        ]
        return build_report(records, {}).warnings

    [warning] = batch(0)
    assert "broken reuse: 0 cached tokens in all 40 requests from turn 2 on" in warning
    assert batch(80) == []


def test_reuse_that_stops_is_alarmed_within_fifty_turns() -> None:
    watch = FlatReuse()
    good = [inference(2, i, i + 1, cached_tokens=64, worker="w0") for i in range(100)]
    flat = [inference(2, i, i + 1, worker="w0") for i in range(50)]
    assert not any(map(watch.observe, good))
    lines = [watch.observe(stage) for stage in flat]
    assert lines[:49] == [None] * 49
    assert "stopped on worker w0" in (lines[49] or "")
    assert watch.alarms == 1
    assert watch.observe(flat[0]) is None  # one alarm, not one a turn


def test_first_turns_do_not_count_as_lost_reuse() -> None:
    watch = FlatReuse()
    assert not any(watch.observe(inference(1, i, i + 1)) for i in range(200))


def test_reuse_that_never_was_is_told_from_reuse_that_stopped() -> None:
    watch = FlatReuse(limit=3)
    lines = [watch.observe(inference(2, i, i + 1, worker="w1")) for i in range(3)]
    assert (lines[2] or "").startswith("no cache reuse on worker w1")
    assert "--enable-cache-report" in (lines[2] or "")


def test_labels_that_the_scheduler_saw() -> None:
    seen = {
        "w0": {"labelled": 40, "unlabelled": 0},
        "w1": {"labelled": 3, "unlabelled": 2},
    }
    report = build_report(HUNDRED, {"routing_prefix": seen})
    text = render_text(report)
    assert "worker w0: scheduler saw 40 labelled, 0 unlabelled requests" in text
    assert "warning: the scheduler saw 2 requests without a label" in text


def test_a_list_of_workers_in_other_words_says_nothing_of_idle_ones() -> None:
    stages = [inference(1, 0.0, 1.0, worker="id-0")]
    report = build_report([trajectory("a", stages, 1.0)], {"workers": ["w0", "w1"]})
    assert [w.worker for w in report.workers] == ["id-0"]
    assert report.gamma is None


def test_limits_changes_and_abandoned_jobs_are_shown() -> None:
    info = {
        "settings": {
            "sample_concurrency": 16,
            "env_concurrency": 2,
            "job_order": "caas",
        },
        "changes": [{"env_concurrency": 6}],
        "abandoned_jobs": [{}],
    }
    jobs = [trajectory(f"s{i}", [job(1, 0.0, 0.0, 1.0)], 2.0) for i in range(2)]
    text = render_text(build_report(jobs, info), width=120)
    assert "CS 16 (peak 2), CE 2 (peak 2), job order caas; changed 1 times" in text
    assert "1 environment jobs ignored their end" in text


def test_what_a_user_says_is_no_job() -> None:
    said = job(1, 1.0, 1.0, 1.0, operations=[], server=None)
    report = build_report([trajectory("a", [inference(1, 0, 1), said], 1.0)], {})
    assert report.by_server == []
    assert report.queue_s.count == 0


def test_an_empty_batch_and_json() -> None:
    report = build_report([], {"name": "nothing"})
    assert report.makespan_s == 0.0
    assert json.loads(msgspec.json.encode(report))["run"] == {"name": "nothing"}
    assert "0 completed, 0 failed" in render_text(report)


def test_names_are_text_and_not_markup() -> None:
    report = build_report([trajectory("[bold]x[/bold]", [], 1.0)], {})
    assert "[bold]x[/bold]" in render_text(report)


def test_plots_are_pictures(tmp_path: Path) -> None:
    stages = [inference(1, 0, 1), job(1, 1, 2, 3), inference(2, 3, 4)]
    records = [trajectory("a", stages, 4.0), *HUNDRED]
    paths = write_plots(build_report(records, {}), records, tmp_path / "plots")
    assert paths[0].name == "completion.png"
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000
