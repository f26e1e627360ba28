"""What one request costs in each gateway: CPU per unit, interleaved, on one core.

Every gateway runs pinned to core 0; the stub workers and the load generator (both C,
compiled here) share core 1. All gateways are up at once and take turns: each round
visits every scenario with every contender in rotated order. CPU is user plus system
time of the gateway's process tree. Medians and the range over rounds go to a JSON file
and a picture. A contender that is missing is an error unless --allow-missing says so.

    python benchmark/router/bench_router.py --install --rounds 5 --output build/bench-router
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from contenders import CONTENDERS, ROOT, Contender, Missing, install

from sglang_agent.machine import machine

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
GATEWAY_CORE, LOAD_CORE = "0", "1"


@dataclass(frozen=True)
class Scenario:
    """One kind of load. ``per`` requests or chunks are one unit of CPU."""

    name: str
    stub: str
    connections: int
    body_bytes: int
    unit: str
    per: int
    seconds_factor: float = 1.0


SCENARIOS = (
    Scenario("1 kB, 32 connections", "once", 32, 1000, "requests", 1000),
    Scenario("1 kB, 256 connections", "once", 256, 1000, "requests", 1000),
    Scenario("100 kB, 32 connections", "once", 32, 100_000, "requests", 1000),
    Scenario("1 MB, 8 connections", "once", 8, 1_000_000, "requests", 1000),
    Scenario("events, 50 streams, 5 ms", "fast", 50, 1000, "chunks", 100_000),
    Scenario("events, 400 streams, 30 ms", "slow", 400, 1000, "chunks", 100_000, 3.0),
)
STUBS = {
    "once": ["once", "318"],
    "fast": ["sse", "100", "5"],
    "slow": ["sse", "100", "30"],
}


@dataclass
class Running:
    """A contender that serves before one kind of stub."""

    contender: Contender
    port: int
    process: subprocess.Popen[bytes] | None


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, in pairs of neighbours where count is 2."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def port_pair() -> int:
    """A free port whose successor is free too."""
    while True:
        (port,) = free_ports(1)
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port


def build(folder: Path) -> None:
    """Compile the stub and the load generator."""
    for name in ("stub", "load"):
        source, target = HERE / f"{name}.c", folder / name
        subprocess.run(["cc", "-O2", "-o", str(target), str(source)], check=True)


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        for child in children.read_text().split():
            yield from tree(int(child))


def cpu_seconds(pid: int) -> float:
    """User plus system time of a process tree so far."""
    ticks = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def resident_mb(pid: int) -> float:
    """Resident memory of a process tree."""
    pages = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def pinned(core: str, command: list[str]) -> list[str]:
    return ["taskset", "-c", core, *command]


def wait_until_serving(under: Running, seconds: float = 60.0) -> None:
    """Wait until a POST through the contender is answered 200."""
    port, name = under.port, under.contender.name
    body = b'{"model":"stub","messages":[{"role":"user","content":"hello"}]}'
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: b\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nx-smg-routing-key: up\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if under.process is not None and under.process.poll() is not None:
            raise SystemExit(f"bench_router: {name} ended with {under.process.poll()}")
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=10) as sock,
        ):
            sock.sendall(request)
            if b" 200 " in sock.recv(64):
                return
        time.sleep(0.2)
    raise TimeoutError(f"{name} does not serve on port {port}")


@contextlib.contextmanager
def serving(
    folder: Path, contenders: list[Contender], kind: str
) -> Iterator[list[Running]]:
    """Every contender before stubs of one kind, all at once."""
    processes: list[subprocess.Popen[bytes]] = []
    log = (folder / f"contenders-{kind}.log").open("wb")

    def start(command: list[str], core: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            pinned(core, command), stdout=log, stderr=log, cwd=folder
        )
        processes.append(process)
        return process

    workers = free_ports(2)
    try:
        listed = ",".join(map(str, workers))
        start([str(folder / "stub"), listed, *STUBS[kind]], LOAD_CORE)
        running = []
        for contender in contenders:
            if contender.command is None:
                running.append(Running(contender, workers[0], None))
                continue
            work = folder / contender.name.replace(" ", "-")
            work.mkdir(exist_ok=True)
            port = port_pair()
            process = start(contender.command(port, workers, work), GATEWAY_CORE)
            running.append(Running(contender, port, process))
        for each in running:
            wait_until_serving(each)
        yield running
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        log.close()


def measure(
    folder: Path, scenario: Scenario, under: Running, seconds: float
) -> dict[str, float]:
    """One run of one scenario against one contender."""
    pid = under.process.pid if under.process else None
    before = cpu_seconds(pid) if pid else 0.0
    command = [
        str(folder / "load"), str(under.port), str(scenario.connections),
        str(seconds * scenario.seconds_factor), str(scenario.body_bytes),
    ]  # fmt: skip
    command += ["stream"] if scenario.unit == "chunks" else []
    done = subprocess.run(
        pinned(LOAD_CORE, command), check=True, capture_output=True, text=True
    )
    result = json.loads(done.stdout)
    used = cpu_seconds(pid) - before if pid else 0.0
    units = max(result[scenario.unit], 1)
    return {
        "cpu_s_per_unit": used / units * scenario.per,
        "rate": result[scenario.unit] / result["seconds"],
        "errors": result["errors"],
        "latency_p50_us": result["latency_us"][0],
        "latency_p99_us": result["latency_us"][1],
        "event_p50_us": result["event_delay_us"][0],
        "event_p99_us": result["event_delay_us"][1],
        "resident_mb": resident_mb(pid) if pid else 0.0,
    }


def run_rounds(
    folder: Path, contenders: list[Contender], scenarios: list[Scenario],
    rounds: int, seconds: float,
) -> dict[str, dict[str, list[dict[str, float]]]]:  # fmt: skip
    """Samples by scenario and contender."""
    samples: dict[str, dict[str, list[dict[str, float]]]] = {
        s.name: {c.name: [] for c in contenders} for s in scenarios
    }
    for kind in STUBS:
        wanted = [scenario for scenario in scenarios if scenario.stub == kind]
        if not wanted:
            continue
        with serving(folder, contenders, kind) as running:
            for number in range(rounds):
                shift = number % len(running)
                for scenario in wanted:
                    for under in running[shift:] + running[:shift]:
                        sample = measure(folder, scenario, under, seconds)
                        samples[scenario.name][under.contender.name].append(sample)
                        show(number, scenario, under, sample)
    return samples


def show(
    number: int, scenario: Scenario, under: Running, sample: dict[str, float]
) -> None:
    print(
        f"round {number + 1} {scenario.name:28s} {under.contender.name:14s} "
        f"cpu {sample['cpu_s_per_unit']:8.4f} s, {sample['rate']:9.0f}/s, "
        f"errors {sample['errors']:.0f}",
        flush=True,
    )


def summarise(
    samples: dict[str, dict[str, list[dict[str, float]]]],
) -> dict[str, object]:
    """Median, lowest and highest of every figure."""
    return {
        scenario: {
            name: {
                key: {
                    "median": statistics.median(run[key] for run in runs),
                    "low": min(run[key] for run in runs),
                    "high": max(run[key] for run in runs),
                }
                for key in runs[0]
            }
            for name, runs in by_name.items()
        }
        for scenario, by_name in samples.items()
    }


GOALS = (
    ("1 kB, 32 connections", "smg", 0.33),
    ("1 kB, 32 connections", "haproxy", 2.5),
    ("100 kB, 32 connections", "smg", 0.25),
    ("100 kB, 32 connections", "haproxy", 1.0),
    ("1 MB, 8 connections", "smg streaming", 1.0),
    ("events, 50 streams, 5 ms", "smg", 0.8),
)
"""CPU per unit: ours is at most this multiple of the rival's."""

