"""The virtual worker: real choices, exact fast-forward, one outcome per seed."""

import itertools
import os
import subprocess
import sys

import msgspec
import pytest

from sglang_agent.records import InferenceStage, Outcome
from sglang_agent.simulate import SimulationResult
from sglang_agent.simulate.errors import SimulationError
from sglang_agent.simulate.workers import WorkerPool

from .batches import SMALL, log_of, make_trace, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

POLICIES = [
    "fcfs",
    "lpm",
    "dfs-weight",
    "hrrn",
    "routing-key",
    "shortest-prefill-first",
    "routing-prefix",
]
TIGHT = msgspec.structs.replace(SMALL, cache_bytes=0.45e6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("strategy", "page"), [("no_buffer", 1), ("extra_buffer", 1), ("extra_buffer", 64)]
)
def test_fast_forward_changes_nothing(
    pool: WorkerPool, policy: str, strategy: str, page: int
) -> None:
    trace = make_trace(12, 4)
    deployment = msgspec.structs.replace(TIGHT, cache_strategy=strategy, page_size=page)
    settings = {"schedule_policy": policy, "sample_concurrency": 12}
    fast = run(pool, trace, deployment, **settings)
    slow = run(pool, trace, deployment, fast_forward=False, **settings)
    assert log_of(fast) == log_of(slow)
    assert fast.workers[0].fast_forwarded_passes > 0
    assert slow.workers[0].fast_forwarded_passes == 0
    assert fast.workers[0].decode_passes == slow.workers[0].decode_passes


ORDERING = msgspec.structs.replace(
    SMALL.passes, waiting_token_s=2e-9, lookup_token_s=1e-9, walked_token_s=4e-9
)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "routing-prefix"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_ordering_the_queue_takes_time(
    pool: WorkerPool, policy: str, scale: float
) -> None:
    trace = make_trace(12, 4)
    free = msgspec.structs.replace(TIGHT, scale=scale)
    charged = msgspec.structs.replace(free, passes=ORDERING)
    settings = {"schedule_policy": policy, "sample_concurrency": 12}
    fast, again = (run(pool, trace, charged, **settings) for _ in range(2))
    slow = run(pool, trace, charged, fast_forward=False, **settings)
    assert log_of(fast) == log_of(again) == log_of(slow)
    assert fast.workers[0].fast_forwarded_passes > 0
    (worker,) = fast.workers
    counts = (
        worker.priority_waiting_tokens,
        worker.priority_tokens,
        worker.priority_walked_tokens,
    )
    expected = sum(c * t for c, t in zip((2e-9, 1e-9, 4e-9), counts, strict=True))
    assert worker.priority_seconds == pytest.approx(expected, abs=1e-6)
    ended = max(record.ended_s for record in fast.records)
    busy = worker.prefill_seconds + worker.decode_seconds + worker.priority_seconds
    assert busy <= ended
    if policy == "fcfs":
        assert counts == (0, 0, 0)
        assert log_of(run(pool, trace, free, **settings)) == log_of(fast)
    else:
        assert min(counts[:2]) > 0
        assert log_of(run(pool, trace, free, **settings)) != log_of(fast)
    assert (counts[2] > 0) == (policy == "dfs-weight")


def test_routing_prefix_looks_up_less_than_it_goes_over(pool: WorkerPool) -> None:
    """It asks the cache once a request; lpm asks for all that wait in every pass."""
    trace = make_trace(12, 4)
    ours, lpm = (
        run(pool, trace, TIGHT, schedule_policy=policy, sample_concurrency=12)
        for policy in ("routing-prefix", "lpm")
    )
    assert 0 < ours.workers[0].priority_tokens < ours.workers[0].priority_waiting_tokens
    assert lpm.workers[0].priority_tokens >= lpm.workers[0].priority_waiting_tokens


