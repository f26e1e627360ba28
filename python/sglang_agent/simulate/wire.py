"""The agent's side of the virtual worker's protocol.

The worker's side, with the meaning of each field, is :mod:`sglang.virtual.protocol`,
which this package must not import: it is part of the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec

VERSION = 3
FOREVER_NS = 1 << 62


class Segment(msgspec.Struct, frozen=True):
    """``length`` tokens that follow from ``seed``, or ``ids`` as they are."""

    seed: int
    length: int
    ids: list[int] | None = None


STOP = Segment(0, 1, [0])
"""The stop token that ends every answer of the null model."""


class Request(msgspec.Struct, frozen=True):
    """One turn, with the output the worker is to generate (before the stop token)."""

    id: str
    label: str
    arrival_ns: int
    prompt: list[Segment]
    output: Segment
    max_new_tokens: int
    ignore_eos: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="type"):
    kv_tokens: int
    state_slots: int
    max_running_requests: int
    ratio: float
    step_floor_ns: int


class Finished(msgspec.Struct, frozen=True):
    id: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    first_token_ns: int
    finished_ns: int
    retractions: int
    error: str | None = None


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="type"):
    now_ns: int
    quiet_until_ns: int | None
    waiting: int
    running: int
    finished: list[Finished]


class Statistics(msgspec.Struct, frozen=True, tag="statistics", tag_field="type"):
    """Counters of one worker; kept with the report as they come."""

    prefill_passes: int
    decode_passes: int
    fast_forwarded_passes: int
    prefill_tokens: int
    prefill_context_products: float
    decode_request_steps: int
    decode_context_steps: int
    prefill_seconds: float
    decode_seconds: float
    finished: int
    retractions: int
    priority_calls: int
    priority_waiting_tokens: int
    priority_tokens: int
    priority_walked_tokens: int
    priority_seconds: float
    priority_cpu_s: float
    waiting_peak: int
    cpu_s: float
    peak_memory_bytes: int
    engine: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="type"):
    error: str
    traceback: str


Reply = Ready | Progress | Statistics | Failed

_decode = msgspec.json.Decoder(Reply).decode
_encode = msgspec.json.Encoder().encode


def decode(line: bytes) -> Reply:
    """Read one reply."""
    return _decode(line)


def command(kind: str, **fields: object) -> bytes:
    """One command line."""
    return _encode({"type": kind, **fields}) + b"\n"
