"""The scheduler benchmark: what a slice is, what is run again, what the goals say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

COUNTS = {
    "prefix_queries": 4000,
    "prefix_queries_saved": 90_000,
    "admitted_first_tier": 3990,
}
FOLDER = Path(__file__).resolve().parents[2] / "benchmark/scheduler"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("bench")


@pytest.fixture
def report(bench: ModuleType) -> ModuleType:
    return importlib.import_module("report")


def run_of(report: ModuleType, **fields: Any) -> Any:
    defaults: dict[str, Any] = {
        "workload": "bfcl",
        "scale": 1.0,
        "policy": "routing-prefix",
        "refresh": True,
        "seed": 0,
        "trajectories": 5106,
        "requests": 17_029,
        "passes": 1000,
        "priority_cpu_s": 1.0,
        "scheduler_cpu_s": 60.0,
        "peak_memory_bytes": 1 << 30,
        "waiting_peak": 1950,
        "reuse": 0.8,
        "virtual_makespan_s": 1200.0,
        "engine": {"routing_prefix": COUNTS},
        "date": "2026-11-30",
        "machine": "a processor, 2 cores",
    }
    return report.Run(**(defaults | fields))


@pytest.mark.parametrize("workload", ["swe", "bfcl", "widesearch"])
def test_a_slice_keeps_the_concurrency(bench: ModuleType, workload: str) -> None:
    case = bench.CASES[workload]
    whole = bench.generate(workload, seed=1)

    part = bench.cut(whole, case, 0.1, 1)

    assert len(part) >= min(len(whole), case.sample_concurrency)
    assert [r.label for r in part] == [r.label for r in whole[: len(part)]]
    turns = [[s.turn for s in bench.inferences(record)] for record in part]
    assert all(t == list(range(t[0], t[0] + len(t))) for t in turns)
    assert sum(map(len, turns)) < sum(len(bench.inferences(r)) for r in whole) / 4


def test_scale_1_is_the_whole_batch(bench: ModuleType) -> None:
    whole = bench.generate("widesearch", seed=0)

    assert bench.cut(whole, bench.CASES["widesearch"], 1.0, 0) == whole


def test_what_is_in_the_file_is_not_run_again(
    bench: ModuleType,
    report: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured = []

    def measure(cell: Any, pool: Any) -> Any:
        measured.append(cell)
        return run_of(report, **cell._asdict())

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "pool_of", lambda refresh: Pool())
    output = tmp_path / "deep" / "runs.json"
    command = ["--output", str(output), "--seeds"]

    assert bench.main([*command, "1", "--policies", "lpm", "routing-prefix"]) == 0
    assert len(measured) == 2 * 2 * 3
    assert bench.main([*command, "2"]) == 0
    assert len(measured) == len(set(measured)) == 7 * 2 * 3 * 2

    assert len(json.loads(output.read_text())["runs"]) == len(measured)
    assert "bfcl, CS 1950, whole: 17,029 requests, 2 seeds" in capsys.readouterr().out


class Pool:
    """Stands for the workers, which are not started."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_goal_is_held_against_the_median_of_the_seeds(report: ModuleType) -> None:
    ours, theirs = (0.9, 2.0, 1.0), (1.0, 1.0, 1.0)
    runs = [
        run_of(report, policy=policy, seed=seed, priority_cpu_s=seconds)
        for policy, values in (("routing-prefix", ours), ("lpm", theirs))
        for seed, seconds in enumerate(values)
    ]

    row = list(report.goals(report.group(runs)))[-1]

    assert "| RP / lpm | 1.000 (0.900 to 2.000) | 1.0 | met | 1.43 |" in row


def test_seeds_that_only_one_policy_has_are_left_out(report: ModuleType) -> None:
    runs = [
        run_of(report, seed=0, priority_cpu_s=0.5),
        run_of(report, seed=1, priority_cpu_s=9.0),
        run_of(report, seed=0, policy="dfs-weight", priority_cpu_s=5.0),
    ]

    row = list(report.goals(report.group(runs)))[-1]

    assert "| RP / dfs-weight | 0.100 | 0.04 | **not met** | 0.063 |" in row


def test_the_cost_of_a_query_is_shown(report: ModuleType) -> None:
    runs = [run_of(report, priority_cpu_s=0.4), run_of(report, policy="lpm")]

    rows = list(report.queries(report.group(runs)))[2:]

    assert rows == [
        "| bfcl, CS 1950, whole: 17,029 requests, 1 seed | on | "
        "3,990 | 4,000 | 90,000 | 100 |"
    ]


def test_the_readme_keeps_what_is_around_the_tables(
    report: ModuleType, tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.MARK_BEGIN}\nold\n{report.MARK_END}\nafter\n")

    report.rewrite(readme, ["new"])

    assert readme.read_text() == (
        f"before\n{report.MARK_BEGIN}\nnew\n{report.MARK_END}\nafter\n"
    )


def test_the_picture_is_drawn(report: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [run_of(report), run_of(report, scale=0.1, policy="lpm", seed=1)]

    report.draw(report.group(runs), tmp_path / "picture.png")

    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_breakdown_counts_calls_and_their_time(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    breakdown = importlib.import_module("breakdown")
    clock = iter([1.0, 1.25, 2.0, 2.5])
    monkeypatch.setattr(breakdown.time, "thread_time", lambda: next(clock))
    timer = breakdown.Timer()
    assert timer.wrap(int)("7", base=8) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        timer.wrap(int)("x")
    assert (timer.calls, timer.cpu_s) == (2, 0.75)


def test_the_breakdown_says_what_is_left(bench: ModuleType) -> None:
    breakdown = importlib.import_module("breakdown")
    row = {
        "workload": "bfcl",
        "policy": "routing-prefix",
        "priority_cpu_s": 1.5,
        "queries": [10_000, 1.0],
        "refresh": [6_000, 0.1],
    }
    expected = (
        "| bfcl | routing-prefix | 1.50 | 10,000 | 1.00 | 100 | 6,000 | 0.10 | 0.40 |"
    )
    assert breakdown.table([row]).splitlines()[-1] == expected
