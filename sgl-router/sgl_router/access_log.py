"""One line per finished request, without prompts, written off the event loop."""

from __future__ import annotations

import json
import queue
import threading
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from sgl_router.exchange import Exchange

MAX_PENDING_LINES = 20_000
"""Lines kept while the log's reader is slow; further ones are dropped and counted."""


class AccessLog:
    """Collects lines and hands them to a writer thread at every flush."""

    def __init__(self, stream: TextIO) -> None:
        self.dropped = 0
        self._stream = stream
        self._lines: list[str] = []
        self._batches: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        self._pending = 0
        self._writer = threading.Thread(
            target=self._write, name="access-log", daemon=True
        )
        self._writer.start()

    def add(self, exchange: Exchange, time_s: float, seconds: float) -> None:
        """Note a finished exchange; ``time_s`` is the time of day, in Unix seconds."""
        if self._pending + len(self._lines) >= MAX_PENDING_LINES:
            self.dropped += 1
            return
        label = exchange.label
        self._lines.append(
            f'{{"time_ms":{int(time_s * 1000)},"event":"request",'
            f'"id":{_quoted(exchange.request_id[:128].decode("latin-1"))},'
            f'"method":"{exchange.head.method.decode()}","route":"{exchange.route.name}",'
            f'"status":{exchange.status},"worker":"{exchange.worker_url}",'
            f'"label":{_quoted(label) if label is not None else "null"},'
            f'"attempts":{exchange.attempts},"duration_us":{int(seconds * 1e6)},'
            f'"received_bytes":{exchange.received_bytes},'
            f'"sent_bytes":{exchange.sent_bytes},"error":"{exchange.error_code}"}}\n'
        )

    def flush(self) -> None:
        """Hand the collected lines to the writer."""
        if self._lines:
            lines, self._lines = self._lines, []
            self._pending += len(lines)
            self._batches.put(lines)

    def close(self) -> None:
        """Write what is left and stop the writer."""
        self.flush()
        self._batches.put(None)
        self._writer.join(timeout=5.0)

    def _write(self) -> None:
        while (lines := self._batches.get()) is not None:
            try:
                self._stream.write("".join(lines))
                self._stream.flush()
            except (OSError, ValueError):  # the reader of the log has gone away
                self.dropped += len(lines)
            self._pending -= len(lines)


def _quoted(text: str) -> str:
    """A JSON string; the common case needs no escapes."""
    if '"' in text or "\\" in text or not text.isprintable():
        return json.dumps(text)
    return f'"{text}"'
