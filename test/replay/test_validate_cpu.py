"""The cost model of the CPU engine against what was measured on one."""

import importlib
import json
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import msgspec
import pytest

from sglang_agent.report import build_report
from sglang_agent.simulate.cost_model import load_deployment
from sglang_agent.simulate.workers import WorkerPool

PAPER = Path(__file__).resolve().parents[2] / "benchmark" / "paper"
MEASURED = json.loads((PAPER / "results" / "validate-cpu.json").read_text())
POLICIES = ("fcfs", "lpm", "routing-prefix", "routing-prefix-10")


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that measured."""
    monkeypatch.syspath_prepend(str(PAPER))
    return importlib.import_module("validate_cpu")


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_simulator_still_agrees_with_the_real_engine(
    validate: ModuleType, pool: WorkerPool
) -> None:
    """Makespan within 15%, reuse a point from the real runs, the same order."""
    deployment = load_deployment(validate.NAME)
    table: dict[str, Any] = MEASURED["policies"]["inference"]
    makespans = {}
    for policy in POLICIES:
        real = table[policy]["real"]
        records = validate.simulated(policy, validate.INFERENCE, deployment, pool)
        report = build_report(records, {})
        makespans[policy] = report.makespan_s
        assert report.makespan_s == pytest.approx(fmean(real["makespan_s"]), rel=0.15)
        assert min(real["reuse"]) - 0.01 < report.reuse < max(real["reuse"]) + 0.01
    order = sorted(makespans, key=lambda policy: makespans[policy])
    assert order == MEASURED["shortest_first"]["inference"]["real"]


def test_the_batches_are_those_that_were_measured(validate: ModuleType) -> None:
    for batch in validate.VALIDATION:
        known = MEASURED["batches"][batch.name]
        assert msgspec.convert(known, type(batch)) == batch
        lengths = [len(record.stages) for record in validate.make_trace(batch)]
        assert len(lengths) == batch.trajectories
        assert len(set(lengths)) > 3


def test_the_cost_model_states_the_errors_that_were_found(
    validate: ModuleType,
) -> None:
    stated = load_deployment(validate.NAME).fit
    for name, row in MEASURED["calibration"].items():
        assert stated["calibration"][name] == validate.errors_of(row)
    for name, table in MEASURED["policies"].items():
        for policy in POLICIES:
            assert stated["validation"][name][policy] == validate.errors_of(
                table[policy]
            )


def test_a_run_that_others_disturbed_does_not_count(
    validate: ModuleType, tmp_path
) -> None:
    for number, others_cpus in ((1, "0.9"), (2, "0.1")):
        run = tmp_path / f"agents.fcfs.{number}"
        run.mkdir()
        (run / "others_cpus").write_text(others_cpus)
    (quiet,) = validate.quiet_runs(tmp_path, validate.AGENTS, "fcfs")
    assert quiet.name == "agents.fcfs.2"
    with pytest.raises(RuntimeError, match="no quiet run of agents, lpm"):
        validate.quiet_runs(tmp_path, validate.AGENTS, "lpm")
