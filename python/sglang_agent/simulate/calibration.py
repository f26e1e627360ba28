"""Pass costs from a real run: what its request times say about single passes.

A trace knows of each request when it was sent, when its first token came and when it
ended. Two equations a request follow. While request i decodes, it sees one pass per
output token, each charged for the requests and contexts that decode along with it,
and the prefills that cut in::

    end_i - first_i = sum over its passes of (pass + request * batch + context * tokens)
                      + prefill_token * (new tokens whose first token falls in between)

and until its first token a worker that prefills first does nothing else::

    first_i - start_i = overhead + pass + prefill_token * (its own new tokens
                        and those of others whose first token falls in between)

Least squares over all requests with non-negative coefficients gives the costs. The
sums use averages over each window, so this is an estimate: simulate the trace with it to
see how far off it is. Time in the queue is not in the equations: a request that came when
as many were in flight as the worker ever decodes together may have waited for a place,
so it has only the first one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_agent.errors import UsageError
from sglang_agent.records import InferenceStage, TrajectoryRecord
from sglang_agent.simulate.cost_model import PassCosts

if TYPE_CHECKING:
    import numpy as np

LEAST_REQUESTS = 20

COEFFICIENTS = (
    "overhead_s",
    "pass_s",
    "prefill_token_s",
    "prefill_context_s",
    "decode_request_s",
    "decode_context_s",
)


class Calibration(NamedTuple):
    """The estimated costs, and how well they describe the requests they come from.

    ``explained`` is the share of the variance of request times (R squared).
    """

    passes: PassCosts
    overhead_s: float
    requests: int
    explained: float


def calibrate(*runs: Sequence[TrajectoryRecord]) -> Calibration:
    """Estimate from the stages of one or more runs of the same deployment.

    Runs of different concurrency tell a pass from what each request adds to it. Raises
    :class:`UsageError` when the traces hold too few requests with first-token times (a
    run must stream to know them).
    """
    import numpy as np

    by_worker: dict[tuple[int, str | None], list[InferenceStage]] = defaultdict(list)
    for number, records in enumerate(runs):
        for stage in _usable(records):
            by_worker[number, stage.worker].append(stage)
    rows: list[list[float]] = []
    seconds: list[float] = []
    for stages in by_worker.values():
        for row, value in _Window(stages).equations():
            rows.append(row)
            seconds.append(value)
    count = sum(map(len, by_worker.values()))
    if count < LEAST_REQUESTS:
        raise UsageError(
            f"trace: {count} requests have first-token times, at least "
            f"{LEAST_REQUESTS} are needed; replay streams, run does with --stream"
        )
    left, right = np.array(rows), np.array(seconds)
    found = nonnegative_least_squares(left, right)
    residual = right - left @ found
    explained = 1 - float(residual @ residual) / float(
        ((right - right.mean()) ** 2).sum()
    )
    values = dict(zip(COEFFICIENTS, map(float, found), strict=True))
    overhead_s = values.pop("overhead_s")
    return Calibration(PassCosts(**values), overhead_s, count, explained)


def nonnegative_least_squares(left: np.ndarray[Any, Any], right: Any) -> Any:
    """The best coefficients >= 0, by trying every set of positive ones.

    The pass itself (the second coefficient) is always in the set: without it the
    virtual clock could stand still.
    """
    import numpy as np

    columns = left.shape[1]
    scale = np.abs(left).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = left / scale
    best = None
    others = [index for index in range(columns) if index != 1]
    for size in range(columns):
        for chosen in itertools.combinations(others, size):
            used = [1, *chosen]
            found, *_ = np.linalg.lstsq(scaled[:, used], right, rcond=None)
            if (found <= 0).any():
                continue
            loss = float(((scaled[:, used] @ found - right) ** 2).sum())
            if best is None or loss < best[0]:
                best = (loss, used, found)
    if best is None:
        raise UsageError("trace: its request times fit no positive pass duration")
    result = np.zeros(columns)
    result[best[1]] = best[2]
    return result / scale


def _usable(records: Sequence[TrajectoryRecord]) -> Iterable[InferenceStage]:
    """Stages whose times are known and not blurred by a retry."""
    for record in records:
        for stage in record.stages:
            if (
                isinstance(stage, InferenceStage)
                and stage.first_token_s is not None
                and stage.attempts == 1
                and stage.output_tokens >= 1
            ):
                yield stage


class _Window:
    """Sums over time windows of one worker's requests."""

    def __init__(self, stages: Sequence[InferenceStage]) -> None:
        self._stages = sorted(stages, key=_first)
        self._firsts = [_first(stage) for stage in self._stages]
        self._starts = sorted(stage.start_s for stage in stages)
        self._ends = sorted(stage.end_s for stage in stages)
        self._places = self._most_decoding()
        self._new = _running_sum(_new_tokens(stage) for stage in self._stages)
        self._products = _running_sum(_products(stage) for stage in self._stages)

    def equations(self) -> Iterable[tuple[list[float], float]]:
        """Rows in the order of :data:`COEFFICIENTS`, with the seconds they explain."""
        for stage in self._stages:
            first = _first(stage)
            low = bisect_left(self._firsts, stage.start_s)
            here = bisect_right(self._firsts, first)
            if self._in_flight_before(stage.start_s) < self._places:
                new, products = self._between(low, here)
                yield [1.0, 1.0, new, products, 0.0, 0.0], first - stage.start_s
            passes = stage.output_tokens - 1
            after = bisect_right(self._firsts, stage.end_s)
            new, products = self._between(here, after)
            batch, context = self._company(stage)
            yield (
                [
                    0.0,
                    passes + (after - here),
                    new,
                    products,
                    passes * batch,
                    passes * context,
                ],
                stage.end_s - first,
            )

    def _most_decoding(self) -> int:
        """How many requests decoded at once at the busiest moment."""
        changes = sorted(
            change
            for stage in self._stages
            for change in ((_first(stage), 1), (stage.end_s, -1))
        )
        return max(itertools.accumulate(step for _, step in changes), default=0)

    def _in_flight_before(self, moment_s: float) -> int:
        """Requests that were sent before a moment and have not ended by then."""
        sent = bisect_left(self._starts, moment_s)
        return sent - bisect_right(self._ends, moment_s)

    def _between(self, low: int, high: int) -> tuple[float, float]:
        return (
            self._new[high] - self._new[low],
            self._products[high] - self._products[low],
        )

    def _company(self, stage: InferenceStage) -> tuple[float, float]:
        """Mean number of decoding requests and of their context tokens."""
        start, end = _first(stage), stage.end_s
        if end <= start:
            return 1.0, float(stage.input_tokens)
        batch = context = 0.0
        for other in self._stages[: bisect_left(self._firsts, end)]:
            shared = min(end, other.end_s) - max(start, _first(other))
            if shared > 0:
                share = shared / (end - start)
                batch += share
                context += share * (other.input_tokens + other.output_tokens / 2)
        return batch, context


def _first(stage: InferenceStage) -> float:
    assert stage.first_token_s is not None
    return stage.first_token_s


def _new_tokens(stage: InferenceStage) -> float:
    return float(stage.input_tokens - stage.cached_tokens)


def _products(stage: InferenceStage) -> float:
    new = _new_tokens(stage)
    return new * (stage.cached_tokens + new / 2)


def _running_sum(values: Iterable[float]) -> list[float]:
    return [0.0, *itertools.accumulate(values)]
