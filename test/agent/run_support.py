"""Helpers of the tests that run whole batches: a stub environment and server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_agent.environments import registry
from sglang_agent.environments.base import Environment
from sglang_agent.records import Operation, OperationResult, ToolDefinition
from sglang_agent.testing.stub_worker import StubWorker

TOOL: ToolDefinition = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object"}},
}
Behaviour = Callable[[str, Sequence[Operation]], Any]


class StubEnvironment:
    """Sleeps, counts how many run at once, and does what ``behave`` says."""

    def __init__(self, kind: StubKind, sample_id: str, server: str) -> None:
        self.kind = kind
        self.sample_id = sample_id
        self.server = server
        self.is_open = False

    async def open(self) -> Sequence[ToolDefinition]:
        self.is_open = True
        self.kind.opened.append(self.sample_id)
        return [TOOL]

    def server_of(self, operations: Sequence[Operation]) -> str | None:
        return self.server

    async def run(self, operations: Sequence[Operation]) -> Sequence[OperationResult]:
        kind = self.kind
        kind.running += 1
        kind.peak = max(kind.peak, kind.running)
        kind.jobs += 1
        kind.calls.append((self.sample_id, kind.now()))
        try:
            if kind.behave is not None:
                found = kind.behave(self.sample_id, operations)
                if asyncio.iscoroutine(found):
                    found = await found
                if found is not None:
                    return found
            await asyncio.sleep(kind.service_s)
        finally:
            kind.running -= 1
        return [OperationResult(o.id, f"seen by {self.server}") for o in operations]

    async def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.kind.closed.append(self.sample_id)


class StubKind:
    """A registered environment type and what all its instances did."""

    def __init__(self, service_s: float = 0.0, behave: Behaviour | None = None) -> None:
        self.service_s = service_s
        self.behave = behave
        self.now: Callable[[], float] = time.monotonic
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.calls: list[tuple[str, float]] = []
        self.running = self.peak = self.jobs = 0

    def create(self, config: Mapping[str, Any], sample_id: str) -> Environment:
        return StubEnvironment(self, sample_id, str(config.get("server", "stub")))


@contextmanager
def registered(kind: StubKind, name: str = "stub") -> Iterator[StubKind]:
    registry.register(name, kind)
    try:
        yield kind
    finally:
        registry.unregister(name)


@contextmanager
def serving(worker: StubWorker) -> Iterator[str]:
    """Serve in a thread with a loop of its own; yields the base URL."""
    ready: list[str] = []
    started = threading.Event()
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        async with worker.serving() as url:
            ready.append(url)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(10)
    try:
        yield ready[0]
    finally:
        stop[0]()
        thread.join()


def write_tasks(path: Path, count: int, **more: Any) -> Path:
    lines = [
        json.dumps(
            {
                "id": f"s-{index:03d}",
                "messages": [{"role": "user", "content": f"task {index}"}],
                "environment": {"type": "stub"},
                **more,
            }
        )
        for index in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def arguments(tasks: Path, url: str, output: Path, *more: str) -> list[str]:
    return [
        "run",
        str(tasks),
        "--base-url",
        url,
        "--output",
        str(output),
        "--sample-concurrency",
        "4",
        "--env-concurrency",
        "2",
        "--plain",
        *more,
    ]


# For tests that kill the client: the stub environment registered, then the program.
CHILD = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from sglang_agent.environments import registry
from {package} import StubKind
registry.register("stub", StubKind(service_s={service_s}))
from sglang_agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def start_client(args: Sequence[str], service_s: float = 0.0) -> subprocess.Popen[str]:
    here = Path(__file__)
    code = CHILD.format(package=here.stem, service_s=service_s)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(here.parent), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
