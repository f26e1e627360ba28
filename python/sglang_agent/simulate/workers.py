"""Virtual worker processes: forked from one that has imported SGLang once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from sglang_agent.simulate import wire
from sglang_agent.simulate.errors import SimulationError

_TAIL_BYTES = 4000


class WorkerPool:
    """Starts virtual workers; use it as a context manager.

    ``python`` is an interpreter that has the patched SGLang installed. The first
    worker waits for the import, the others only fork. ``environment`` is added to the
    workers' environment variables. ``program`` is what the interpreter runs: another
    one than the worker itself can measure it.
    """

    def __init__(
        self,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "sglang.virtual_worker"),
    ) -> None:
        self._command = [python, *program, "--fork"]
        self._environment = dict(environment or {})

    def __enter__(self) -> WorkerPool:
        with ExitStack() as cleanup:
            self._log = cleanup.enter_context(tempfile.TemporaryFile())
            ours, theirs = socket.socketpair()
            cleanup.callback(ours.close)
            with theirs:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._log.fileno(),
                    env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
                )
            self._control = ours
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._control.close()
        self._process.wait()
        self._cleanup.close()

    def start(self, config: dict[str, Any]) -> WorkerChannel:
        """Fork a worker and build its scheduler.

        ``config`` is a :class:`sglang.virtual.protocol.WorkerConfig`. Raises
        :class:`SimulationError` with the worker's own error.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise SimulationError(self._last_words()) from None
        return WorkerChannel(ours, config, self)

    def _last_words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL_BYTES))
        tail = self._log.read().decode(errors="replace").strip()
        return f"the virtual worker process ended without a reply: {tail}"


class WorkerChannel:
    """One worker's commands and replies; ``ready`` says what was built."""

    def __init__(
        self, stream: socket.socket, config: dict[str, Any], pool: WorkerPool
    ) -> None:
        self._pool = pool
        self._stream = stream
        self._lines = stream.makefile("rb")
        try:
            ready = self._ask(
                wire.command("start", version=wire.VERSION, config=config)
            )
        except SimulationError:
            self.close()
            raise
        assert isinstance(ready, wire.Ready)
        self.ready = ready

    def advance(
        self, until_ns: int, requests: Sequence[wire.Request], forget: Sequence[str]
    ) -> wire.Progress:
        """Run as far as nothing new can happen; see the protocol."""
        reply = self._ask(
            wire.command("advance", until_ns=until_ns, requests=requests, forget=forget)
        )
        assert isinstance(reply, wire.Progress)
        return reply

    def stop(self) -> wire.Statistics:
        """Check the worker's invariants, end it and return its counters."""
        reply = self._ask(wire.command("stop"))
        assert isinstance(reply, wire.Statistics)
        self.close()
        return reply

    def close(self) -> None:
        """Let go; the worker ends at the end of its input."""
        self._lines.close()
        self._stream.close()

    def _ask(self, line: bytes) -> wire.Reply:
        try:
            self._stream.sendall(line)
            answer = self._lines.readline()
        except OSError:
            answer = b""
        if not answer:
            raise SimulationError(self._pool._last_words())
        reply = wire.decode(answer)
        if isinstance(reply, wire.Failed):
            raise SimulationError(f"virtual worker: {reply.error}\n{reply.traceback}")
        return reply
