"""Pass costs out of request times: known costs must come back."""

import msgspec
import pytest

from sglang_agent.errors import UsageError
from sglang_agent.records import InferenceStage, TrajectoryRecord
from sglang_agent.simulate.calibration import calibrate
from sglang_agent.simulate.workers import WorkerPool

from .batches import SMALL, make_trace, run

SIX_AT_ONCE = ["--max-running-requests", "6"]


def one_at_a_time(count: int, first_token: bool = True) -> list[TrajectoryRecord]:
    """Requests that never meet: every equation holds exactly."""
    overhead, per_pass, token, request, context = 0.01, 0.02, 1e-4, 0.003, 1e-6
    records = []
    now = 0.0
    for index in range(count):
        new, cached, output = 100 + 37 * index % 500, 13 * index % 400, 5 + index % 7
        first = now + overhead + per_pass + token * new
        mean = new + cached + output / 2
        end = first + (output - 1) * (per_pass + request + context * mean)
        stage = InferenceStage(
            1, new + cached, output, cached, now, first if first_token else None, end
        )
        (empty,) = make_trace(1, 1)
        records.append(msgspec.structs.replace(empty, stages=[stage]))
        now = end + 1.0
    return records


def test_known_costs_come_back() -> None:
    found = calibrate(one_at_a_time(60))
    assert found.overhead_s + found.passes.pass_s == pytest.approx(0.03, rel=0.05)
    # Alone in its batch, a request's share of a pass cannot be told from the pass.
    decode_s = found.passes.pass_s + found.passes.decode_request_s
    assert decode_s == pytest.approx(0.023, rel=0.05)
    assert found.passes.prefill_token_s == pytest.approx(1e-4, rel=0.05)
    assert found.explained > 0.999
    assert found.requests == 60


def test_first_token_times_are_needed() -> None:
    with pytest.raises(UsageError, match="0 requests have first-token times"):
        calibrate(one_at_a_time(60, first_token=False))


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_calibrated_model_repeats_the_run(pool: WorkerPool) -> None:
    """A simulated run stands for a real one; its costs are found from its times."""
    trace = make_trace(12, 4)
    real = run(pool, trace, sample_concurrency=8)
    found = calibrate(real.records)
    again = run(
        pool,
        trace,
        msgspec.structs.replace(SMALL, passes=found.passes),
        sample_concurrency=8,
    )
    ends = [max(r.ended_s for r in result.records) for result in (real, again)]
    assert ends[1] == pytest.approx(ends[0], rel=0.1)


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_waiting_for_a_place_is_not_taken_for_prefill(pool: WorkerPool) -> None:
    """24 at once on a worker that runs six: most first tokens are late for the queue."""
    trace = make_trace(24, 5)
    crowded, alone = (
        run(pool, trace, sample_concurrency=n, server_args=SIX_AT_ONCE).records
        for n in (24, 3)
    )
    for runs in ((crowded,), (crowded, alone)):
        found = calibrate(*runs)
        assert found.passes.prefill_token_s == pytest.approx(5e-5, rel=0.15)
        assert found.overhead_s < 0.002
        assert found.requests == 120 * len(runs)
    # Only together do they tell how long a pass is and what a request adds.
    assert found.passes.pass_s == pytest.approx(SMALL.passes.pass_s, rel=0.1)
