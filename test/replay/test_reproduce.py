"""The reproduction: what it would run, what it keeps, how it judges."""

import importlib
import json
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

from sglang_agent.simulate.script import script_of

from .batches import make_trace

PAPER = Path(__file__).resolve().parents[2] / "benchmark" / "paper"


@pytest.fixture
def load(monkeypatch):
    """Imports a script of benchmark/paper."""
    monkeypatch.syspath_prepend(str(PAPER))

    def importer(name: str) -> ModuleType:
        return importlib.import_module(name)

    return importer


def test_every_published_cell_is_there(load) -> None:
    figures = load("figures")
    counts = {name: len(list(figure())) for name, figure in figures.FIGURES.items()}
    assert counts["figure-3"] == 36 + 25 + 25
    assert counts["figure-6"] == 3 * 16
    assert counts["figure-8"] == 9
    timeouts = [e for e in figures.figure_3() if e.timed_out]
    assert len(timeouts) == 16
    assert all(entry.minutes is None for entry in timeouts)


def test_results_are_kept_and_not_run_again(load, tmp_path) -> None:
    reproduce, figures = load("reproduce"), load("figures")
    cells = [entry.cell for entry in figures.figure_8()]
    store = reproduce.Store(tmp_path, reproduce.Variant())
    assert cells[0] not in store
    store.add(cells[0], {"minutes": 1.5})
    again = reproduce.Store(tmp_path, reproduce.Variant())
    assert cells[0] in again
    assert again.get(cells[0])["minutes"] == 1.5
    assert cells[1] not in again
    assert cells[0] not in reproduce.Store(tmp_path, reproduce.Variant(Fraction(1)))


@pytest.mark.parametrize("changed", ["cost model", "trace", "engine"])
def test_results_of_another_model_are_run_again(
    load, tmp_path, monkeypatch, changed: str
) -> None:
    reproduce, figures = load("reproduce"), load("figures")
    cell = figures.scheduled("bfcl", "lpm", 1950)
    variant = reproduce.Variant(Fraction(1, 32))
    store = reproduce.Store(tmp_path, variant)
    store.add(cell, {"minutes": 1.5})
    assert cell in store
    if changed == "cost model":
        slower = reproduce.load_deployment("cpu-tiny-ling")
        monkeypatch.setattr(reproduce, "load_deployment", lambda _: slower)
    elif changed == "trace":
        monkeypatch.setattr(reproduce, "digest_of_trace", lambda *_: "another")
    else:
        other = reproduce.OLDER._replace(environment={})
        store = reproduce.Store(tmp_path, variant._replace(engine=other))
    assert cell not in store
    assert store.get(cell) is None


def test_the_priority_fit_finds_the_costs_it_was_given(load) -> None:
    np = pytest.importorskip("numpy")
    fit = load("fit_priority")
    given = np.array([2e-9, 0.0, 4e-9])
    counts = np.random.default_rng(0).uniform(1e9, 1e11, (9, 3))
    rows = [
        fit.Row("swe", "lpm", float(row @ given), 6000.0, tuple(row)) for row in counts
    ]
    assert fit.solve(rows) == pytest.approx(given, rel=1e-6, abs=1e-15)
    deployment = fit.fitted(fit.load_deployment("cpu-tiny-ling"), rows)
    assert deployment.passes.walked_token_s == pytest.approx(4e-9)
    assert all(c["error_of_makespan"] == 0 for c in deployment.fit["priority"]["cells"])


def test_claims_are_judged_from_the_results(load, tmp_path) -> None:
    claims, reproduce = load("claims"), load("reproduce")
    store = reproduce.Store(tmp_path, reproduce.Variant())
    judged = {c.text: c for c in (evaluate(store) for evaluate in claims.CHECKS)}
    text = "CE 3, CS 50: CAAS shortens L5"
    assert judged[text].holds is None
    assert judged[text].ours == "not run"
    for order, l5 in (("fcfs", 10.0), ("caas", 8.0)):
        cell = claims.mcp(3, 50, order)
        result = {"l5_minutes": l5, "t95_minutes": 1.0, "minutes": 1.0}
        store.add(cell, {**result, "timed_out": False})
    judged = {c.text: c for c in (evaluate(store) for evaluate in claims.CHECKS)}
    assert judged[text].holds is True
    assert judged[text].ours == "-20.0%"


