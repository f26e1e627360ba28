"""Replays batches on a real CPU engine and in virtual time, and compares.

Three steps, each with files in the output folder. ``measure`` starts an engine with
the tiny hybrid model and small pools for every schedule policy, replays two calibration
batches on one of them, one of which leaves no request waiting, and then the validation
batches on all, in turns. ``fit`` makes the cost model from the calibration runs alone.
``compare`` simulates the validation batches with every policy and the engines' flags,
and holds makespan, reuse and the order of the policies against the real runs.

    python benchmark/paper/validate_cpu.py --output build/validate-cpu

Needs a quiet machine: the times are real. ``serve`` keeps the engines up for a later
``measure``, so that a quiet moment need not hold their start. ``measure`` repeats no
run that it has already, unless other processes took more than
:data:`OTHERS_LIMIT_CPUS` meanwhile, and can be given a time limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from sgl_router.policies import make_policy
from sglang_agent.machine import in_words
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Outcome,
    Stage,
    TrajectoryRecord,
)
from sglang_agent.replay import ReplaySettings, replay
from sglang_agent.report import build_report
from sglang_agent.simulate import (
    Deployment,
    SimulationSettings,
    load_deployment,
    simulate,
)
from sglang_agent.simulate.calibration import calibrate
from sglang_agent.simulate.script import script_of
from sglang_agent.simulate.workers import WorkerPool
from sglang_agent.trace import read_trace, write_trace

NAME = "cpu-tiny-ling"
OTHERS = "others_cpus"


class Contender(NamedTuple):
    """A schedule policy and how many labels it keeps; None: the engine's default."""

    policy: str
    capacity: int | None = None


CONTENDERS = {
    "fcfs": Contender("fcfs"),
    "lpm": Contender("lpm"),
    "routing-prefix": Contender("routing-prefix"),
    # As many labels as requests run at once.
    "routing-prefix-10": Contender("routing-prefix", 10),
}
KV_TOKENS, STATE_SLOTS, CHUNK_TOKENS, CONTEXT_TOKENS = 24_576, 30, 1024, 32_768
START_LIMIT_S = 600.0
# A run in which other processes use more than this is noise.
OTHERS_LIMIT_CPUS = 0.65
# Longer than any run takes on a machine that is fit for this.
RUN_S = 110.0

# Both pools and the cache are the same on both sides.
CACHE_FLAGS = (
    *("--max-total-tokens", str(KV_TOKENS)),
    *("--max-mamba-cache-size", str(STATE_SLOTS)),
)
ENGINE_FLAGS = (
    *CACHE_FLAGS,
    *("--chunked-prefill-size", str(CHUNK_TOKENS)),
    *("--mamba-radix-cache-strategy", "no_buffer"),
    *("--mamba-max-states-per-path", "1"),
    *("--host", "127.0.0.1"),
)


class Batch(msgspec.Struct, frozen=True):
    """A seeded trace and how many of its trajectories are active at once."""

    name: str
    seed: int
    trajectories: int
    concurrency: int
    turns: tuple[int, int] = (3, 9)
    inference_only: bool = False


class Engine(NamedTuple):
    """A running engine and the process that everything of it descends from."""

    url: str
    pid: int


CALM = Batch("calm", seed=1, trajectories=24, concurrency=7)
BUSY = Batch("busy", seed=2, trajectories=32, concurrency=20)
CALIBRATION = (CALM, BUSY)
# Without pauses reuse hardly depends on the engine's speed; with them it does, past the
# cliff: the slower the engine, the more requests wait for a policy to choose from.
INFERENCE = Batch(
    "inference", seed=0, trajectories=48, concurrency=16, inference_only=True
)
AGENTS = Batch("agents", seed=0, trajectories=48, concurrency=24)
VALIDATION = (INFERENCE, AGENTS)
# How much of a difference in reuse may come from a wrong speed alone.
OTHER_SPEEDS = (1.1, 1 / 1.1)


