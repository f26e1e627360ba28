"""The client and the gateway together, with stub workers behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_agent.__main__ import main
from sglang_agent.inference import TurnRequest
from sglang_agent.inference.chat import ChatClient
from sglang_agent.inference.http import HttpSettings, HttpTransport
from sglang_agent.records import InferenceStage
from sglang_agent.testing.stub_worker import StubWorker
from sglang_agent.trace import read_trace

from .run_support import StubKind, arguments, registered, serving, write_tasks

pytest.importorskip("sgl_router", reason="needs the gateway: pip install ./sgl-router")
ROUTER = Path(__file__).resolve().parents[2] / "sgl-router"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def gateway(urls: list[str]) -> Iterator[str]:
    port = free_port()
    command = [
        *(sys.executable, "-m", "sgl_router.launch_router", "--worker-urls", *urls),
        *("--policy", "lbch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(free_port())),
    ]
    path = f"{ROUTER}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        wait_ready(f"http://127.0.0.1:{port}/readiness", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise AssertionError("the gateway did not get ready")


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[list[StubWorker], str]]:
    workers = [StubWorker(), StubWorker()]
    with (
        serving(workers[0]) as one,
        serving(workers[1]) as two,
        gateway([one, two]) as url,
    ):
        yield workers, url


def test_turns_of_a_sample_stay_together_and_name_their_worker(
    fleet: tuple[list[StubWorker], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_agent.report.files.write_plots", lambda *_: [])
    workers, url = fleet
    for worker, reference in zip(workers, (3, 4), strict=True):
        worker.server_info = {
            "hybrid_capacity": {"reference_concurrency": reference},
            "routing_prefix": {"labelled": 0, "unlabelled": 0, "capacity": 3},
        }
    tasks = write_tasks(tmp_path / "tasks.jsonl", 20)
    with registered(StubKind()):
        flags = ("--sample-concurrency", "auto")
        code = main(arguments(tasks, url, tmp_path / "run", *flags))
    assert code == 0
    assert "CS=7 (auto: reference concurrency)" in capsys.readouterr().out
    used: Counter[str | None] = Counter()
    for record in read_trace(tmp_path / "run"):
        names = [s.worker for s in record.stages if isinstance(s, InferenceStage)]
        used.update(names)
        assert None not in names
    assert len(used) == 2
    seen = workers[0].labels + workers[1].labels
    assert sorted(seen.values()) == [3] * 20


async def test_an_abort_reaches_the_worker_within_a_second(
    fleet: tuple[list[StubWorker], str],
) -> None:
    workers, url = fleet
    for worker in workers:
        worker.delay_s = 10.0
    client = ChatClient(HttpTransport(HttpSettings(base_url=url)), "stub")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await client.complete(short("late"))
    start_s = time.monotonic()
    await client.close()
    assert time.monotonic() - start_s < 1.0
    aborted = [rid for worker in workers for rid in worker.aborted]
    for worker in workers:
        worker.delay_s = 0.0
    assert any(re.search(r"late\.1/1$", rid) for rid in aborted)


async def test_the_last_trajectories_of_a_batch_are_let_go_from_a_crowded_home(
    fleet: tuple[list[StubWorker], str],
) -> None:
    """Four open turns with one home: the load bound sends one of them elsewhere."""
    workers, url = fleet
    client = ChatClient(HttpTransport(HttpSettings(base_url=url)), "stub")
    homes: dict[str, list[str]] = {}
    n = 0
    while max((len(labels) for labels in homes.values()), default=0) < 4:
        answer = await client.complete(short(f"tail-{n}"))
        homes.setdefault(answer.worker or "", []).append(f"tail-{n}")
        n += 1
    (tail,) = [labels for labels in homes.values() if len(labels) == 4]
    for worker in workers:
        worker.delay_s, worker.peak_in_flight = 1.0, 0
    async with asyncio.TaskGroup() as group:
        for label in tail:
            group.create_task(client.complete(short(label)))
            await asyncio.sleep(0.05)
    for worker in workers:
        worker.delay_s = 0.0
    await client.close()
    assert sorted(worker.peak_in_flight for worker in workers) == [1, 3]


def short(label: str) -> TurnRequest:
    return TurnRequest(label=label, turn=1, messages=[{"role": "user", "content": "x"}])