def test_ordering_costs_are_those_of_whole_batches(load, tmp_path, monkeypatch) -> None:
    """Seed by seed; slices and runs without the refresh do not count."""
    claims, reproduce = load("claims"), load("reproduce")
    store = reproduce.Store(tmp_path, reproduce.Variant())
    runs = [
        {"policy": policy, "seed": seed, "priority_cpu_s": seconds, **more}
        for policy, seed, seconds, more in (
            ("routing-prefix", 0, 2.0, {}),
            ("routing-prefix", 1, 1.0, {}),
            ("lpm", 0, 5.0, {}),
            ("lpm", 2, 0.1, {}),
            ("lpm", 1, 0.1, {"refresh": False}),
            ("dfs-weight", 0, 0.1, {"scale": 0.1}),
        )
    ]
    everything = {"workload": "swe", "refresh": True, "scale": 1.0}
    measured = tmp_path / "whole.json"
    measured.write_text(json.dumps({"runs": [{**everything, **run} for run in runs]}))
    monkeypatch.setattr(claims, "WHOLE_BATCHES", measured)
    judged = {c.text: c for c in (evaluate(store) for evaluate in claims.CHECKS)}
    of_lpm = judged["swe: priority calculation, routing-prefix / lpm"]
    assert (of_lpm.ours, of_lpm.holds) == ("0.4 (measured, scale 1)", True)
    of_dfs = judged["swe: priority calculation, routing-prefix / dfs-weight"]
    assert of_dfs.holds is None


def test_a_time_out_counts_as_longer_than_anything(load, tmp_path) -> None:
    claims, reproduce = load("claims"), load("reproduce")
    store = reproduce.Store(tmp_path, reproduce.Variant())
    cell = claims.mcp(3, 50)
    store.add(cell, {"minutes": 360.0, "timed_out": True})
    assert claims.minutes(store, cell) == float("inf")


def test_the_table_is_replaced_between_the_marks(load, tmp_path) -> None:
    compare = load("compare")
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- claims -->\nold\n<!-- end of claims -->\nafter\n")
    compare.rewrite(readme, ["new"])
    expected = "before\n<!-- claims -->\nnew\n<!-- end of claims -->\nafter\n"
    assert readme.read_text() == expected


def test_every_scale_has_its_column(load, tmp_path, capsys) -> None:
    """And a cell that always runs in full counts at each of them."""
    compare, reproduce, figures = load("compare"), load("reproduce"), load("figures")
    results = tmp_path / "results"
    stores = [
        reproduce.Store(results, reproduce.Variant(Fraction(1, scale)))
        for scale in (8, 1)
    ]
    finished = {"timed_out": False, "cpu_s": 1.0, "minutes": 100.0, "beta": 0.1}
    stores[0].add(figures.mcp(3, 3), finished)
    stores[0].add(figures.mcp(3, 10), finished | {"minutes": 60.0})
    for store, lbch in zip(stores, (10.0, 12.0), strict=True):
        for router in figures.FIGURE_8["swe"][2]:
            found = finished | {"minutes": lbch if router == "lbch" else 11.0}
            store.add(figures.routed("swe", router), found)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- claims --><!-- end of claims -->")
    assert compare.main(["--results", str(results)]) == 0
    lines = readme.read_text().splitlines()
    assert "| figure | claim | paper | scale 1/8 | scale 1 |" in lines
    (routing,) = (x for x in lines if x.startswith("| 8 | swe: LBCH is the shortest"))
    assert "lbch 10.0 | **no**: cache_aware 11.0" in routing
    (separated,) = (x for x in lines if "| CE 3: CS 10 instead of 3" in x)
    assert separated.endswith("| -40.0% | -40.0% |")
    assert "Scale 1: 8 of 9 claims that were run hold; 40 were not run." in lines
    saved = json.loads((results / "claims.json").read_text())
    by_text = {claim["text"]: claim["verdicts"] for claim in saved}
    verdicts = by_text["swe: LBCH is the shortest"]
    assert [verdicts[scale]["holds"] for scale in ("1/8", "1")] == [True, False]
    assert {file.name for file in results.glob("*.png")} == {
        "figure-8.png",
        "figure-11.png",
    }
    capsys.readouterr()