@pytest.mark.parametrize(("strategy", "page"), [("no_buffer", 1), ("extra_buffer", 64)])
def test_fast_forward_goes_on_in_a_full_pool(
    pool: WorkerPool, strategy: str, page: int
) -> None:
    """The tree fills the pool, so pages come from eviction, checkpoints included."""
    trace = make_trace(8, 4, output=lambda i, k: 200 + (i * 37 + k * 91) % 150)
    deployment = msgspec.structs.replace(
        SMALL, cache_bytes=0.2e6, cache_strategy=strategy, page_size=page
    )
    settings = {"sample_concurrency": 6, "ratio": 0.9, "schedule_policy": "lpm"}
    fast = run(pool, trace, deployment, **settings)
    slow = run(pool, trace, deployment, fast_forward=False, **settings)
    assert log_of(fast) == log_of(slow)
    (worker,) = fast.workers
    assert worker.fast_forwarded_passes > 0.7 * worker.decode_passes


def crowded(pool: WorkerPool, **changes: object) -> SimulationResult:
    """Long answers, and an admission that hopes they will be short."""
    trace = make_trace(
        16, 3, first=1500, grow=200, output=lambda i, k: 700 + (i * 37 + k * 91) % 900
    )
    settings = {
        "sample_concurrency": 16,
        "ratio": 9.0,
        "max_new_tokens": 4096,
        "server_args": ["--schedule-conservativeness", "0.05"],
    }
    deployment = msgspec.structs.replace(SMALL, cache_bytes=0.25e6)
    return run(pool, trace, deployment, **{**settings, **changes})


def test_fast_forward_changes_nothing_under_retraction(pool: WorkerPool) -> None:
    fast = crowded(pool)
    slow = crowded(pool, fast_forward=False)
    assert fast.workers[0].retractions > 0
    assert fast.workers[0].fast_forwarded_passes > 100
    assert log_of(fast) == log_of(slow)


def test_exact_lengths_are_charged_in_full(pool: WorkerPool) -> None:
    """What a replay asks for: admission keeps room for every answer, so none is lost."""
    fast = crowded(pool, max_new_tokens=None)
    slow = crowded(pool, max_new_tokens=None, fast_forward=False)
    assert fast.workers[0].retractions == 0
    assert log_of(fast) == log_of(slow)
    assert _lengths(fast) == _lengths(crowded(pool))


@pytest.mark.parametrize("workers", [1, 2])
def test_one_seed_gives_one_log(pool: WorkerPool, workers: int) -> None:
    trace = make_trace(12, 4)
    settings = {"workers": workers, "schedule_policy": "lpm", "env_concurrency": 3}
    logs = {log_of(run(pool, trace, TIGHT, **settings)) for _ in range(2)}
    assert len(logs) == 1


def test_two_workers_share_the_batch(pool: WorkerPool) -> None:
    trace = make_trace(24, 4)
    result = run(pool, trace, workers=2)
    served = [worker.finished for worker in result.workers]
    assert sum(served) == 24 * 4
    assert min(served) > 0
    alone = run(pool, trace)
    assert _makespan(result) < _makespan(alone)


def test_answers_have_the_scripted_length(pool: WorkerPool) -> None:
    trace = make_trace(3, 4)
    result = run(pool, trace)
    for recorded, replayed in zip(trace, result.records, strict=True):
        for before, after in zip(_turns(recorded), _turns(replayed), strict=True):
            assert after.output_tokens == before.output_tokens
            assert after.input_tokens == before.input_tokens
            assert after.first_token_s is not None
            assert after.start_s < after.first_token_s <= after.end_s


def test_a_turn_reuses_everything_but_the_last_token(pool: WorkerPool) -> None:
    result = run(pool, make_trace(1, 4))
    turns = _turns(result.records[0])
    assert turns[0].cached_tokens == 0
    for before, after in itertools.pairwise(turns):
        whole = before.input_tokens + before.output_tokens
        assert whole - 1 <= after.cached_tokens <= whole


