"""Broken environments in whole batches: named, quick, and nobody else's business."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_agent.__main__ import main
from sglang_agent.environments import leases
from sglang_agent.records import Outcome, TrajectoryRecord
from sglang_agent.testing.stub_worker import StubWorker
from sglang_agent.trace import read_trace

from .run_support import arguments, serving

# One tool, whose first call in the folder of a doomed sample kills the server.
SERVER = """
import json, os, sys, time
folder = sys.argv[1]
with open(os.path.join(folder, "pid"), "w") as file:
    file.write(str(os.getpid()))
calls = 0
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    method = request["method"]
    result = None
    if method == "initialize":
        version = request["params"]["protocolVersion"]
        info = {"name": "toy", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {}, "serverInfo": info}
    elif method == "tools/list":
        result = {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call":
        calls += 1
        kind = os.path.basename(folder)
        if kind.startswith("dying") and calls == 2:
            print("out of memory, says the server", file=sys.stderr, flush=True)
            os._exit(1)
        if kind.startswith("silent"):
            continue
        if kind.startswith("slow"):
            time.sleep(60)
        wrong = kind.startswith("failing")
        result = {"content": [{"type": "text", "text": "seen"}], "isError": wrong}
    body = {"result": result} if result else {"error": {"code": -32601, "message": "no"}}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}), flush=True)
"""


def write_batch(tmp_path: Path, *names: str) -> Path:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    lines = []
    for name in names:
        (tmp_path / name).mkdir()
        server = {
            "command": [sys.executable, str(script), str(tmp_path / name)],
            "tool_timeout_s": 0.1 if name.startswith("silent") else 30,
        }
        environment = {"type": "mcp", "servers": {"toy": server}}
        messages = [{"role": "user", "content": name}]
        task = {"id": name, "messages": messages, "environment": environment}
        lines.append(json.dumps(task))
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines))
    return path


def run(
    tmp_path: Path, *names: str, **worker: Any
) -> tuple[int, dict[str, TrajectoryRecord]]:
    tasks, output = write_batch(tmp_path, *names), tmp_path / "run"
    with serving(StubWorker(tool_turns=8, **worker)) as url:
        status = main(arguments(tasks, url, output))
    return status, {record.sample_id: record for record in read_trace(output)}


def gone(tmp_path: Path, name: str) -> bool:
    try:
        os.kill(int((tmp_path / name / "pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_dead_server_ends_its_sample_and_no_other(tmp_path: Path) -> None:
    started = time.monotonic()
    status, records = run(tmp_path, "dying", "fine")
    assert status == 1
    assert time.monotonic() - started < 20
    dead = records["dying"]
    assert dead.outcome is Outcome.ENVIRONMENT
    assert dead.score is None
    assert "out of memory, says the server" in (dead.error or "")
    # Two turns asked for the two calls; none was asked after the death.
    assert (
        sum(stage.__class__.__name__ == "InferenceStage" for stage in dead.stages) == 2
    )
    assert records["fine"].outcome is Outcome.COMPLETED
    assert gone(tmp_path, "dying")
    assert gone(tmp_path, "fine")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["failed"] == {"environment": 1}
    assert report["scores"]["mean"] is None


@pytest.mark.slow
def test_lost_calls_end_a_sample_and_errors_of_tools_do_not(tmp_path: Path) -> None:
    status, records = run(tmp_path, "silent", "failing")
    assert status == 1
    silent = records["silent"]
    assert silent.outcome is Outcome.ENVIRONMENT
    assert "5 calls in a row" in (silent.error or "")
    assert records["failing"].outcome is Outcome.COMPLETED
    jobs = [s for s in records["failing"].stages if hasattr(s, "operations")]
    assert len(jobs) == 8


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_servers_end_with_their_client(tmp_path: Path, number: signal.Signals) -> None:
    names = ["slow-1", "slow-2"]
    tasks = write_batch(tmp_path, *names)
    with serving(StubWorker(tool_turns=8)) as url:
        command = [sys.executable, "-m", "sglang_agent"]
        command += arguments(tasks, url, tmp_path / "run")
        client = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            wait_for(lambda: all((tmp_path / n / "pid").exists() for n in names))
            time.sleep(0.5)  # the calls that will not end have begun
            client.send_signal(number)
            output, _ = client.communicate(timeout=30)
        finally:
            client.kill()
    assert client.returncode == (130 if number == signal.SIGINT else -9), output
    if number == signal.SIGINT:
        assert re.search(r"interrupted: 0 of 2 samples", output)
    else:  # they hang and see nothing; the next client ends them
        leases.end_orphans()
    wait_for(lambda: all(gone(tmp_path, name) for name in names))


def wait_for(condition: Any, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
