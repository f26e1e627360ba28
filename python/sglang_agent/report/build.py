"""From the records of a run to its report."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Outcome,
    TrajectoryRecord,
)
from sglang_agent.report.alarms import broken_reuse, flat_reuse
from sglang_agent.report.imbalance import request_imbalance, unevenness
from sglang_agent.report.model import (
    Attempts,
    Report,
    Scores,
    ServerTimes,
    TurnFigures,
    WorkerShare,
)
from sglang_agent.report.spans import Span, concurrency, spread, time_to
from sglang_agent.report.stages import inferences, jobs
from sglang_agent.report.tail import opening_s, tail_samples, turns_of


def build_report(
    records: Sequence[TrajectoryRecord],
    run_info: Mapping[str, Any],
    warnings: Sequence[str] = (),
) -> Report:
    """Compute the report of a batch; ``warnings`` are shown with those found here.

    ``run_info`` is kept as ``run`` and may hold, among what the caller likes to
    keep with the figures: ``settings``, the run's resolved settings; ``attempts``, a list of ``{"started_at", "ended_at"}`` in
    seconds of one wall clock, one per start of the run; ``workers``, the names of
    all workers, so that idle ones count as well; ``routing_prefix``, per worker
    ``{"labelled", "unlabelled"}``, how many requests the scheduler saw with and
    without a label; ``changes``, limits that were changed while it ran;
    ``abandoned_jobs``; ``warnings``, lines that the run itself wants shown.
    """
    origin = min((record.admitted_s for record in records), default=0.0)
    ends = sorted(record.ended_s - origin for record in records)
    makespan = ends[-1] if ends else 0.0
    attempts = _attempts(run_info.get("attempts", ()))
    return Report(
        **_outcomes(records),
        resumed=attempts is not None and attempts.count > 1,
        attempts=attempts,
        makespan_s=makespan,
        **_completion(ends),
        **_tokens(inferences(records)),
        **_inference(records, makespan, run_info.get("workers", ())),
        **_environment(records, makespan),
        turns_per_trajectory=spread(turns_of(record) for record in records),
        admission_wait_s=spread(r.admitted_s - r.submitted_s for r in records),
        opening_s=spread(map(opening_s, records)),
        active_samples=concurrency(
            [(r.admitted_s, r.ended_s) for r in records], makespan
        ),
        tail=tail_samples(records, origin),
        warnings=[*warnings, *_warnings(records, run_info)],
        run=dict(run_info),
    )


def _outcomes(records: Sequence[TrajectoryRecord]) -> dict[str, Any]:
    failed = Counter(
        str(record.outcome)
        for record in records
        if record.outcome is not Outcome.COMPLETED
    )
    scores = [
        record.score
        for record in records
        if record.outcome is Outcome.COMPLETED and record.score is not None
    ]
    mean = math.fsum(scores) / len(scores) if scores else None
    return {
        "samples": len(records),
        "completed": len(records) - failed.total(),
        "failed": dict(sorted(failed.items())),
        "scores": Scores(len(scores), len(records) - len(scores), mean),
    }


def _completion(ends: Sequence[float]) -> dict[str, Any]:
    """t_q for four q, and equation 21."""
    reached = {percent: time_to(percent, ends) for percent in (50, 90, 95, 100)}
    return {
        **{f"t{percent}_s": instant for percent, instant in reached.items()},
        "l5_s": reached[100] - reached[95],
        "l10_s": reached[100] - reached[90],
    }


def _attempts(attempts: Iterable[Mapping[str, float]]) -> Attempts | None:
    spans = sorted((a["started_at"], a["ended_at"]) for a in attempts)
    if not spans:
        return None
    active = math.fsum(end - start for start, end in spans)
    wall = spans[-1][1] - spans[0][0]
    return Attempts(len(spans), active, max(wall - active, 0.0), wall)


def _tokens(stages: Sequence[InferenceStage]) -> dict[str, Any]:
    by_turn: dict[int, list[InferenceStage]] = defaultdict(list)
    for stage in stages:
        by_turn[stage.turn].append(stage)
    totals = _reuse(stages)
    return {
        "turns": len(stages),
        **totals,
        "output_tokens": sum(stage.output_tokens for stage in stages),
        "by_turn": [
            TurnFigures(turn, len(same), **_reuse(same), **_token_times(same))
            for turn, same in sorted(by_turn.items())
        ],
    }


def _reuse(stages: Sequence[InferenceStage]) -> dict[str, Any]:
    given = sum(stage.input_tokens for stage in stages)
    cached = sum(stage.cached_tokens for stage in stages)
    return {
        "input_tokens": given,
        "cached_tokens": cached,
        "new_prefill_tokens": given - cached,
        "reuse": cached / given if given else None,
    }


def _inference(
    records: Sequence[TrajectoryRecord], makespan: float, workers: Iterable[str]
) -> dict[str, Any]:
    stages = inferences(records)
    return {
        "inflight_inference": concurrency(_spans(stages), makespan),
        "inference_s": spread(stage.end_s - stage.start_s for stage in stages),
        **_token_times(stages),
        "retried_turns": sum(stage.attempts > 1 for stage in stages),
        **_workers(stages, workers),
    }


def _token_times(stages: Sequence[InferenceStage]) -> dict[str, Any]:
    """Time to the first token and between the others, of those that were streamed."""
    firsts = [
        (stage, stage.first_token_s)
        for stage in stages
        if stage.first_token_s is not None
    ]
    return {
        "first_token_s": spread(first - stage.start_s for stage, first in firsts),
        "per_output_token_s": spread(
            (stage.end_s - first) / (stage.output_tokens - 1)
            for stage, first in firsts
            if stage.output_tokens > 1
        ),
    }


def _workers(stages: Sequence[InferenceStage], names: Iterable[str]) -> dict[str, Any]:
    """Shares, beta and gamma, from the requests whose worker is known."""
    by_worker: dict[str, list[InferenceStage]] = defaultdict(list)
    for stage in stages:
        if stage.worker is not None:
            by_worker[stage.worker].append(stage)
    listed = set(names)
    # A gateway may name workers in another way than it lists them; then the list
    # does not say which of them were idle.
    if by_worker.keys() <= listed:
        by_worker.update({name: [] for name in listed - by_worker.keys()})
    known = sum(map(len, by_worker.values()))
    shares = [_share(name, by_worker[name], known) for name in sorted(by_worker)]
    spans = {name: _spans(mine) for name, mine in by_worker.items()}
    return {
        "workers": shares,
        "beta": request_imbalance(spans),
        "gamma": unevenness([float(share.output_tokens) for share in shares]),
    }


def _share(name: str, stages: Sequence[InferenceStage], total: int) -> WorkerShare:
    reuse = _reuse(stages)
    return WorkerShare(
        worker=name,
        requests=len(stages),
        request_share=len(stages) / total if total else 0.0,
        input_tokens=reuse["input_tokens"],
        cached_tokens=reuse["cached_tokens"],
        output_tokens=sum(stage.output_tokens for stage in stages),
        reuse=reuse["reuse"],
        inference_s=spread(stage.end_s - stage.start_s for stage in stages),
    )


def _environment(
    records: Sequence[TrajectoryRecord], makespan: float
) -> dict[str, Any]:
    all_jobs = jobs(records)
    by_server: dict[str, list[EnvironmentStage]] = defaultdict(list)
    for job in all_jobs:
        by_server[job.server or "unnamed"].append(job)
    return {
        "running_jobs": concurrency(
            [(j.started_s, j.ended_s) for j in all_jobs], makespan
        ),
        "waiting_jobs": concurrency(
            [(j.queued_s, j.started_s) for j in all_jobs], makespan
        ),
        "queue_s": spread(job.started_s - job.queued_s for job in all_jobs),
        "service_s": spread(job.ended_s - job.started_s for job in all_jobs),
        "by_server": [_server(name, by_server[name]) for name in sorted(by_server)],
    }


def _server(name: str, jobs: Sequence[EnvironmentStage]) -> ServerTimes:
    return ServerTimes(
        server=name,
        jobs=len(jobs),
        failed=sum(job.error is not None for job in jobs),
        queue_s=spread(job.started_s - job.queued_s for job in jobs),
        service_s=spread(job.ended_s - job.started_s for job in jobs),
    )


def _warnings(
    records: Sequence[TrajectoryRecord], run_info: Mapping[str, Any]
) -> list[str]:
    broken = broken_reuse(records)
    # A batch without any reuse is one fact, not one alarm for every worker.
    found = [broken] if broken else flat_reuse(records)
    seen = run_info.get("routing_prefix", {}).values()
    unlabelled = sum(counts.get("unlabelled", 0) for counts in seen)
    if unlabelled:
        found.append(f"the scheduler saw {unlabelled} requests without a label")
    abandoned = run_info.get("abandoned_jobs", ())
    if abandoned:
        found.append(
            f"{len(abandoned)} environment jobs ignored their end and were left"
        )
    return [*run_info.get("warnings", ()), *found]


def _spans(stages: Iterable[InferenceStage]) -> list[Span]:
    return [(stage.start_s, stage.end_s) for stage in stages]