OURS = ("ours", "ours compiled")


def judge(summary: dict[str, object]) -> list[dict[str, object]]:
    """Which goals are met, by the medians."""
    judged: list[dict[str, object]] = []
    for ours in OURS:
        for scenario, rival, most in GOALS:
            by_name = summary.get(scenario)
            if not isinstance(by_name, dict) or not {ours, rival} <= by_name.keys():
                continue
            mine = by_name[ours]["cpu_s_per_unit"]["median"]
            theirs = by_name[rival]["cpu_s_per_unit"]["median"]
            ratio = mine / theirs if theirs else float("inf")
            judged.append(
                {"contender": ours, "scenario": scenario, "rival": rival,
                 "at_most": most, "ratio": round(ratio, 3), "met": ratio <= most}
            )  # fmt: skip
        judged += judge_delay(summary, ours)
    return judged


def judge_delay(summary: dict[str, object], ours: str) -> list[dict[str, object]]:
    """Whether 400 streams are held with little delay."""
    name = "events, 400 streams, 30 ms"
    by_name = summary.get(name)
    if not isinstance(by_name, dict) or not {ours, "direct"} <= by_name.keys():
        return []
    mine, direct = (by_name[n]["event_p99_us"]["median"] for n in (ours, "direct"))
    added = (mine - direct) / 1000
    return [
        {"contender": ours, "scenario": name, "measure": "added p99, ms",
         "at_most": 5.0, "value": round(added, 3), "met": added < 5.0}
    ]  # fmt: skip


