"""All of it: ``python benchmark/agent``, one process a contender, JSON lines out.

    --quick           a tenth of the work
    --inspect PYTHON  also run inspect-ai, by the Python of an environment that has it
    --verifiers PYTHON  likewise verifiers

Ends with 1 when a threshold is missed or our runner is not ahead of a peer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import workload

HERE = Path(__file__).parent

# What must hold on one free core; times and sizes in the units of the names.
AT_LEAST = {"turns_per_s": 1500.0}
AT_MOST = {
    "added_p99_ms": 20.0,
    "bytes_per_waiting": 60_000.0,
    "push_us": 5.0,
    "pop_us": 5.0,
}


def ask(python: str, script: str, *arguments: str) -> dict[str, Any]:
    """Run one measurement in a fresh process and return what it printed."""
    command = [python, str(HERE / script), *arguments]
    env = {**os.environ, workload.STUB_PYTHON: sys.executable}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=env
    )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(
        json.dumps({"measurement": " ".join([script, *arguments]), **found}), flush=True
    )
    return found


def missed(found: dict[str, Any], paced: bool) -> list[str]:
    """Return a line for each threshold that does not hold."""
    low = {} if paced else AT_LEAST
    return [
        f"{name} is {found[name]:.4g}, must be {word} {limit:g}"
        for limits, word in ((low, "at least"), (AT_MOST, "at most"))
        for name, limit in limits.items()
        if name in found
        and (found[name] < limit if word == "at least" else found[name] > limit)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmark/agent", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--inspect", metavar="PYTHON")
    parser.add_argument("--verifiers", metavar="PYTHON")
    options = parser.parse_args()
    count = workload.TRAJECTORIES // (10 if options.quick else 1)
    size = ("--trajectories", str(count))
    problems = missed(ask(sys.executable, "bench_gate.py"), False)
    ours = ask(sys.executable, "bench_run.py", "throughput", *size)
    problems += missed(ours, False)
    for question in ("latency", "memory"):
        problems += missed(ask(sys.executable, "bench_run.py", question, *size), True)
    for python, script in (
        (options.inspect, "peer_inspect.py"),
        (options.verifiers, "peer_verifiers.py"),
    ):
        if python is not None:
            # A tenth: the peers take minutes for what takes us seconds.
            peer = ask(python, script, "--trajectories", str(max(50, count // 10)))
            if peer["turns_per_s"] >= ours["turns_per_s"]:
                problems.append(f"{peer['contender']} is ahead in turns_per_s")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
