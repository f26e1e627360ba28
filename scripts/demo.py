"""The main job: a batch of agent tasks through patched engine, gateway and client.

Starts two workers and the gateway on loopback, runs the batch with the agent client,
shows its report and stops what it started. Run again after an interruption, it goes
on with what was not done; after a finished run it starts a new one. Everything is
kept in ``runs/demo-N``. Exit codes are the client's, and 2 when something could not
be started.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 900.0
PR_SET_PDEATHSIG = 1
OUR_MODELS = ("tiny-ling", "smollm2")


class DemoError(Exception):
    """The demo cannot go on; the message is for the user."""


@dataclass(frozen=True)
class Recipe:
    """How one kind of model is served and asked."""

    path: str
    worker_flags: Sequence[str] = ()
    tool_choice: str = "auto"


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def free_port() -> int:
    """A port below the range that outgoing connections take theirs from.

    An engine binds its port a minute from now; it must still be free then.
    """
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def make(module: str, *arguments: str) -> None:
    """Run one of our generators; its own message explains a failure."""
    command = [sys.executable, "-m", module, *arguments]
    if subprocess.run(command, check=False).returncode:
        raise DemoError(f"failed: {shlex.join(command)}")


def choose_model(model: str, models: Path) -> Recipe:
    """Make one of our small models where it is named, else take the name as it is."""
    if model not in OUR_MODELS:
        return Recipe(model)
    folder = models / model
    if not (folder / "config.json").exists():
        make("sglang.demo_model", model, "--output", str(folder))
    # Neither model knows this chat format's tool calls: constrained decoding makes
    # every answer a valid one.
    flags = ("--tool-call-parser", "ling3", "--served-model-name", model)
    return Recipe(str(folder), flags, tool_choice="required")


class Services:
    """The processes the demo started; all of them end with it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        """Start ``python -m command`` with its output in ``name.log``."""
        with (self._logs / f"{name}.log").open("ab") as out:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def wait_for(self, url: str) -> None:
        """Poll until ``url`` answers, as long as every process is alive."""
        limit = time.monotonic() + START_LIMIT_S
        while True:
            self.check()
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except OSError:
                if time.monotonic() > limit:
                    raise DemoError(
                        f"{url}: no answer in {START_LIMIT_S:g} s"
                    ) from None
                time.sleep(0.5)

    def check(self) -> None:
        """Raise with the end of its log when a process has died."""
        for name, process in self._running.items():
            if process.poll() is not None:
                log = self._logs / f"{name}.log"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                status = process.returncode
                raise DemoError(f"{name} ended with {status}; end of {log}:\n{tail}")

    def stop(self) -> None:
        """End every process group, politely first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._running.values():
                if process.poll() is None:
                    os.killpg(process.pid, number)
            limit = time.monotonic() + 15
            for process in self._running.values():
                try:
                    process.wait(timeout=max(0.1, limit - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def serving(
    recipe: Recipe, logs: Path, workers: int, extra: Sequence[str] = ()
) -> Iterator[str]:
    """Workers and gateway; yields the gateway's URL once all of them answer."""
    services = Services(logs)
    started = time.monotonic()
    try:
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(workers)]
        for index, url in enumerate(urls):
            port = url.rsplit(":", 1)[1]
            command = worker_command(recipe, port, index, extra)
            services.start(f"worker-{index}", *command)
        for url in urls:
            services.wait_for(f"{url}/model_info")
        gateway = f"http://127.0.0.1:{free_port()}"
        services.start("gateway", *gateway_command(urls, gateway.rsplit(":", 1)[1]))
        services.wait_for(f"{gateway}/readiness")
        took = time.monotonic() - started
        say(f"{workers} workers and the gateway are up after {took:.0f} s: {gateway}")
        yield gateway
    finally:
        services.stop()


def worker_command(
    recipe: Recipe, port: str, index: int, extra: Sequence[str]
) -> list[str]:
    command = [
        "sglang.launch_server", "--model-path", recipe.path,
        "--host", "127.0.0.1", "--port", port,
        "--schedule-policy", "routing-prefix", "--mamba-max-states-per-path", "1",
        "--enable-metrics", "--enable-cache-report",
    ]  # fmt: skip
    if gpus() > 1:
        command += ["--base-gpu-id", str(index)]
    return [*command, *recipe.worker_flags, *extra]


def gateway_command(urls: Sequence[str], port: str) -> list[str]:
    return [
        "sgl_router.launch_router", "--worker-urls", *urls, "--policy", "lbch",
        "--host", "127.0.0.1", "--port", port, "--prometheus-port", str(free_port()),
    ]  # fmt: skip


def gpus() -> int:
    """NVIDIA GPUs of this machine; 0 where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    out = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
    )
    return len(out.stdout.splitlines()) if out.returncode == 0 else 0


def run_folder(parent: Path) -> Path:
    """The newest unfinished run, else a new one."""
    runs = sorted(parent.glob("demo-*"), key=lambda p: int(p.name.rsplit("-", 1)[1]))
    if runs and not (runs[-1] / "report.json").exists():
        say(f"going on with {runs[-1]}")
        return runs[-1]
    number = int(runs[-1].name.rsplit("-", 1)[1]) + 1 if runs else 1
    folder = parent / f"demo-{number}"
    folder.mkdir(parents=True)
    return folder


def make_tasks(folder: Path, count: int) -> Path:
    """The batch's tasks file, written once for a run."""
    tasks = folder / "tasks" / "tasks.jsonl"
    if not tasks.exists():
        make(
            "sglang_agent.demo_tasks", "--count", str(count),
            "--seed", "0", "--output", str(tasks.parent),
        )  # fmt: skip
    return tasks


def client_command(
    tasks: Path,
    folder: Path,
    base_url: str,
    recipe: Recipe,
    options: argparse.Namespace,
) -> list[str]:
    return [
        sys.executable, "-m", "sglang_agent", "run", str(tasks),
        "--base-url", base_url,
        "--sample-concurrency", options.sample_concurrency,
        "--env-concurrency", str(options.env_concurrency),
        "--job-order", "caas", "--tool-choice", recipe.tool_choice,
        "--output", str(folder),
    ]  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the demo batch.")
    add = parser.add_argument
    add(
        "--model",
        default="tiny-ling",
        help="a folder, a hub id, smollm2 (a real 135M chat model) or tiny-ling "
        "(default: a random hybrid model, made here in seconds)",
    )
    add("--workers", type=int, default=min(2, gpus() or 2), help="engine workers")
    add("--worker-flags", default="", help="more flags for each worker, one string")
    add("--tasks", type=int, default=32, help="agent tasks (default 32)")
    add("--sample-concurrency", default="12", help="CS (default 12)")
    add("--env-concurrency", type=int, default=4, help="CE (default 4)")
    add("--runs", type=Path, default=ROOT / "runs", help="parent of the run folders")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        recipe = choose_model(options.model, ROOT / "build" / "models")
        folder = run_folder(options.runs)
        tasks = make_tasks(folder, options.tasks)
        flags = shlex.split(options.worker_flags)
        with serving(recipe, folder, options.workers, flags) as url:
            command = client_command(tasks, folder, url, recipe, options)
            status = subprocess.run(command, check=False).returncode
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if status < 0:
        say("the client was killed; run the same command again to finish the batch")
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