def test_pools_follow_the_ratio(pool: WorkerPool) -> None:
    trace = make_trace(1, 1)
    for ratio in (0.3, 0.9, 3.0):
        pools = run(pool, trace, ratio=ratio).pools
        budget = SMALL.cache_bytes
        # The state's size is matched within 2%, and a padding slot is taken off.
        slots = budget * ratio / (1 + ratio) / SMALL.state_bytes_per_slot
        assert pools.state_slots == pytest.approx(slots, rel=0.03, abs=2)
        assert pools.kv_tokens == pytest.approx(budget / (1 + ratio), rel=0.03)
        assert pools.ratio == ratio
        assert pools.max_running_requests == pools.state_slots // 3


def test_too_few_state_slots_make_requests_wait(pool: WorkerPool) -> None:
    """28 slots, 4 requests at once, 6 sessions of 20 turns: nothing fails."""
    trace = make_trace(6, 20, first=800, grow=100)
    deployment = msgspec.structs.replace(
        SMALL, cache_strategy="extra_buffer", cache_bytes=28 * 5200 / 0.5
    )
    result = run(
        pool,
        trace,
        deployment,
        sample_concurrency=6,
        ratio=1.0,
        server_args=["--max-running-requests", "4"],
    )
    assert abs(result.pools.state_slots - 28) <= 1
    assert result.pools.max_running_requests == 4
    assert [record.outcome for record in result.records] == [Outcome.COMPLETED] * 6
    assert result.workers[0].waiting_peak > 0


def test_the_time_limit_ends_a_batch(pool: WorkerPool) -> None:
    result = run(pool, make_trace(40, 1), sample_concurrency=4, time_limit_s=5.0)
    assert result.timed_out
    outcomes = {record.outcome for record in result.records}
    assert outcomes == {Outcome.COMPLETED, Outcome.CANCELLED}
    assert max(record.ended_s for record in result.records) <= 5.0


def test_a_request_the_engine_refuses_fails_its_trajectory_only(
    pool: WorkerPool,
) -> None:
    """The second turn of both is longer than the context; the others go on."""
    fine, long = make_trace(2, 1), make_trace(4, 2, grow=60_000)[2:]
    result = run(pool, [*fine, *long])
    outcomes = [record.outcome for record in result.records]
    assert outcomes == [Outcome.COMPLETED] * 2 + [Outcome.INFERENCE] * 2
    assert "exceeds the maximum allowed length" in (result.records[2].error or "")


def test_an_unusable_setting_is_reported_with_its_cause(pool: WorkerPool) -> None:
    with pytest.raises(SimulationError, match="no-such-policy"):
        run(pool, make_trace(1, 1), schedule_policy="no-such-policy")


def test_the_pool_survives_a_failed_worker(pool: WorkerPool) -> None:
    trace = make_trace(2, 2)
    with pytest.raises(SimulationError, match="cannot be represented"):
        run(pool, trace, msgspec.structs.replace(SMALL, state_bytes_per_slot=1.0))
    assert not run(pool, trace).timed_out


def test_a_killed_worker_process_ends_the_run(tmp_path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{code}\n")
    python.chmod(0o755)
    with (
        WorkerPool(str(python)) as broken,
        pytest.raises(SimulationError, match="ended without a reply"),
    ):
        run(broken, make_trace(1, 1))


def test_the_command_speaks_json_lines_on_standard_streams(tmp_path) -> None:
    lines = b'{"type":"stats"}\n'
    done = subprocess.run(
        [sys.executable, "-m", "sglang.virtual_worker"],
        input=lines,
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 1
    (reply,) = done.stdout.splitlines()
    assert (
        msgspec.json.decode(reply)["error"]
        == "ValueError: stats: start must come first"
    )


def _turns(record) -> list[InferenceStage]:
    return [s for s in record.stages if isinstance(s, InferenceStage)]


def _lengths(result: SimulationResult) -> list[list[int]]:
    return [[turn.output_tokens for turn in _turns(r)] for r in result.records]


def _makespan(result) -> float:
    return max(record.ended_s for record in result.records)
