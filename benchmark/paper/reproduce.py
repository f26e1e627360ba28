"""Simulates the published figures and tables, cell by cell, and keeps each result.

``make reproduce`` runs it at scale 1/8, ``make reproduce SCALE=1`` in full. Results go
to ``benchmark/paper/results/``; a cell that is there is not run again, so the command
can be stopped and started, unless cost model, trace or settings have changed since. Workloads with an environment limit always run in full: a
limit of 3 jobs has no eighth.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from engines import ENGINES, OLDER, Engine
from figures import C_REF, FIGURES, Cell, one_state_per_path, router_options

from sglang_agent.commands.simulate import policy_factory
from sglang_agent.report import build_report
from sglang_agent.simulate import (
    Deployment,
    SimulationSettings,
    load_deployment,
    simulate,
)
from sglang_agent.simulate.capacity import state_footprint_bytes
from sglang_agent.simulate.script import TrajectoryScript, script_of
from sglang_agent.simulate.workers import WorkerPool
from sglang_agent.simulate.workloads import WORKLOADS, generate

COST_MODEL = "h20-tp4-ling-3.0-flash"
RESULTS = Path(__file__).parent / "results"
ALPHA = 1.25
"""The paper's load factor of LBCH, and the default."""

ADDED_LATER = {"worker_names": (), "lbch_load_factor": ALPHA}
"""Settings that are as usual do not count, so that results from before them do."""

PRIORITY_COUNTS = ("waiting_tokens", "tokens", "walked_tokens")


class Variant(NamedTuple):
    """How the cells are run: their scale, the seed of the traces, the engine.

    ``worker_names`` are those of a batch on two workers, on the hash ring; without them
    it is ``worker-0`` and ``worker-1``. ``lbch_load_factor`` is the alpha of equation 9;
    both concern batches on two workers only.
    """

    scale: Fraction = Fraction(1, 8)
    seed: int = 0
    engine: Engine = OLDER
    worker_names: tuple[str, ...] = ()
    lbch_load_factor: float = ALPHA

    @property
    def file_name(self) -> str:
        """Where the results are kept."""
        parts = ["scale", str(self.scale).replace("/", "-")]
        if self.seed:
            parts += ["seed", str(self.seed)]
        if self.engine is not OLDER:
            parts.append(self.engine.name)
        if self.lbch_load_factor != ALPHA:
            parts += ["alpha", str(self.lbch_load_factor)]
        return "-".join([*parts, *self.worker_names]) + ".json"

    def share(self, cell: Cell) -> float:
        """The scale of one cell: what has an environment limit runs in full."""
        return 1.0 if cell.env_concurrency is not None else float(self.scale)

    def concerns(self, cell: Cell) -> bool:
        """Whether a cell is to be run: with another alpha, only what has one."""
        return self.lbch_load_factor == ALPHA or is_bounded(cell)


