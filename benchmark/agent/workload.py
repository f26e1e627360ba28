"""The work every contender does: so many trajectories of so many turns.

A turn asks the stub server and then, but for the last, runs one stub environment job.
"""

from __future__ import annotations

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

# Names the Python that serves the stub for a contender that lives without our client.
STUB_PYTHON = "BENCH_STUB_PYTHON"

CLIENT_CORE, SERVER_CORE = 0, 1  # of those this process may use


@contextmanager
def stub_server(delay_s: float) -> Iterator[str]:
    """Run the stub worker in a process of its own, on a core of its own."""
    process = subprocess.Popen(
        [
            os.environ.get(STUB_PYTHON, sys.executable),
            "-m",
            "sglang_agent.testing.stub_worker",
            "--delay-s",
            str(delay_s),
            "--tool-turns",
            str(TURNS - 1),
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


def pin(core: int) -> None:
    """Keep this process on one core, where there is another for the rest."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def resident_bytes() -> int:
    """Return the resident memory of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


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
