"""Boots a real engine for tests and talks to it."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_LIMIT_S = 420.0


def free_port() -> int:
    """A free port of the loopback interface.

    Below the range that outgoing connections take theirs from: an engine binds its
    port only a minute after it was chosen.
    """
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def engine_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The test's own environment with one thread, small pools and ``extra``."""
    env = dict(os.environ, OMP_NUM_THREADS="1", SGLANG_CPU_MEMORY_BYTES=str(256 << 20))
    env.update(extra or {})
    return env


@dataclass(frozen=True)
class Answer:
    """Status and body of a response; the body is parsed where it is JSON."""

    status: int
    body: Any


class EngineServer:
    """One ``python -m sglang.launch_server`` process group on a free port."""

    def __init__(
        self,
        model: Path,
        log: Path,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        command = [sys.executable, "-m", "sglang.launch_server"]
        command += ["--model-path", str(model), "--port", str(self.port), *flags]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=engine_environment(env),
                cwd=log.parent,  # a folder named sglang in the way would win
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """Everything the server has written so far."""
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Return once the model is served; raise with the log's end if it dies."""
        limit = time.monotonic() + START_LIMIT_S
        while True:
            if self.process.poll() is not None or "[Errno 98]" in self.log:
                raise RuntimeError(f"engine ended early:\n{self.log[-4000:]}")
            with contextlib.suppress(OSError):
                if self.get("/model_info").status == 200:
                    return
            if time.monotonic() > limit:
                raise TimeoutError(f"engine not ready:\n{self.log[-4000:]}")
            time.sleep(0.5)

    def stop(self) -> None:
        """End the whole process group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)

    def get(self, path: str) -> Answer:
        """GET ``path``."""
        return _send(urllib.request.Request(self.url + path))

    def post(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """POST ``body`` as JSON to ``path``."""
        data = json.dumps(body).encode()
        all_headers = {"content-type": "application/json", **(headers or {})}
        return _send(urllib.request.Request(self.url + path, data, all_headers))

    def generate(self, input_ids: Sequence[int], tokens: int, **extra: Any) -> Any:
        """Greedy ``/generate``; the parsed answer with log-probabilities."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {
            "input_ids": list(input_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            **extra,
        }
        answer = self.post("/generate", body)
        assert answer.status == 200, answer.body
        return answer.body

    def generate_together(self, prompts: Sequence[Sequence[int]], tokens: int) -> Any:
        """The same for several prompts at once, in their order."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.generate(ids, tokens), prompts))

    def flush(self) -> None:
        """Empty the prefix cache; waits for requests that are still finishing."""
        for _ in range(50):
            if self.post("/flush_cache").status == 200:
                return
            time.sleep(0.1)
        raise TimeoutError("the cache could not be flushed")


def _send(request: urllib.request.Request) -> Answer:
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            status, raw = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, raw = error.code, error.read()
    try:
        return Answer(status, json.loads(raw))
    except ValueError:
        return Answer(status, raw.decode(errors="replace"))


@contextlib.contextmanager
def running_engine(
    model: Path,
    log: Path,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[EngineServer]:
    """A ready engine, stopped at the end however the block ends."""
    server = EngineServer(model, log, flags, env)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def output_ids(answer: Any) -> list[int]:
    """Token ids of a ``/generate`` answer with log-probabilities."""
    return [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]


def log_probabilities(answer: Any) -> list[float]:
    """Log-probability of each generated token."""
    return [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]


def cached_tokens(answer: Any) -> int:
    """Prompt tokens that came from the prefix cache."""
    count: int = answer["meta_info"]["cached_tokens"]
    return count