def plot(summary: dict[str, object], path: Path) -> None:
    """CPU per unit with its range, one panel a scenario."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(summary), figsize=(4 * len(summary), 4))
    panels = axes if len(summary) > 1 else [axes]
    units = {s.name: f"CPU s per {s.per:,} {s.unit}" for s in SCENARIOS}
    for panel, (scenario, by_name) in zip(panels, summary.items(), strict=True):
        assert isinstance(by_name, dict)
        shown = {n: v["cpu_s_per_unit"] for n, v in by_name.items() if n != "direct"}
        medians = [value["median"] for value in shown.values()]
        spread = [
            [value["median"] - value["low"] for value in shown.values()],
            [value["high"] - value["median"] for value in shown.values()],
        ]
        colours = ["tab:orange" if name in OURS else "tab:blue" for name in shown]
        panel.barh(list(shown), medians, xerr=spread, color=colours)
        panel.set_title(scenario, fontsize=9)
        panel.set_xlabel(units[scenario], fontsize=8)
        panel.tick_params(labelsize=8)
        panel.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def many_streams(folder: Path, streams: int = 2000) -> dict[str, float]:
    """Our resident memory while ``streams`` event streams are open."""
    chosen = [contender for contender in CONTENDERS if contender.name == "ours"]
    with serving(folder, chosen, "slow") as (under,):
        assert under.process is not None
        idle = resident_mb(under.process.pid)
        command = [
            str(folder / "load"),
            str(under.port),
            str(streams),
            "8",
            "1000",
            "once",
        ]
        load = subprocess.Popen(pinned(LOAD_CORE, command), stdout=subprocess.PIPE)
        peak = 0.0
        while load.poll() is None:
            time.sleep(0.1)
            peak = max(peak, resident_mb(under.process.pid))
        assert load.stdout is not None
        result = json.loads(load.stdout.read())
    return {
        "streams": streams,
        "idle_mb": idle,
        "peak_mb": peak,
        "finished": result["requests"],
        "errors": result["errors"],
    }


def pick_microseconds(workers: int = 64, picks: int = 100_000) -> float:
    """One LBCH pick among ``workers``, best of five."""
    code = (
        "import sys, time; from sgl_router.policies import Loads, make_policy\n"
        "workers = [f'http://10.0.0.{i}:8000' for i in range(int(sys.argv[1]))]\n"
        "loads = Loads()\n"
        "for i, w in enumerate(workers): loads.put(w, i % 5)\n"
        "policy = make_policy('lbch', workers)\n"
        "labels = [f'trajectory-{i}' for i in range(1000)] * (int(sys.argv[2]) // 1000)\n"
        "best = 1e9\n"
        "for _ in range(6):\n"
        "    start = time.perf_counter()\n"
        "    for label in labels: policy.pick(label, loads)\n"
        "    best = min(best, time.perf_counter() - start)\n"
        "print(best / len(labels) * 1e6)"
    )
    command = [sys.executable, "-c", code, str(workers), str(picks)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "sgl-router")}
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    )
    return float(done.stdout)


def choose(names: list[str], allow_missing: bool, folder: Path) -> list[Contender]:
    """The contenders that can run; a missing one ends the program unless allowed."""
    chosen = []
    for contender in CONTENDERS:
        if names and contender.name not in names:
            continue
        try:
            if contender.command is not None:
                contender.command(1, [2], folder)
            contender.version()
        except Missing as missing:
            if not allow_missing:
                raise SystemExit(f"bench_router: {contender.name}: {missing}") from None
            print(f"left out: {contender.name}: {missing}")
            continue
        chosen.append(contender)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build/bench-router")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--only", nargs="*", default=[], help="contenders by name")
    parser.add_argument(
        "--scenarios", nargs="*", default=[], help="by part of the name"
    )
    parser.add_argument("--install", action="store_true", help="fetch missing rivals")
    parser.add_argument("--allow-missing", action="store_true")
    parser.add_argument(
        "--versions", action="store_true", help="print what is compared"
    )
    given = parser.parse_args()
    folder = given.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if given.install:
        install()
    contenders = choose(given.only, given.allow_missing, folder)
    versions = {contender.name: contender.version() for contender in contenders}
    if given.versions:
        print(json.dumps(versions, indent=1))
        return 0
    scenarios = [
        s for s in SCENARIOS
        if not given.scenarios or any(part in s.name for part in given.scenarios)
    ]  # fmt: skip
    build(folder)
    about = machine()
    samples = run_rounds(folder, contenders, scenarios, given.rounds, given.seconds)
    summary = summarise(samples)
    goals = judge(summary)
    streams, pick = many_streams(folder), pick_microseconds()
    goals += [
        {"measure": "MB at 2,000 open streams", "at_most": 150,
         "value": round(streams["peak_mb"], 1), "met": streams["peak_mb"] <= 150},
        {"measure": "microseconds a pick among 64 workers", "at_most": 5,
         "value": round(pick, 2), "met": pick < 5},
    ]  # fmt: skip
    report = {
        "machine": about, "versions": versions, "rounds": given.rounds,
        "seconds": given.seconds, "summary": summary, "goals": goals, "streams": streams,
        "samples": samples,
    }  # fmt: skip
    (folder / "router.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(summary, folder / "router.png")
    for goal in goals:
        print(json.dumps(goal))
    return 0


if __name__ == "__main__":
    sys.exit(main())