def main(arguments: list[str] | None = None) -> int:
    """Run the steps that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = ("measure", "fit", "compare", "serve")
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help="default: measure fit compare"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=2, help="default 2")
    parser.add_argument(
        "--measure-limit-s", type=float, default=3600.0, help="default 3600"
    )
    options = parser.parse_args(arguments)
    chosen = options.steps or steps[:3]
    for step in chosen:
        if step not in steps:
            parser.error(f"STEP must be one of {', '.join(steps)}, got {step!r}")
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if "serve" in chosen:
        with serving(folder):
            signal.pause()
    if "measure" in chosen:
        with serving(folder) as engines:
            measure(folder, engines, options.repeats, options.measure_limit_s)
    if "fit" in chosen:
        fit(folder)
    if "compare" in chosen:
        write_json(folder / "comparison.json", compare(folder))
        print((folder / "comparison.json").read_text())
    return 0


# -- traces -----------------------------------------------------------------------


def make_trace(batch: Batch) -> list[TrajectoryRecord]:
    """Agents whose contexts grow to a few thousand tokens, with tools of a second."""
    rng = random.Random(batch.seed)
    return [
        make_trajectory(f"t{index}", batch, rng) for index in range(batch.trajectories)
    ]


def make_trajectory(label: str, batch: Batch, rng: random.Random) -> TrajectoryRecord:
    """One trajectory; the first 100 tokens are those of all others."""
    stages: list[Stage] = []
    context = rng.randint(300, 900)
    turns = rng.randint(*batch.turns)
    for turn in range(1, turns + 1):
        output = rng.randint(16, 80)
        stages.append(InferenceStage(turn, context, output, 0, 0.0, None, 0.0))
        grown = rng.randint(60, 500)
        pause_s = rng.uniform(0.1, 1.5)
        if turn < turns:
            stages.append(
                EnvironmentStage(turn, [], 0.0, 0.0, pause_s, response_tokens=grown)
            )
        context += output + grown
    return TrajectoryRecord(
        label=label,
        sample_id=label,
        shared_tokens=100,
        submitted_s=0.0,
        admitted_s=0.0,
        ended_s=0.0,
        outcome=Outcome.COMPLETED,
        stages=stages,
    )


# -- real engines -----------------------------------------------------------------


def measure(
    folder: Path, engines: dict[str, Engine], repeats: int, limit_s: float
) -> None:
    """Replay the calibration batches, then the validation batches in turns."""
    info = json.loads(get(engines["fcfs"].url + "/server_info"))
    (folder / "engine.json").write_text(json.dumps(info["hybrid_capacity"], indent=1))
    deadline = time.monotonic() + limit_s
    runs = [(batch, "fcfs", 1) for batch in CALIBRATION] + [
        (batch, policy, number)
        for number in range(1, repeats + 1)
        for batch in VALIDATION
        for policy in CONTENDERS
    ]
    for batch, policy, number in runs:
        name = f"{batch.name}.{policy}.{number}"
        if not is_quiet(folder / name):
            if time.monotonic() > deadline - RUN_S:
                print("the time is over", file=sys.stderr)
                return
            replayed(folder / name, batch, engines[policy])


def replayed(folder: Path, batch: Batch, engine: Engine) -> None:
    """Replay ``batch`` and keep its trace in ``folder``."""
    settings = ReplaySettings(
        base_url=engine.url,
        sample_concurrency=batch.concurrency,
        env_concurrency=batch.trajectories,
        vocab_size=256,
        bypass_environment=batch.inference_only,
        warmup=3,
    )
    before = Load.now(engine)
    records = asyncio.run(replay(make_trace(batch), settings))
    others = before.others_cpus(Load.now(engine))
    failed = [r.error for r in records if r.outcome is not Outcome.COMPLETED]
    if failed:
        raise RuntimeError(f"{folder.name}: {len(failed)} failed: {failed[0]}")
    folder.mkdir(exist_ok=True)
    write_trace(folder / "trace.jsonl", records)
    (folder / OTHERS).write_text(f"{others:.2f}\n")
    report = build_report(records, {})
    print(
        f"{folder.name}: {report.makespan_s:.1f} s, reuse {report.reuse:.3f}, others "
        f"took {others:.2f} CPUs",
        file=sys.stderr,
    )


def is_quiet(folder: Path) -> bool:
    """Whether the folder holds a run that others left alone."""
    return (folder / OTHERS).exists() and others_cpus(folder) <= OTHERS_LIMIT_CPUS


def others_cpus(run: Path) -> float:
    """CPUs that other processes used during a run, those of the machine's host too."""
    return float((run / OTHERS).read_text())