def is_bounded(cell: Cell) -> bool:
    """Whether the load bound of LBCH decides anything in a cell."""
    return cell.workers > 1 and cell.router_policy == "lbch"


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 8))
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, default=0, help="of the traces")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="older",
        help="the engine of the published figures (default) or SGLang 0.5.23 as it is; "
        "the latter's results go to a file of their own",
    )
    parser.add_argument("--workloads", nargs="+", help="only cells of these workloads")
    parser.add_argument(
        "--worker-names",
        nargs=2,
        default=(),
        help="other ones on the hash ring, for cells of two workers; the results go to a "
        "file of their own",
    )
    parser.add_argument(
        "--lbch-load-factor",
        type=float,
        default=ALPHA,
        help="another alpha, for cells of two workers under LBCH; only those are run and "
        "the results go to a file of their own",
    )
    parser.add_argument(
        "--parallel",
        type=int,
        default=os.cpu_count(),
        help="cells at once (default: CPUs)",
    )
    options = parser.parse_args(arguments)
    wanted = [p.cell for name in options.figures for p in FIGURES[name]()]
    if options.workloads:
        wanted = [cell for cell in wanted if cell.workload in options.workloads]
    variant = Variant(
        options.scale,
        options.seed,
        ENGINES[options.engine],
        tuple(options.worker_names),
        options.lbch_load_factor,
    )
    wanted = [cell for cell in wanted if variant.concerns(cell)]
    store = Store(options.output, variant)
    missing = [cell for cell in dict.fromkeys(wanted) if cell not in store]
    print(
        f"{len(set(wanted))} cells, {len(missing)} to run at scale {options.scale}",
        file=sys.stderr,
    )
    if not missing:
        return 0
    with variant.engine.pool() as pool, ThreadPoolExecutor(options.parallel) as threads:
        futures = {threads.submit(run, cell, variant, pool): cell for cell in missing}
        for number, future in enumerate(as_completed(futures), start=1):
            if future.exception() is not None:
                threads.shutdown(cancel_futures=True)
            cell, result = futures[future], future.result()
            store.add(cell, result)
            print(f"[{number}/{len(missing)}] {line(cell, result)}", file=sys.stderr)
    return 0


class Store:
    """One JSON file a variant: results by the cell's key.

    A result counts only while the cell's model (:func:`model_of`) is the one it had. A
    cell that always runs in full is kept with those of scale 1.
    """

    def __init__(self, folder: Path, variant: Variant) -> None:
        self._variant = variant
        self._path = folder / variant.file_name
        self._results = self._read()
        full = variant._replace(scale=Fraction(1))
        self._full = self if variant == full else Store(folder, full)

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._path.exists():
            found = json.loads(self._path.read_text())
        return found

    def __contains__(self, cell: Cell) -> bool:
        return self.get(cell) is not None

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell, if it was run with the present model."""
        if self._elsewhere(cell):
            return self._full.get(cell)
        found: dict[str, Any] | None = self._results.get(cell.key)
        if found is None or found.get("model") != model_of(cell, self._variant):
            return None
        return found

    def _elsewhere(self, cell: Cell) -> bool:
        return self._full is not self and self._variant.share(cell) == 1

    def add(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep a result at once, beside what another run has added meanwhile."""
        if self._elsewhere(cell):
            self._full.add(cell, result)
            return
        result = {**result, "model": model_of(cell, self._variant)}
        self._results = self._read() | {cell.key: result}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            f" {json.dumps(key)}: {json.dumps(value)}"
            for key, value in sorted(self._results.items())
        ]
        beside = self._path.with_suffix(".tmp")
        beside.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        beside.replace(self._path)


def scales_in(folder: Path) -> list[Fraction]:
    """The scales of which ``folder`` has results, of variants otherwise as usual."""
    names = [re.fullmatch(r"scale-(\d+)(?:-(\d+))?", p.stem) for p in folder.iterdir()]
    return sorted(Fraction(int(m[1]), int(m[2] or 1)) for m in names if m)


@functools.cache
def scripts_of(workload: str, share: float, seed: int) -> list[TrajectoryScript]:
    """The trace that all cells of a workload replay."""
    trace = generate(workload, scale=share, seed=seed)
    return [script_of(record) for record in trace]


@functools.cache
def digest_of_trace(workload: str, share: float, seed: int) -> str:
    """Tells one trace from another."""
    return _digest(scripts_of(workload, share, seed))


def _digest(value: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=8).hexdigest()


def with_budget_of(deployment: Deployment, workload: str) -> Deployment:
    """``deployment`` with the cache that gives the published C_ref (equation 7).

    The budgets of swe and bfcl come out the same, that of widesearch is 13% smaller.
    """
    if workload not in C_REF:
        return deployment
    _, concurrency = C_REF[workload]
    footprint = state_footprint_bytes(deployment) * (1 + 1 / WORKLOADS[workload].r_bal)
    # The published number is rounded down.
    return msgspec.structs.replace(
        deployment, cache_bytes=(concurrency + 0.5) * footprint
    )


