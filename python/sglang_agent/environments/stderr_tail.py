"""Keeps the last output of a child process: its cause of death, if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import TextIO

_KEPT_BYTES = 8192
_LINES = 8


class StderrTail:
    """The last 8 KiB of what was written to a pipe, read as it arrives."""

    def __init__(self) -> None:
        self._tail = b""
        self._read_end: int | None = None

    @contextlib.contextmanager
    def writer(self) -> Iterator[TextIO]:
        """Open the pipe; the child gets the end that this yields.

        On leaving, both ends are closed and what was kept stays readable.
        """
        self._read_end, write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._read_end, self._drain)
        try:
            with os.fdopen(write_end, "w") as pipe:
                yield pipe
        finally:
            self._drain()
            self._close()

    def last_lines(self) -> list[str]:
        """The last lines that are not blank, oldest first; at most eight."""
        self._drain()
        text = self._tail.decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-_LINES:]

    def forget(self) -> None:
        """Drop what was written so far."""
        self._drain()
        self._tail = b""

    def _drain(self) -> None:
        while self._read_end is not None:
            try:
                chunk = os.read(self._read_end, 65536)
            except BlockingIOError:
                return
            if not chunk:  # every writer has closed its end
                self._close()
                return
            self._tail = (self._tail + chunk)[-_KEPT_BYTES:]

    def _close(self) -> None:
        if self._read_end is not None:
            asyncio.get_running_loop().remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = None
