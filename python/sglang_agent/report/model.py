"""The report as typed data; ``msgspec.json.encode`` gives its JSON form.

Times are seconds from the first admission unless a name says otherwise; counts of
tokens are tokens. A figure that cannot be known from the records is None.
"""

from __future__ import annotations

from typing import Any

import msgspec

REPORT_VERSION = 1


class Spread(msgspec.Struct, frozen=True):
    """How a set of values is distributed."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    total: float


class Concurrency(msgspec.Struct, frozen=True):
    """How many of something there were at once: mean over the batch, and peak."""

    mean: float
    peak: int


class TurnFigures(msgspec.Struct, frozen=True):
    """All requests of one turn index (the first turn is 1): reuse and token times.

    The times are those of streamed answers, the only ones that tell.
    """

    turn: int
    requests: int
    input_tokens: int
    cached_tokens: int
    new_prefill_tokens: int
    reuse: float | None
    first_token_s: Spread
    per_output_token_s: Spread


class WorkerShare(msgspec.Struct, frozen=True):
    """What one inference worker did."""

    worker: str
    requests: int
    request_share: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reuse: float | None
    inference_s: Spread


class ServerTimes(msgspec.Struct, frozen=True):
    """Environment jobs of one server: time in the queue and time in service."""

    server: str
    jobs: int
    failed: int
    queue_s: Spread
    service_s: Spread


class TailSample(msgspec.Struct, frozen=True):
    """One of the samples that ended last, with where its time went."""

    sample_id: str
    label: str
    outcome: str
    ended_s: float
    turns: int
    admission_wait_s: float
    opening_s: float
    inference_s: float
    queue_s: float
    service_s: float
    other_s: float
    last_stage: str
    why: str
    error: str | None


class Attempts(msgspec.Struct, frozen=True):
    """Time over all attempts of a resumed run: at work, asleep between, together."""

    count: int
    active_s: float
    gap_s: float
    wall_s: float


class Scores(msgspec.Struct, frozen=True):
    """The scorer's verdicts; a failed or unscored sample is in no mean."""

    scored: int
    unscored: int
    mean: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One batch. ``l5_s`` and ``l10_s`` are the tails of the paper's equation 21.

    ``beta`` and ``gamma`` are equations 17 to 20 for any number of workers, see
    :mod:`sglang_agent.report.imbalance`.
    """

    version: int = REPORT_VERSION
    samples: int
    completed: int
    failed: dict[str, int]
    scores: Scores
    resumed: bool
    attempts: Attempts | None
    makespan_s: float
    t50_s: float
    t90_s: float
    t95_s: float
    t100_s: float
    l5_s: float
    l10_s: float
    turns: int
    turns_per_trajectory: Spread
    input_tokens: int
    cached_tokens: int
    new_prefill_tokens: int
    output_tokens: int
    reuse: float | None
    by_turn: list[TurnFigures]
    inflight_inference: Concurrency
    active_samples: Concurrency
    running_jobs: Concurrency
    waiting_jobs: Concurrency
    inference_s: Spread
    first_token_s: Spread
    per_output_token_s: Spread
    retried_turns: int
    admission_wait_s: Spread
    opening_s: Spread
    queue_s: Spread
    service_s: Spread
    by_server: list[ServerTimes]
    workers: list[WorkerShare]
    beta: float | None
    gamma: float | None
    tail: list[TailSample]
    warnings: list[str]
    run: dict[str, Any]