def quiet_runs(folder: Path, batch: Batch, policy: str) -> list[Path]:
    """The runs that count. Raises RuntimeError when there is none."""
    runs = sorted(folder.glob(f"{batch.name}.{policy}.*"))
    quiet = [run for run in runs if is_quiet(run)]
    if not quiet:
        raise RuntimeError(f"no quiet run of {batch.name}, {policy}; measure again")
    return quiet


class Load(NamedTuple):
    """CPU seconds so far, of the machine and of the engines and this process."""

    at_s: float
    machine_s: float
    ours_s: float

    @classmethod
    def now(cls, engine: Engine) -> Load:
        times = psutil.cpu_times()
        idle_s = times.idle + times.iowait + times.guest + times.guest_nice
        front = psutil.Process(engine.pid)
        ours = [psutil.Process(), front, *front.children(recursive=True)]
        ours_s = sum(sum(process.cpu_times()[:2]) for process in ours)
        return cls(time.monotonic(), sum(times) - idle_s, ours_s)

    def others_cpus(self, later: Load) -> float:
        """CPUs that everything else was using between the two moments."""
        others_s = later.machine_s - self.machine_s - (later.ours_s - self.ours_s)
        return others_s / (later.at_s - self.at_s)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[dict[str, Engine]]:
    """Engines by policy: those that ``serve`` keeps, or new ones."""
    kept = folder / "engines.json"
    if kept.exists():
        yield msgspec.json.decode(kept.read_bytes(), type=dict[str, Engine])
        return
    model = make_model(folder)
    with contextlib.ExitStack() as stack:
        engines = {
            policy: stack.enter_context(started(policy, model, folder))
            for policy in CONTENDERS
        }
        stack.callback(kept.unlink)
        kept.write_bytes(msgspec.json.encode(engines))
        print("engines are up", file=sys.stderr, flush=True)
        yield engines


def make_model(folder: Path) -> Path:
    """The tiny hybrid model."""
    model = folder / "tiny-ling"
    if not (model / "config.json").exists():
        command = [sys.executable, "-m", "sglang.demo_model", "tiny-ling"]
        subprocess.run([*command, "--output", str(model)], check=True, cwd=folder)
    return model


@contextlib.contextmanager
def started(policy: str, model: Path, folder: Path) -> Iterator[Engine]:
    """An engine of its own, until the block ends. An idle one costs no CPU."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port)]
    command += ["--model-path", str(model), *flags_of(CONTENDERS[policy])]
    with (folder / f"{policy}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            start_new_session=True,
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", process)
        yield Engine(f"http://127.0.0.1:{port}", process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def flags_of(contender: Contender) -> list[str]:
    """An engine's flags."""
    flags = ["--schedule-policy", contender.policy, *ENGINE_FLAGS]
    if contender.capacity is not None:
        flags += ["--routing-prefix-capacity", str(contender.capacity)]
    return flags


