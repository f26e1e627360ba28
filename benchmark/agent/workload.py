"""The work every contender does: so many trajectories of so many turns.

A turn asks the stub server and then, but for the last, runs one stub environment job.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRAJECTORIES = 5_000
TURNS = 10
SAMPLE_CONCURRENCY = 2_000
ENV_CONCURRENCY = 64

CORES = sorted(os.sched_getaffinity(0))  # before anything is pinned
CLIENT_CORE, SERVER_CORE = CORES[0], CORES[-1]


@contextmanager
def stub_server(mean_s: float) -> Iterator[str]:
    """Run the stub in a process of its own, on a core of its own; yields its URL."""
    process = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).with_name("stub.py")),
            "--mean-s",
            str(mean_s),
        ],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: pin(SERVER_CORE),
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def service_s(turn_id: str, mean_s: float) -> float:
    """Return how long the stub takes for a turn: from half to one and a half means.

    Equal times, or times that depend on each other like a checksum's, would bring all
    trajectories into step, and a burst of turns would be measured instead of a load.
    """
    drawn = int.from_bytes(hashlib.sha256(turn_id.encode()).digest()[:8], "little")
    return mean_s * (0.5 + drawn / 2**64)


def pin(core: int) -> None:
    """Keep this process, and threads and processes it starts, on one core."""
    os.sched_setaffinity(0, {core})


def resident_bytes() -> int:
    """Return the resident memory of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def children_cpu_s() -> float:
    """Return the CPU time of the processes started and ended here: of the stub."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_tasks(path: Path, trajectories: int) -> None:
    with path.open("w") as file:
        for n in range(trajectories):
            task = {
                "id": f"sample-{n:05d}",
                "messages": [{"role": "user", "content": f"Task {n}: look it up."}],
                "environment": {"type": "bench"},
            }
            file.write(json.dumps(task) + "\n")


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
