"""Changing a running batch, its metrics, and leaving it by signals."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_agent.__main__ import main
from sglang_agent.environments.blocking import run_blocking
from sglang_agent.journal import read
from sglang_agent.testing.stub_worker import StubWorker
from sglang_agent.trace import read_trace

from .run_support import (
    StubKind,
    arguments,
    registered,
    serving,
    start_client,
    write_tasks,
)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_agent.report.files.write_plots", lambda *_: [])


@pytest.fixture
def url() -> Iterator[str]:
    with serving(StubWorker()) as url:
        yield url


def wait_until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def lines_until(client: subprocess.Popen[str], pattern: str) -> str:
    assert client.stdout is not None
    for line in client.stdout:
        found = re.search(pattern, line)
        if found:
            return found[0]
    raise AssertionError(f"the client ended without a line like {pattern}")


def test_limits_change_while_running_and_stand_in_the_report(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 12), tmp_path / "run"
    hold = threading.Event()

    async def behave(sample: str, operations: object) -> None:
        await run_blocking(hold.wait, 60)

    with registered(StubKind(behave=behave)) as kind:
        command = arguments(tasks, url, out, "--sample-concurrency", "12")
        codes: list[int] = []

        def operate() -> None:
            wait_until(lambda: kind.running == 2)
            codes.append(main(["control", str(out), "--env-concurrency", "6"]))
            wait_until(lambda: kind.running == 6, 1.0)
            codes.append(main(["control", str(out), "--pause", "jobs"]))
            codes.append(main(["control", str(out), "--env-concurrency", "0"]))
            codes.append(main(["control", str(out), "--resume", "all"]))
            hold.set()

        operator = threading.Thread(target=operate)
        operator.start()
        # Signals need the main thread, so the run has it.
        code = main(command)
        hold.set()
        operator.join()
    assert code == 0
    assert codes == [0, 0, 2, 0]
    assert "env_concurrency: 0; must be a whole number" in capsys.readouterr().err
    report = json.loads((out / "report.json").read_text())
    changes = [(c["setting"], c["after"]) for c in report["run"]["changes"]]
    assert changes == [
        ("env_concurrency", 6),
        ("jobs_paused", True),
        ("jobs_paused", False),
    ]
    assert report["run"]["peak_jobs"] == 6
    assert main(["control", str(out)]) == 2
    assert "nothing is running there" in capsys.readouterr().err


@pytest.mark.slow
def test_metrics_are_served_while_running(url: str, tmp_path: Path) -> None:
    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 40), tmp_path / "run"
    client = start_client(
        arguments(tasks, url, out, "--metrics-port", "0"), service_s=0.05
    )
    address = lines_until(client, r"http://127.0.0.1:\d+/metrics")
    lines_until(client, r"^done ")
    with urllib.request.urlopen(address, timeout=10) as response:
        text = response.read().decode()
    client.communicate(timeout=60)
    assert client.returncode == 0
    assert re.search(r"^sglang_agent_env_concurrency 2.0$", text, re.MULTILINE)
    assert re.search(r"^sglang_agent_turns_total \d", text, re.MULTILINE)
    assert 'sglang_agent_samples_finished_total{outcome="completed"}' in text
    assert "sglang_agent_event_loop_lag_seconds" in text
    assert "sglang_agent_env_job_queue_seconds_bucket" in text
    assert "s-000" not in text


@pytest.mark.slow
def test_an_interrupt_releases_everything_and_the_command_goes_on(
    url: str, tmp_path: Path
) -> None:
    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 30), tmp_path / "run"
    command = arguments(tasks, url, out)
    client = start_client(command, service_s=0.02)
    lines_until(client, r"^done ")
    client.send_signal(signal.SIGINT)
    text, _ = client.communicate(timeout=30)
    assert client.returncode == 130
    assert "stopping: closing environments" in text
    assert "the same command goes on" in text
    history = read(out / "journal.jsonl")
    assert history.attempts[0].ended == "interrupted"
    assert 0 < len(history.samples) < 30
    assert not (out / "report.json").exists()

    second = start_client(command)
    text, _ = second.communicate(timeout=60)
    assert second.returncode == 0, text
    assert len(read(out / "journal.jsonl").samples) == 30


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(url: str, tmp_path: Path) -> None:
    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 4), tmp_path / "run"
    client = start_client(
        arguments(tasks, url, out, "--stall-warning-s", "0.3"), service_s=3600.0
    )
    lines_until(client, r"warning: nothing moved")
    client.send_signal(signal.SIGINT)
    # The stub obeys cancellation, so this may end by itself; both ways are 130.
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=20)
    assert client.returncode == 130


def test_ten_environments_are_closed_on_interrupt(url: str, tmp_path: Path) -> None:
    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 10), tmp_path / "run"
    with registered(StubKind(service_s=3600.0)) as kind:

        def interrupt() -> None:
            wait_until(lambda: len(kind.opened) == 10 and kind.running == 2)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        command = arguments(tasks, url, out, "--sample-concurrency", "10")
        assert main(command) == 130
    assert len(kind.closed) == 10


@pytest.mark.slow
@pytest.mark.slow
def test_killed_at_random_moments_until_done_each_sample_is_kept_once(
    url: str, tmp_path: Path
) -> None:
    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 150), tmp_path / "run"
    command, journal = arguments(tasks, url, out), out / "journal.jsonl"
    moments, before = random.Random(0), b""
    for _ in range(8):
        client = start_client(command, service_s=0.03)
        lines_until(client, r"samples, CS=")
        time.sleep(moments.uniform(0.0, 0.3))  # a random moment is the point here
        client.kill()
        client.communicate()
        now = journal.read_bytes() if journal.exists() else b""
        # Whole lines stay byte for byte; only a torn last one may be cut off.
        assert now.startswith(before[: before.rfind(b"\n") + 1])
        before = now
    kept = set(read(journal).samples)
    last = start_client(command)
    text, _ = last.communicate(timeout=60)
    assert last.returncode == 0, text
    ran = re.findall(r"^done (\S+):", text, re.MULTILINE)
    assert len(ran) == len(set(ran)) == 150 - len(kept)
    names = [record.sample_id for record in read_trace(out)]
    assert sorted(names) == [f"s-{index:03d}" for index in range(150)]


def test_one_run_a_folder(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 4), tmp_path / "run"
    client = start_client(arguments(tasks, url, out), service_s=3600.0)
    lines_until(client, r"samples, CS=")
    with registered(StubKind()):
        assert main(arguments(tasks, url, out)) == 2
    assert "another program is running there" in capsys.readouterr().err
    client.kill()
    client.communicate()
