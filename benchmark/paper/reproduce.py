"""Simulates the published figures and tables, cell by cell, and keeps each result.

``make reproduce`` runs it at scale 1/8, ``make reproduce SCALE=1`` in full. Results go
to ``benchmark/paper/results/``; a cell that is there is not run again, so the command
can be stopped and started. Workloads with an environment limit always run in full: a
limit of 3 jobs has no eighth.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
from figures import FIGURES, Cell, router_options

from sgl_router.policies import make_policy
from sglang_agent.report import build_report
from sglang_agent.simulate import SimulationSettings, load_deployment, simulate
from sglang_agent.simulate.script import script_of
from sglang_agent.simulate.workers import WorkerPool
from sglang_agent.simulate.workloads import WORKLOADS, generate

COST_MODEL = "h20-tp4-ling-3.0-flash"
RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 8))
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, default=0, help="of the traces")
    parser.add_argument("--workloads", nargs="+", help="only cells of these workloads")
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
    store = Store(options.output, options.scale, options.seed)
    missing = [cell for cell in dict.fromkeys(wanted) if cell not in store]
    print(
        f"{len(set(wanted))} cells, {len(missing)} to run at scale {options.scale}",
        file=sys.stderr,
    )
    if not missing:
        return 0
    with WorkerPool() as pool, ThreadPoolExecutor(options.parallel) as threads:
        futures = {
            threads.submit(run, cell, options.scale, pool, options.seed): cell
            for cell in missing
        }
        for number, future in enumerate(as_completed(futures), start=1):
            if future.exception() is not None:
                threads.shutdown(cancel_futures=True)
            cell, result = futures[future], future.result()
            store.add(cell, result)
            print(f"[{number}/{len(missing)}] {line(cell, result)}", file=sys.stderr)
    return 0


class Store:
    """One JSON file per scale and seed: results by the cell's key."""

    def __init__(self, folder: Path, scale: Fraction, seed: int = 0) -> None:
        name = str(scale).replace("/", "-") + (f"-seed-{seed}" if seed else "")
        self._path = folder / f"scale-{name}.json"
        self._results = self._read()

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._path.exists():
            found = json.loads(self._path.read_text())
        return found

    def __contains__(self, cell: Cell) -> bool:
        return cell.key in self._results

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell, if it was run."""
        found: dict[str, Any] | None = self._results.get(cell.key)
        return found

    def add(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep a result at once, beside what another run has added meanwhile."""
        self._results = self._read() | {cell.key: result}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            f" {json.dumps(key)}: {json.dumps(value)}"
            for key, value in sorted(self._results.items())
        ]
        beside = self._path.with_suffix(".tmp")
        beside.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        beside.replace(self._path)


def run(cell: Cell, scale: Fraction, pool: WorkerPool, seed: int = 0) -> dict[str, Any]:
    """Simulate one batch."""
    share = 1.0 if cell.env_concurrency is not None else float(scale)
    trace = generate(cell.workload, scale=share, seed=seed)
    scripts = [script_of(record) for record in trace]
    settings = SimulationSettings(
        deployment=load_deployment(COST_MODEL).scaled(share),
        sample_concurrency=max(1, round(cell.sample_concurrency * share)),
        workers=cell.workers,
        schedule_policy=cell.schedule_policy,
        router_policy=cell.router_policy,
        ratio=cell.ratio,
        env_concurrency=cell.env_concurrency,
        job_order=cell.job_order,
        bypass_environment=WORKLOADS[cell.workload].environment_mean_s is None,
        max_new_tokens=None,
        time_limit_s=cell.time_limit_hours * 3600,
    )
    began = time.perf_counter()
    options = router_options(cell, share)
    result = simulate(
        scripts,
        settings,
        lambda names: make_policy(cell.router_policy, names, **options),
        pool,
    )
    names = [f"worker-{index}" for index in range(cell.workers)]
    report = build_report(result.records, {"workers": names})
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
        "priority_cpu_s": round(sum(w.priority_cpu_s for w in result.workers), 3),
        "priority_million_tokens": round(
            sum(w.priority_tokens for w in result.workers) / 1e6, 1
        ),
        "retractions": sum(w.retractions for w in result.workers),
        "scale": share,
        "pools": msgspec.to_builtins(result.pools),
        "cpu_s": round(sum(w.cpu_s for w in result.workers), 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def line(cell: Cell, result: dict[str, Any]) -> str:
    """Progress, one cell a line."""
    end = "time-out" if result["timed_out"] else f"{result['minutes']:.1f} min"
    return f"{cell.key}: {end}, reuse {result['reuse']}, {result['wall_s']:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