def test_without_results_there_is_nothing_to_compare(load, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        load("compare").main(["--results", str(tmp_path)])
    assert "holds none; run reproduce.py first" in capsys.readouterr().err


def test_the_fit_finds_the_costs_it_was_given(load) -> None:
    np = pytest.importorskip("numpy")
    fit = load("fit")
    rng = np.random.default_rng(0)
    given = np.array([0.02, 4e-5, 0.0, 7e-4, 6e-9])
    charges = rng.uniform(0.2, 1.0, (len(fit.CELLS), 5)) * [1e5, 1e7, 1e11, 5e6, 2e11]
    seconds = charges @ given
    deployment = fit.load_deployment("h20-tp4-ling-3.0-flash")
    cells = [
        cell._replace(minutes=float(value) / 60)
        for cell, value in zip(fit.CELLS, seconds, strict=True)
    ]
    fit.CELLS = tuple(cells)
    fit.RECOMPUTATIONS = [
        lost._replace(seconds=float(row @ given) * lost.seconds)
        for lost, row in zip(
            fit.RECOMPUTATIONS,
            fit.recomputation_rows(charges, deployment.chunked_prefill_tokens),
            strict=True,
        )
    ]
    found = fit.solve(charges, deployment)
    assert found.waiting_token_s == deployment.passes.waiting_token_s
    assert found.pass_s == pytest.approx(0.02, rel=1e-3)
    assert found.decode_request_s == pytest.approx(7e-4, rel=1e-3)
    assert abs(fit.relative_errors(charges, found)).max() < 1e-6


def test_two_runs_keep_each_others_results(load, tmp_path) -> None:
    reproduce, figures = load("reproduce"), load("figures")
    first, second = [entry.cell for entry in figures.figure_8()][:2]
    one = reproduce.Store(tmp_path, reproduce.Variant())
    other = reproduce.Store(tmp_path, reproduce.Variant())
    one.add(first, {"minutes": 1.0})
    other.add(second, {"minutes": 2.0})
    kept = reproduce.Store(tmp_path, reproduce.Variant())
    assert first in kept
    assert second in kept
    assert first not in reproduce.Store(tmp_path, reproduce.Variant(seed=1))


def test_makespans_are_compared_over_the_reference_of_their_batch(
    load, tmp_path
) -> None:
    makespans, reproduce = load("makespans"), load("reproduce")
    figures = load("figures")
    store = reproduce.Store(tmp_path, reproduce.Variant())
    for router, minutes in (("lbch", 40.0), ("cache_aware", 50.0)):
        result = {"minutes": minutes, "timed_out": False, "cpu_s": 7.0}
        store.add(figures.routed("swe", router), result)
    entries = {e.cell: e for e in figures.figure_8()}
    entry = entries[figures.routed("swe", "cache_aware")]
    assert makespans.against_paper(store, entry) == pytest.approx(50 / 84.1)
    found = makespans.relative_to_paper(store, entry, figures.figure_8())
    assert found == pytest.approx((50 / 40) / (84.1 / 72.7))
    reference = entries[figures.routed("swe", "lbch")]
    assert makespans.relative_to_paper(store, reference, figures.figure_8()) is None
    lines = list(makespans.makespan_lines(store))
    assert any("figure-8" in line and "2 of 9" in line for line in lines)
    assert "2 of" in makespans.cost_line(store)
    assert "14 CPU seconds" in makespans.cost_line(store)


def test_job_orders_are_compared_with_the_gates_alone(load) -> None:
    order, figures = load("job_order"), load("figures")
    scripts = [script_of(record) for record in make_trace(4, 4)]
    turns = [turn for script in scripts for turn in script.turns]
    tokens = sum(turn.output.length + 1 for turn in turns)
    turns_s = len(turns) * order.TURN_S + tokens * order.OUTPUT_TOKEN_S
    jobs_s = sum(turn.job.duration_s for turn in turns if turn.job)
    one_by_one = order.run(scripts, figures.mcp(3, 1))
    assert jobs_s > 0
    assert one_by_one.makespan * 60 == pytest.approx(turns_s + jobs_s)
    together = order.run(scripts, figures.mcp(3, 4, "caas"))
    assert max(turns_s, jobs_s) / 4 < together.makespan * 60 < turns_s
    many = [script_of(record) for record in make_trace(60, 4)]
    assert [row.split(" | ")[0] for row in order.rows(many)] == ["3", "5"]


@pytest.fixture(scope="module")
def past_the_cliff():
    """Runs a batch in which FCFS has lost its cache: nodes are split and evicted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PAPER))
        reproduce = importlib.import_module("reproduce")
        cell = importlib.import_module("figures").Cell("widesearch", 112, 0.1)

        found = {}

        def run(engine) -> dict:
            if engine.program not in found:
                with engine.pool() as pool:
                    variant = reproduce.Variant(Fraction(1, 16), engine=engine)
                    result = reproduce.run(cell, variant, pool)
                for measured in ("cpu_s", "wall_s", "priority_cpu_s", "date"):
                    del result[measured]
                found[engine.program] = result
            return found[engine.program]

        yield run


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_older_engine_evicts_cold_trajectories_whole(load, past_the_cliff) -> None:
    engines = load("engines").ENGINES
    older, present = (past_the_cliff(engines[name]) for name in ("older", "present"))
    assert older["pools"] == present["pools"]
    assert older["reuse"] < present["reuse"] - 0.2
    assert older["minutes"] > 1.2 * present["minutes"]


IN_PLACE = """
import os
import sys
os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
from sglang import virtual_worker


def refresh_path(component, phase, node, root):
    if phase.name == "WALKDOWN":  # once for each node on the way; its end will do
        return
    kind = component.component_type
    recency = component.tree_core.lru_lists[kind]
    path = []
    while node is not root:
        if node.component_data[kind].value is not None and recency.in_list(node):
            path.append(node)
        node = node.parent
    for holder in reversed(path):
        recency.reset_node_mru(holder)


class Session(virtual_worker._Session):
    def _start(self, command):
        from sglang.srt.mem_cache.unified_cache.components import mamba

        mamba.MambaComponent.refresh_lru = refresh_path
        return super()._start(command)


virtual_worker._Session = Session
sys.exit(virtual_worker.main(["--fork"]))
"""


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_matching_ancestors_is_refreshing_them(load, past_the_cliff, tmp_path) -> None:
    """The Python tree core can do in its lists what the other does by matching."""
    in_place = tmp_path / "in_place.py"
    in_place.write_text(IN_PLACE)
    older = load("engines").ENGINES["older"]
    expected = past_the_cliff(older._replace(program=(str(in_place),)))
    assert past_the_cliff(older) == expected


def test_each_variant_keeps_its_own_results(load, tmp_path) -> None:
    reproduce, engines, figures = load("reproduce"), load("engines"), load("figures")
    cell = figures.routed("bfcl", "lbch")
    usual = reproduce.Variant(Fraction(1, 32))
    variants = [
        usual,
        usual._replace(engine=engines.ENGINES["present"]),
        usual._replace(worker_names=("left", "right")),
        usual._replace(lbch_load_factor=1.05),
        usual._replace(seed=1),
    ]
    stores = [reproduce.Store(tmp_path, variant) for variant in variants]
    stores[0].add(cell, {"minutes": 1.5})
    assert [cell in store for store in stores] == [True, False, False, False, False]
    assert [file.name for file in tmp_path.iterdir()] == ["scale-1-32.json"]
    assert len({reproduce.model_of(cell, variant) for variant in variants}) == 5
    assert len({variant.file_name for variant in variants}) == 5
    assert reproduce.scales_in(tmp_path) == [Fraction(1, 32)]


def test_another_load_factor_reaches_the_policy_of_lbch_alone(
    load, monkeypatch
) -> None:
    reproduce, figures = load("reproduce"), load("figures")
    variant = reproduce.Variant(Fraction(1, 32), lbch_load_factor=1.05)

    class Stop(Exception):
        pass

    def policy_of(router):
        cell = figures.routed("bfcl", router)
        made = []

        def simulate(scripts, settings, make, pool):
            made.append(make(settings.names))
            raise Stop

        monkeypatch.setattr(reproduce, "simulate", simulate)
        with pytest.raises(Stop):
            reproduce.run(cell, variant, None)
        return made[0]

    assert policy_of("lbch").load_factor == 1.05
    assert not hasattr(policy_of("consistent_hashing"), "load_factor")


def test_a_load_factor_runs_only_what_it_changes(load, tmp_path, monkeypatch) -> None:
    reproduce = load("reproduce")
    ran = []

    def run(cell, variant, pool):
        ran.append(cell)
        return {"minutes": 1.0}

    monkeypatch.setattr(reproduce, "run", run)
    monkeypatch.setattr(reproduce, "line", lambda cell, result: cell.key)
    options = ["--figures", "figure-8", "figure-6", "--lbch-load-factor", "1.05"]
    assert reproduce.main([*options, "--output", str(tmp_path)]) == 0
    assert {(cell.workers, cell.router_policy) for cell in ran} == {(2, "lbch")}
    assert len(ran) == 3


def test_the_optimized_deployment_keeps_one_state_per_path(load) -> None:
    reproduce, figures = load("reproduce"), load("figures")

    def limit(cell) -> int:
        return reproduce.settings_of(cell, reproduce.Variant()).max_states_per_path

    optimized, baseline = (
        figures.TABLE_2[f"swe {n}"][0] for n in ("opt", "baseline 2")
    )
    assert limit(optimized) == limit(figures.mcp(5, 10)) == 1
    assert limit(baseline) == limit(figures.TABLE_3["baseline"][0]) == -1
    swept = [entry.cell for f in (figures.figure_3, figures.figure_6) for entry in f()]
    assert {limit(cell) for cell in swept} == {-1}
