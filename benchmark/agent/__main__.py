"""All of it: ``python benchmark/agent``, a fresh process for every measurement.

    --quick         a tenth of the work, once
    --rounds N      how often throughput is measured, contenders taking turns
    --install       make an environment for each peer first, and compare with them
    --peer NAME=PYTHON  compare with a peer, run by this Python that has it
    --only GROUP    limits (what our runner must reach) or peers
    --output FILE   the figures as JSON

Ends with 1 when a limit is missed or our runner is not ahead of a peer in turns a
second, all of each program counted, its log or report included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import workload
from peers import PEERS, ROOT, Peer

from sglang_agent.machine import machine

HERE = Path(__file__).parent
GROUPS = ("limits", "peers")
Found = dict[str, Any]

# What must hold on one free core; times and sizes in the units of the names.
AT_LEAST = {"turns_per_s": 1500.0}
AT_MOST = {
    "added_p99_ms": 20.0,
    "bytes_per_waiting": 60_000.0,
    "push_us": 5.0,
    "pop_us": 5.0,
}


def ask(python: str, script: str, *arguments: str) -> Found:
    """Run one measurement in a fresh process and return what it printed."""
    command = [python, str(HERE / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Found = json.loads(done.stdout.strip().splitlines()[-1])
    found = {"measurement": " ".join([script, *arguments]), **found}
    print(json.dumps(found), flush=True)
    return found


def missed(found: Found) -> list[str]:
    """Return a line for each limit that does not hold."""
    lines = []
    for name, limit in AT_LEAST.items():
        if found.get(name, limit) < limit:
            lines.append(f"{name} is {found[name]:.4g}, must be at least {limit:g}")
    for name, limit in AT_MOST.items():
        if found.get(name, limit) > limit:
            lines.append(f"{name} is {found[name]:.4g}, must be at most {limit:g}")
    return lines


def middle(rounds: list[Found]) -> Found:
    """Return the median of each figure over the rounds, with least and most."""
    found: Found = {"measurement": rounds[0]["measurement"], "rounds": len(rounds)}
    for name, value in rounds[0].items():
        if isinstance(value, int | float):
            values = [one[name] for one in rounds]
            found[name] = statistics.median(values)
            found[f"{name}_range"] = [min(values), max(values)]
        else:
            found[name] = value
    return found


def measure_limits(trajectories: int, rounds: int) -> list[Found]:
    """Our runner against what it must reach."""
    size = ("--trajectories", str(trajectories))
    through = [
        ask(sys.executable, "bench_run.py", "throughput", *size) for _ in range(rounds)
    ]
    paced = ask(sys.executable, "bench_run.py", "latency", *size)
    # The pace is the stub's own here, not what can get through.
    paced["paced_turns_per_s"] = paced.pop("turns_per_s")
    return [
        middle(through),
        paced,
        ask(sys.executable, "bench_run.py", "memory", *size),
        ask(sys.executable, "bench_gate.py"),
    ]


def measure_peers(
    pythons: dict[str, str], trajectories: int, rounds: int
) -> list[Found]:
    """The same work by each contender in turn, ours first; medians."""
    size = ("--trajectories", str(trajectories))
    contenders = [(sys.executable, ("bench_run.py", "throughput"))]
    contenders += [(pythons[p.name], (p.script,)) for p in PEERS if p.name in pythons]
    found: list[list[Found]] = [[] for _ in contenders]
    for _ in range(rounds):
        for kept, (python, command) in zip(found, contenders, strict=True):
            kept.append(ask(python, *command, *size))
    return [middle(rounds_of_one) for rounds_of_one in found]


def behind(contenders: list[Found]) -> list[str]:
    """Return a line for each peer that is not slower than ours, the first."""
    ours, *peers = contenders
    return [
        f"{peer['contender']} is ahead in turns_per_s_whole"
        for peer in peers
        if peer["turns_per_s_whole"] >= ours["turns_per_s_whole"]
    ]


def named_python(text: str) -> tuple[str, str]:
    """Read NAME=PYTHON."""
    name, _, python = text.partition("=")
    known = [peer.name for peer in PEERS]
    if name not in known or not python:
        raise argparse.ArgumentTypeError(
            f"{text!r}; must be NAME=PYTHON, NAME one of {', '.join(known)}"
        )
    return name, python


def find_peers(install: bool, given: list[tuple[str, str]]) -> dict[str, str]:
    """Return the Python of each peer to compare with."""

    def made(peer: Peer) -> str:
        peer.install()
        return str(peer.folder / "bin/python")

    found = {p.name: made(p) for p in PEERS} if install else {}
    return {**found, **dict(given)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark/agent",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--install", action="store_true")
    parser.add_argument(
        "--peer", type=named_python, action="append", default=[], metavar="NAME=PYTHON"
    )
    parser.add_argument("--only", choices=GROUPS)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build/bench-agent/agent.json"
    )
    options = parser.parse_args()
    count = workload.TRAJECTORIES // (10 if options.quick else 1)
    rounds = 1 if options.quick else options.rounds
    groups = (options.only,) if options.only else GROUPS
    pythons = find_peers(options.install, options.peer)
    report: Found = {"machine": machine()}
    problems: list[str] = []
    if "limits" in groups:
        report["limits"] = measure_limits(count, rounds)
        problems += [line for found in report["limits"] for line in missed(found)]
    if "peers" in groups and pythons:
        # A tenth: the peers take minutes for what takes us seconds.
        report["peers"] = measure_peers(pythons, max(50, count // 10), rounds)
        problems += behind(report["peers"])
    report["problems"] = problems
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
