"""One child process with a time limit, a bound on output, and no survivors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

_CHUNK_BYTES = 65536
_POLL_S = 0.02
_LAST_WORDS_S = 0.5


class Finished(msgspec.Struct, frozen=True):
    """How a command ended; ``status`` is None when its time limit ended it."""

    status: int | None
    output: bytes
    left_out_bytes: int
    timeout_s: float

    def text(self) -> str:
        """The output and, after it, what is unusual about the end."""
        text = self.output.decode(errors="replace")
        if self.status is None:
            return f"{text}\n[killed after {self.timeout_s:g} s]"
        if self.status < 0:
            return f"{text}\n[killed by signal {-self.status}]"
        if self.status != 0:
            return f"{text}\n[exit status {self.status}]"
        return text


class BoundedOutput:
    """Keeps the first and the last half of what is written to it."""

    def __init__(self, limit_bytes: int) -> None:
        self._half = max(limit_bytes // 2, 1)
        self._head = b""
        self._tail = b""
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-self._half :]

    @property
    def left_out_bytes(self) -> int:
        return self._total - len(self._head) - len(self._tail)

    def content(self) -> bytes:
        if not self.left_out_bytes:
            return self._head + self._tail
        gap = f"\n[{self.left_out_bytes} bytes left out]\n".encode()
        return self._head + gap + self._tail


async def run_limited(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float,
    output_bytes: int,
) -> Finished:
    """Run ``command`` in a process group of its own; stderr joins stdout.

    The whole group is killed when the time is up, when the caller is cancelled, and
    when the command is done but left something running in the background.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    output = BoundedOutput(output_bytes)
    reading = asyncio.create_task(_read(process, output))
    status: int | None = None
    try:
        async with asyncio.timeout(timeout_s):
            status = await _exit_status(process, reading)
    except TimeoutError:
        pass
    finally:
        _kill_group(process)
        await asyncio.shield(_reap(process, reading))
    return Finished(status, output.content(), output.left_out_bytes, timeout_s)


async def _exit_status(
    process: asyncio.subprocess.Process, reading: asyncio.Task[None]
) -> int:
    """Wait for the command itself, not for heirs of its output pipe.

    Process.wait would wait for those as well, so the status is polled; in the usual
    case the pipe closes with the command and there is nothing to poll for.
    """
    while process.returncode is None:
        if reading.done():
            return await process.wait()
        await asyncio.wait({reading}, timeout=_POLL_S)
    return process.returncode


async def _reap(
    process: asyncio.subprocess.Process, reading: asyncio.Task[None]
) -> None:
    """Collect a killed command; the pipe is dropped if someone still holds it."""
    await asyncio.wait({reading}, timeout=_LAST_WORDS_S)
    if not reading.done():
        # Nothing public closes the pipe of a process whose heir detached itself.
        process._transport.close()  # type: ignore[attr-defined]
        reading.cancel()
    await asyncio.gather(reading, process.wait(), return_exceptions=True)


async def _read(process: asyncio.subprocess.Process, output: BoundedOutput) -> None:
    assert process.stdout is not None
    while data := await process.stdout.read(_CHUNK_BYTES):
        output.add(data)


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