def settings_of(
    cell: Cell, variant: Variant, deployment: Deployment | None = None
) -> SimulationSettings:
    """What to simulate for a cell; with another cost model if one is given."""
    capped = cell in one_state_per_path()
    share = variant.share(cell)
    whole = deployment or load_deployment(COST_MODEL)
    return SimulationSettings(
        deployment=with_budget_of(whole, cell.workload).scaled(share),
        max_states_per_path=1 if capped else variant.engine.max_states_per_path,
        sample_concurrency=max(1, round(cell.sample_concurrency * share)),
        workers=cell.workers,
        worker_names=variant.worker_names if cell.workers == 2 else (),
        lbch_load_factor=variant.lbch_load_factor if is_bounded(cell) else ALPHA,
        schedule_policy=cell.schedule_policy,
        router_policy=cell.router_policy,
        router_options=router_options(cell, share),
        ratio=cell.ratio,
        env_concurrency=cell.env_concurrency,
        job_order=cell.job_order,
        bypass_environment=WORKLOADS[cell.workload].environment_mean_s is None,
        max_new_tokens=None,
        time_limit_s=cell.time_limit_hours * 3600,
    )


def model_of(cell: Cell, variant: Variant) -> str:
    """Tells results of one cost model, trace and setting from those of another."""
    settings = msgspec.to_builtins(settings_of(cell, variant))
    for text in ("fit", "description"):
        del settings["deployment"][text]
    for later, usual in ADDED_LATER.items():
        if settings[later] == usual:
            del settings[later]
    trace = digest_of_trace(cell.workload, variant.share(cell), variant.seed)
    engine = variant.engine
    return _digest([settings, engine.environment, engine.name, trace])


def run(cell: Cell, variant: Variant, pool: WorkerPool) -> dict[str, Any]:
    """Simulate one batch in workers of the variant's engine."""
    share = variant.share(cell)
    scripts = scripts_of(cell.workload, share, variant.seed)
    settings = settings_of(cell, variant)
    began = time.perf_counter()
    result = simulate(
        scripts,
        settings,
        lambda _: policy_factory()(settings),
        pool,
    )
    report = build_report(result.records, {"workers": settings.names})

    def total(counter: str) -> float:
        return sum(getattr(worker, counter) for worker in result.workers)

    return {
        "timed_out": result.timed_out,
        "minutes": round(report.makespan_s / 60, 2),
        "reuse": report.reuse and round(report.reuse, 4),
        "new_prefill_millions": round(report.new_prefill_tokens / share / 1e6, 2),
        "mean_in_flight": round(report.inflight_inference.mean / share, 2),
        "output_tokens_per_s": round(
            report.output_tokens / share / max(report.makespan_s, 1e-9), 1
        ),
        "l5_minutes": round(report.l5_s / 60, 2),
        "l10_minutes": round(report.l10_s / 60, 2),
        "t95_minutes": round(report.t95_s / 60, 2),
        "beta": report.beta and round(report.beta, 4),
        "gamma": report.gamma and round(report.gamma, 4),
        "ttft_s": round(report.first_token_s.mean, 3),
        "priority_cpu_s": round(total("priority_cpu_s"), 3),
        "priority_s": round(total("priority_seconds"), 2),
        "priority_calls": total("priority_calls"),
        "priority_million_tokens": {
            field: round(total(f"priority_{field}") / share / 1e6, 2)
            for field in PRIORITY_COUNTS
        },
        "retractions": total("retractions"),
        "scale": share,
        "pools": msgspec.to_builtins(result.pools),
        "cpu_s": round(total("cpu_s"), 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def line(cell: Cell, result: dict[str, Any]) -> str:
    """Progress, one cell a line."""
    end = "time-out" if result["timed_out"] else f"{result['minutes']:.1f} min"
    return f"{cell.key}: {end}, reuse {result['reuse']}, {result['wall_s']:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
