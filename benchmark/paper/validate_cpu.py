"""Replays one trace on a real CPU server and in virtual time, and compares.

For each schedule policy a server with the tiny hybrid model is started with small
pools and the trace is replayed against it; the first run calibrates the cost model.
Then the same trace is simulated with every policy. Compared are makespan, reuse and
the order of the policies. Needs a quiet machine: the server's times are real.

    python benchmark/paper/validate_cpu.py --output build/validate-cpu
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
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sgl_router.policies import make_policy
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Outcome,
    Stage,
    TrajectoryRecord,
)
from sglang_agent.replay import ReplaySettings, replay
from sglang_agent.report import build_report
from sglang_agent.simulate import Deployment, SimulationSettings, simulate
from sglang_agent.simulate.calibration import calibrate
from sglang_agent.simulate.script import script_of
from sglang_agent.simulate.workers import WorkerPool
from sglang_agent.trace import write_trace

POLICIES = ("fcfs", "lpm", "routing-prefix")
KV_TOKENS, STATE_SLOTS, CHUNK = 16_384, 30, 1024
CONCURRENCY = 16
START_LIMIT_S = 600.0

# Bytes of the tiny model: one MLA layer, three KDA layers, bfloat16 window.
KV_BYTES, STATE_BYTES = 160.0, 15_744.0


def main(arguments: list[str] | None = None) -> int:
    """Replay, calibrate, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    trace = make_trace(options.trajectories, options.turns)
    real = {
        policy: replayed(policy, trace, options.output / policy) for policy in POLICIES
    }
    costs = calibrate(real[POLICIES[0]])
    deployment = Deployment(
        name="cpu-tiny-ling",
        description="the tiny hybrid model on this CPU",
        passes=costs.passes,
        request_overhead_s=costs.overhead_s,
        kv_bytes_per_token=KV_BYTES,
        state_bytes_per_slot=STATE_BYTES,
        cache_bytes=2 * (KV_TOKENS * KV_BYTES + STATE_SLOTS * STATE_BYTES),
        cache_strategy="no_buffer",
        page_size=1,
        chunked_prefill_tokens=CHUNK,
        context_length_tokens=8192,
    )
    with WorkerPool() as pool:
        virtual = {
            policy: simulated(policy, trace, deployment, pool) for policy in POLICIES
        }
    found = compare(real, virtual)
    found["calibration"] = {"explained_variance": costs.explained}
    text = json.dumps(found, indent=1)
    (options.output / "comparison.json").write_text(text + "\n")
    print(text)
    return 0


def make_trace(trajectories: int, turns: int) -> list[TrajectoryRecord]:
    """Seeded trajectories that fit the tiny model's context."""
    rng = random.Random(0)
    records = []
    for index in range(trajectories):
        stages: list[Stage] = []
        context = rng.randint(300, 700)
        for turn in range(1, turns + 1):
            output = rng.randint(12, 60)
            stages.append(InferenceStage(turn, context, output, 0, 0.0, None, 0.0))
            grown = rng.randint(80, 240)
            if turn < turns:
                pause_s = rng.uniform(0.1, 1.0)
                stages.append(
                    EnvironmentStage(turn, [], 0.0, 0.0, pause_s, response_tokens=grown)
                )
            context += output + grown
        records.append(
            TrajectoryRecord(
                label=f"t{index}",
                sample_id=f"t{index}",
                shared_tokens=100,
                submitted_s=0.0,
                admitted_s=0.0,
                ended_s=0.0,
                outcome=Outcome.COMPLETED,
                stages=stages,
            )
        )
    return records


def replayed(
    policy: str, trace: Sequence[TrajectoryRecord], folder: Path
) -> list[TrajectoryRecord]:
    """Replay against a server of our own."""
    folder.mkdir(parents=True, exist_ok=True)
    with served(policy, folder) as url:
        settings = ReplaySettings(
            base_url=url,
            sample_concurrency=CONCURRENCY,
            env_concurrency=len(trace),
            vocab_size=256,
            warmup=3,
        )
        records = asyncio.run(replay(trace, settings))
    write_trace(folder / "trace.jsonl", records)
    failed = [r.error for r in records if r.outcome is not Outcome.COMPLETED]
    if failed:
        raise RuntimeError(f"{policy}: {len(failed)} trajectories failed: {failed[0]}")
    return records


@contextlib.contextmanager
def served(policy: str, folder: Path) -> Iterator[str]:
    """A server with the tiny model and small pools, until the block ends."""
    model = folder.parent / "tiny-ling"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    if not model.exists():
        command = [sys.executable, "-m", "sglang.demo_model", "tiny-ling"]
        subprocess.run(
            [*command, "--output", str(model.resolve())],
            check=True,
            env=environment,
            cwd=folder,
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port)]
    command += ["--model-path", str(model.resolve()), "--schedule-policy", policy]
    command += ["--max-total-tokens", str(KV_TOKENS)]
    command += ["--max-mamba-cache-size", str(STATE_SLOTS)]
    command += ["--chunked-prefill-size", str(CHUNK), "--disable-overlap-schedule"]
    command += ["--mamba-radix-cache-strategy", "no_buffer"]
    command += ["--mamba-max-states-per-path", "1"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Poll until the server answers. Raises RuntimeError when it ends or is late."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(
                f"the server ended with {process.returncode}, see its log"
            )
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        time.sleep(1)
    raise RuntimeError(f"the server was not ready within {START_LIMIT_S:g} s")


def simulated(
    policy: str,
    trace: Sequence[TrajectoryRecord],
    deployment: Deployment,
    pool: WorkerPool,
) -> list[TrajectoryRecord]:
    """The same batch in virtual time."""
    settings = SimulationSettings(
        deployment=deployment,
        sample_concurrency=CONCURRENCY,
        schedule_policy=policy,
        server_args=[
            *("--max-total-tokens", str(KV_TOKENS)),
            *("--max-mamba-cache-size", str(STATE_SLOTS)),
        ],
    )
    scripts = [script_of(record) for record in trace]
    return simulate(
        scripts, settings, lambda names: make_policy("lbch", names), pool
    ).records


def compare(
    real: dict[str, list[TrajectoryRecord]], virtual: dict[str, list[TrajectoryRecord]]
) -> dict[str, Any]:
    """Makespan and reuse, side by side."""
    rows = {}
    for policy in real:
        reports = [build_report(runs[policy], {}) for runs in (real, virtual)]
        rows[policy] = {
            "makespan_s": [round(r.makespan_s, 2) for r in reports],
            "makespan_error": round(
                reports[1].makespan_s / reports[0].makespan_s - 1, 4
            ),
            "reuse": [round(r.reuse or 0.0, 4) for r in reports],
        }
    orders = [
        sorted(rows, key=lambda p: rows[p]["makespan_s"][place]) for place in (0, 1)
    ]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "columns": ["real", "virtual"],
        "policies": rows,
        "same_order": orders[0] == orders[1],
    }


if __name__ == "__main__":
    sys.exit(main())