def free_port() -> int:
    """Below the range that outgoing connections take theirs from."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Poll until the engine serves. Raises RuntimeError when it ends or is late."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the engine ended with {process.returncode}")
        with contextlib.suppress(OSError):
            get(url + "/model_info")
            return
        time.sleep(1)
    raise RuntimeError(f"the engine was not ready within {START_LIMIT_S:g} s")


def get(url: str) -> bytes:
    """The body of a GET."""
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
        return body


# -- the cost model ---------------------------------------------------------------


def fit(folder: Path) -> None:
    """Write the cost model from the calibration runs."""
    runs = [quiet_runs(folder, batch, "fcfs")[0] for batch in CALIBRATION]
    found = calibrate(*map(read_trace, runs))
    geometry = json.loads((folder / "engine.json").read_text())
    deployment = Deployment(
        name=NAME,
        description=f"One engine with the tiny hybrid model on {in_words()}",
        passes=found.passes,
        request_overhead_s=found.overhead_s,
        kv_bytes_per_token=geometry["kv_bytes_per_token"],
        state_bytes_per_slot=geometry["state_bytes_per_slot"],
        cache_bytes=float(1 << 30),
        cache_strategy="no_buffer",
        page_size=1,
        chunked_prefill_tokens=CHUNK_TOKENS,
        context_length_tokens=CONTEXT_TOKENS,
        fit={
            "source": f"benchmark/paper/validate_cpu.py, {time.strftime('%Y-%m-%d')}",
            "requests": found.requests,
            "explained_variance": round(found.explained, 4),
        },
    )
    write_json(folder / f"{NAME}.json", deployment)


def write_json(file: Path, content: Any) -> None:
    """Indented, with a last line end."""
    file.write_bytes(
        msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
    )


# -- the comparison ---------------------------------------------------------------


def compare(folder: Path) -> dict[str, Any]:
    """Simulate every batch and policy; the result also goes into the cost model."""
    file = folder / f"{NAME}.json"
    deployment = load_deployment(str(file))
    with WorkerPool() as pool:

        def row(batch: Batch, policy: str) -> dict[str, Any]:
            runs = quiet_runs(folder, batch, policy)
            as_fitted, *others = (
                simulated(policy, batch, at_speed(deployment, speed), pool)
                for speed in (1.0, *OTHER_SPEEDS)
            )
            return {**beside(runs, as_fitted), "other_speeds": figures(others)}

        calibration = {batch.name: row(batch, "fcfs") for batch in CALIBRATION}
        tables = {b.name: {p: row(b, p) for p in CONTENDERS} for b in VALIDATION}
    errors = {
        name: {policy: errors_of(row) for policy, row in table.items()}
        for name, table in tables.items()
    }
    own = {name: errors_of(row) for name, row in calibration.items()}
    account = {**deployment.fit, "calibration": own, "validation": errors}
    write_json(file, msgspec.structs.replace(deployment, fit=account))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": in_words(),
        "calibration": calibration,
        "batches": {batch.name: msgspec.to_builtins(batch) for batch in VALIDATION},
        "other_speeds": OTHER_SPEEDS,
        "policies": tables,
        "shortest_first": {name: orders(table) for name, table in tables.items()},
    }


def simulated(
    policy: str, batch: Batch, deployment: Deployment, pool: WorkerPool
) -> list[TrajectoryRecord]:
    """``batch`` in virtual time, with the engine's flags and exact lengths."""
    settings = SimulationSettings(
        deployment=deployment,
        sample_concurrency=batch.concurrency,
        schedule_policy=CONTENDERS[policy].policy,
        routing_prefix_capacity=CONTENDERS[policy].capacity,
        bypass_environment=batch.inference_only,
        max_new_tokens=None,
        server_args=list(CACHE_FLAGS),
    )
    scripts = [script_of(record) for record in make_trace(batch)]
    result = simulate(scripts, settings, partial(make_policy, "lbch"), pool)
    if (result.pools.kv_tokens, result.pools.state_slots) != (KV_TOKENS, STATE_SLOTS):
        raise RuntimeError(f"the virtual pools differ: {result.pools}")
    return result.records


def at_speed(deployment: Deployment, speed: float) -> Deployment:
    """The same engine, ``speed`` times as fast."""
    costs = msgspec.structs.asdict(deployment.passes)
    passes = type(deployment.passes)(**{k: v / speed for k, v in costs.items()})
    return msgspec.structs.replace(deployment, passes=passes)


def beside(runs: Sequence[Path], virtual: list[TrajectoryRecord]) -> dict[str, Any]:
    """Real runs and the simulated one, with the differences to the means."""
    left, right = figures([read_trace(run) for run in runs]), figures([virtual])
    makespans = mean(left["makespan_s"]), mean(right["makespan_s"])
    points = 100 * (mean(right["reuse"]) - mean(left["reuse"]))
    return {
        "real": {**left, "others_cpus": [others_cpus(run) for run in runs]},
        "virtual": right,
        "makespan_error": round(makespans[1] / makespans[0] - 1, 4),
        "reuse_error_points": round(points, 2),
    }


def errors_of(row: dict[str, Any]) -> dict[str, float]:
    """What is wrong with a simulated run."""
    return {key: row[key] for key in ("makespan_error", "reuse_error_points")}


def orders(table: dict[str, Any]) -> dict[str, list[str]]:
    """The policies from the shortest makespan on, real and simulated."""
    return {
        side: sorted(table, key=lambda policy: mean(table[policy][side]["makespan_s"]))
        for side in ("real", "virtual")
    }


def figures(runs: Sequence[list[TrajectoryRecord]]) -> dict[str, list[float]]:
    """Makespan and reuse of each run."""
    reports = [build_report(records, {}) for records in runs]
    return {
        "makespan_s": [round(r.makespan_s, 2) for r in reports],
        "reuse": [round(r.reuse or 0.0, 4) for r in reports],
    }


mean = statistics.fmean


if __name__ == "__main__":
    sys.exit(main())
