"""The images' install script, run for real, and what is installed put to work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from patches.tools.pin import read_pin

from .deploy_files import (
    DOCKER,
    ROOT,
    exported_names,
    load_script,
    metric_names,
    queries,
)

KEY = "the-secret-key-of-this-test"
START_LIMIT_S = 420.0
TASKS = 6


@pytest.fixture(scope="module")
def third_party() -> Path:
    """The cached folder of third-party packages: 11 GB that no test downloads."""
    setup_env = load_script("setup_env")
    base: Path = setup_env.cache_root() / "env" / setup_env.base_key()
    if not (base / "complete").exists():
        pytest.skip("no package base for this checkout: run 'make setup' first")
    return next((base / "lib").glob("python*/site-packages"))


def empty_environment(folder: Path, third_party: Path) -> Path:
    """A virtual environment with none of our packages; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    line = f"import site; site.addsitedir({str(third_party)!r})\n"
    (site / "third_party.pth").write_text(line)
    return folder / "bin/python"


def install(python: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script as the images do."""
    command = [DOCKER / "install.sh", *options, python]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PIP_NO_COMPILE"] = "1"  # saves 15 s; Python compiles what it imports
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def versions(python: Path) -> dict[str, str]:
    program = (
        "import json; from importlib.metadata import version; "
        "names = 'sglang', 'sgl-router', 'sglang-agent', 'torch', 'aiohttp'; "
        "print(json.dumps({name: version(name) for name in names}))"
    )
    out = subprocess.check_output([python, "-I", "-c", program], text=True)
    found: dict[str, str] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def installed(third_party: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of the CPU image; returns its interpreter."""
    folder = tmp_path_factory.mktemp("cpu_image") / "venv"
    python = empty_environment(folder, third_party)
    done = install(python, "--demo")
    assert done.returncode == 0, done.stdout + done.stderr
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_empty_environment_gets_everything(installed: Path) -> None:
    found = versions(installed)
    assert found["sglang"] == read_pin().version
    pinned = (ROOT / "requirements/constraints.txt").read_text("utf-8").splitlines()
    assert f"torch=={found['torch']}" in pinned
    assert f"aiohttp=={found['aiohttp']}" in pinned
    for console in ("sglang", "sglang-agent"):
        assert (installed.parent / console).exists()


def pretend_installed(python: Path, version: str) -> Path:
    """Lay down a package ``sglang`` of one file, as pip would; returns the file."""
    site = next((python.parent.parent / "lib").glob("python*/site-packages"))
    info = site / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    )
    (info / "INSTALLER").write_text("pip\n")
    module = site / "sglang/only_in_stock.py"
    module.parent.mkdir()
    module.write_text("")
    owned = [
        f"{info.name}/METADATA",
        f"{info.name}/INSTALLER",
        "sglang/only_in_stock.py",
    ]
    rows = [f"{path},," for path in [*owned, f"{info.name}/RECORD"]]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stock_sglang_is_replaced_and_its_dependencies_stay(
    third_party: Path, tmp_path: Path
) -> None:
    """What happens in the official image, which has SGLang already."""
    python = empty_environment(tmp_path / "venv", third_party)
    stock = pretend_installed(python, read_pin().upstream_version)
    done = install(python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its dependencies stay as they are" in done.stdout
    assert versions(python)["sglang"] == read_pin().version
    assert not stock.exists()


@pytest.mark.slow
def test_another_sglang_is_refused(third_party: Path, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "venv", third_party)
    pretend_installed(python, "0.5.20")
    done = install(python)
    assert done.returncode == 2
    assert "sglang 0.5.20 is installed; the patches are for 0.5.23" in done.stderr


def test_a_wrong_command_is_refused() -> None:
    done = install(Path("/no/such/python"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    done = install(Path(sys.executable), "--all")
    assert done.returncode == 2
    assert "option --all: unknown; allowed: --demo" in done.stderr


@dataclass
class Service:
    """One role of the entrypoint, running on loopback."""

    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=15)


@dataclass
class Stack:
    """A worker and a gateway started by the entrypoint of the installed environment."""

    folder: Path
    environment: dict[str, str]
    worker: str
    gateway: str
    gateway_metrics: str
    services: dict[str, Service]

    def start(self, role: str, *flags: str, **settings: str) -> Service:
        log = self.folder / f"{role}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [DOCKER / "entrypoint.sh", role, *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment | settings,
                cwd=self.folder,
                start_new_session=True,
            )
        self.services[role] = Service(process, log)
        return self.services[role]

    def wait_for(self, url: str, role: str) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while get(url)[0] != 200:
            service = self.services[role]
            log = service.log.read_text(errors="replace")[-3000:]
            assert service.process.poll() is None, log
            assert time.monotonic() < limit, log
            time.sleep(0.5)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")
    except OSError:
        return 0, ""


def chat(stack: Stack, key: str | None) -> int:
    """The status of one short chat request through the gateway."""
    message = {"role": "user", "content": "Hello."}
    body = {
        "model": stack.environment["MODEL"],
        "messages": [message],
        "max_tokens": 2,
    }
    headers = {"content-type": "application/json", "x-smg-routing-key": "sample-1"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    url = f"{stack.gateway}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def free_ports(count: int) -> list[int]:
    import socket

    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


PROFILE = {
    "version": 1,
    "name": "deploy-test",
    "trajectories": 4,
    "turns": {"mean": 4, "p50": 4, "p90": 6, "p99": 6, "max": 6},
    "final_context_tokens": {
        "mean": 1200.0, "p50": 1200, "p90": 1600, "p99": 1800, "max": 1800,
    },
    "output_tokens_per_turn": {"mean": 60, "p50": 60, "p90": 90, "p99": 99, "max": 99},
    "environment_seconds": {"mean": 1, "p50": 1, "p90": 2, "p99": 3, "max": 3},
    "forked_share": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def stack(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker and the gateway, as the compose file starts them."""
    folder = tmp_path_factory.mktemp("stack")
    worker, gateway, metrics = free_ports(3)
    environment = os.environ | {
        "PATH": f"{installed.parent}:{os.environ['PATH']}",
        "MODEL": str(folder / "tiny-ling"),
        "API_KEY": KEY,
        "TOOL_CALL_PARSER": "ling3",
        "WORKERS": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_MEMORY_BYTES": str(256 << 20),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    environment.pop("PYTHONPATH", None)
    (folder / "profile.json").write_text(json.dumps(PROFILE))
    stack = Stack(
        folder,
        environment,
        f"http://127.0.0.1:{worker}",
        f"http://127.0.0.1:{gateway}",
        f"http://127.0.0.1:{metrics}/metrics",
        {},
    )
    local = ["--host", "127.0.0.1", "--port"]
    try:
        stack.start(
            "worker",
            *(*local, str(worker)),
            WORKLOAD_PROFILE=str(folder / "profile.json"),
        )
        stack.wait_for(f"{stack.worker}/health", "worker")
        stack.start(
            "gateway",
            *(*local, str(gateway), "--prometheus-port", str(metrics)),
            *("--worker-urls", stack.worker),
        )
        stack.wait_for(f"{stack.gateway}/readiness", "gateway")
        yield stack
    finally:
        for service in stack.services.values():
            service.stop()


def run_batch(stack: Stack, flags: Sequence[str]) -> tuple[int, str]:
    """A batch of demo tasks; returns its exit status and its last /metrics page."""
    (port,) = free_ports(1)
    batch = stack.start(
        "batch",
        *("--base-url", stack.gateway, "--output", str(stack.folder / "run")),
        *("--metrics-host", "127.0.0.1", "--metrics-port", str(port), *flags),
        RUN="unused",
        TASKS=str(stack.folder / "tasks/tasks.jsonl"),
        TOOL_CHOICE="required",
    )
    page = ""
    limit = time.monotonic() + START_LIMIT_S
    while batch.process.poll() is None and time.monotonic() < limit:
        page = get(f"http://127.0.0.1:{port}/metrics")[1] or page
        time.sleep(0.05)
    return batch.process.wait(timeout=1), page


@pytest.fixture(scope="module")
def pages(stack: Stack) -> dict[str, str]:
    """The /metrics pages of all parts, after and (the batch's) during a batch."""
    python = Path(stack.environment["PATH"].split(":")[0]) / "python"
    make = [python, "-m", "sglang_agent.demo_tasks", "--count", str(TASKS)]
    subprocess.run(
        [*make, "--seed", "0", "--output", stack.folder / "tasks"],
        cwd=stack.folder,
        env=stack.environment,
        check=True,
    )
    status, batch = run_batch(stack, ["--max-output-tokens", "160"])
    assert status == 0, stack.services["batch"].log.read_text(errors="replace")
    return {
        "batch": batch,
        "gateway": get(stack.gateway_metrics)[1],
        "worker": get(f"{stack.worker}/metrics")[1],
    }


@pytest.mark.server
@pytest.mark.timeout(1200)
def test_a_batch_runs_through_what_was_installed(
    stack: Stack, pages: dict[str, str]
) -> None:
    report = json.loads((stack.folder / "run/report.json").read_text("utf-8"))
    assert report["makespan_s"] > 0
    journal = (stack.folder / "run/journal.jsonl").read_text("utf-8")
    assert sum('"completed"' in line for line in journal.splitlines()) == TASKS
    assert pages["batch"]


@pytest.mark.server
@pytest.mark.timeout(1200)
def test_every_dashboard_query_reads_metrics_that_are_exported(
    pages: dict[str, str],
) -> None:
    exported = set().union(*(exported_names(page) for page in pages.values()))
    for title, query in queries():
        missing = metric_names(query) - exported
        assert not missing, f"{title}: {query}"


@pytest.mark.server
@pytest.mark.timeout(1200)
def test_health_checks_take_no_generation(stack: Stack) -> None:
    """With generation upstream's /health sleeps a second before it looks."""
    took = []
    for _ in range(5):
        started = time.monotonic()
        assert get(f"{stack.worker}/health")[0] == 200
        took.append(time.monotonic() - started)
    assert min(took) < 0.9
    check = [sys.executable, DOCKER / "healthcheck.py"]
    port = stack.worker.rsplit(":", 1)[1]
    assert subprocess.run([*check, "/health", port]).returncode == 0
    assert subprocess.run([*check, "/no-such-page", port]).returncode == 1


@pytest.mark.server
@pytest.mark.timeout(1200)
def test_the_key_passes_through_and_stays_secret(
    stack: Stack, pages: dict[str, str]
) -> None:
    assert chat(stack, None) == 401
    assert chat(stack, KEY) == 200
    for role in ("gateway", "batch"):  # SGLang's worker logs its own arguments
        log = stack.services[role].log
        assert KEY not in log.read_text(errors="replace"), role
    for page in pages.values():
        assert KEY not in page
