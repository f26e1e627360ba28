"""What a virtual worker and its driver say to each other.

Both directions are JSON lines: one command, then exactly one reply. Every time is
an integer count of nanoseconds on the virtual clock, so that nothing is lost on the
way and equal runs give equal bytes. A reply of type ``failed`` ends the worker.

A driver keeps several workers in step like this. ``Progress.quiet_until_ns`` promises
that nothing finishes before that moment unless something new is submitted. A worker
may therefore run up to the smallest of the next outside event and the other workers'
promises: no request can still appear before that.
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 3


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of prompt or output tokens.

    Either ``ids`` (the token ids themselves) or ``length`` tokens that follow from
    ``seed`` alone: equal seeds give equal tokens, and a longer segment of the same
    seed starts with the shorter one.
    """

    seed: int = 0
    length: int = 0
    ids: list[int] | None = None


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One inference turn.

    ``output`` is what the null model generates; it is followed by the stop token,
    which counts as the last of the ``output.length + 1`` output tokens.
    ``max_new_tokens`` is the client's limit, which admission charges for: in part, or
    in full with ``ignore_eos``.
    """

    id: str
    arrival_ns: int
    prompt: list[Segment]
    output: Segment
    max_new_tokens: int
    ignore_eos: bool = False
    label: str | None = None


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that one pass takes; see :mod:`sglang.virtual.cost`.

    The last three coefficients are of ordering the waiting queue; 0 charges nothing
    for it. ``scale`` is the share of a whole worker that this one stands for.
    """

    pass_s: float
    prefill_token_s: float
    prefill_context_s: float
    decode_request_s: float
    decode_context_s: float
    waiting_token_s: float = 0.0
    lookup_token_s: float = 0.0
    walked_token_s: float = 0.0
    scale: float = 1.0


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to build the worker.

    ``kv_bytes_per_token`` and ``state_bytes_per_slot`` describe the deployed model
    on one rank; only their quotient matters here, the pools that are really
    allocated are scaled down. ``cache_bytes`` is the budget M that is split by
    ``ratio`` (None: the engine's default, or what ``server_args`` says).
    ``prefix_match_queue_limit`` replaces the queue length past which lpm and hrrn stop
    matching prefixes (None: the engine's constant): a worker that is simulated at a
    fraction of its size has a fraction of the queue. ``server_args`` are further flags
    of ``sglang.launch_server``.
    """

    cost: CostModel
    kv_bytes_per_token: float
    state_bytes_per_slot: float
    cache_bytes: float
    context_length_tokens: int
    schedule_policy: str = "fcfs"
    ratio: float | None = None
    cache_strategy: str = "no_buffer"
    page_size: int = 1
    chunked_prefill_tokens: int = 8192
    max_states_per_path: int = 1
    max_running_requests: int | None = None
    prefix_match_queue_limit: int | None = None
    fast_forward: bool = True
    check_every_step: bool = False
    server_args: list[str] = []


class Start(msgspec.Struct, frozen=True, tag="start", tag_field="type"):
    """Build the scheduler; the first command. Answered by :class:`Ready`."""

    version: int
    config: WorkerConfig


class Advance(msgspec.Struct, frozen=True, tag="advance", tag_field="type"):
    """Take ``requests`` in, then run; answered by :class:`Progress`.

    Passes are started while the clock is before ``until_ns`` and nothing has
    finished yet. The last pass may end after ``until_ns``. ``forget`` names labels
    whose trajectories are over, so that their tokens need not be kept.
    """

    until_ns: int
    requests: list[Request] = []
    forget: list[str] = []


class Stats(msgspec.Struct, frozen=True, tag="stats", tag_field="type"):
    """Ask for :class:`Statistics`."""


class Stop(msgspec.Struct, frozen=True, tag="stop", tag_field="type"):
    """Check the idle invariants if nothing is in flight, reply, and exit."""


Command = Start | Advance | Stats | Stop


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="type"):
    """The pools as the engine sized them, and the shortest possible pass."""

    kv_tokens: int
    state_slots: int
    max_running_requests: int
    ratio: float
    step_floor_ns: int


class Finished(msgspec.Struct, frozen=True):
    """A request that is complete; ``error`` is set when the engine gave it up."""

    id: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    arrival_ns: int
    first_token_ns: int
    finished_ns: int
    retractions: int
    error: str | None = None


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="type"):
    """Where the worker is after an :class:`Advance`.

    ``quiet_until_ns`` is None when nothing is in flight.
    """

    now_ns: int
    quiet_until_ns: int | None
    waiting: int
    running: int
    finished: list[Finished]


class Statistics(msgspec.Struct, frozen=True, tag="statistics", tag_field="type"):
    """Counters since the start; seconds of CPU are this process's own.

    ``priority_tokens`` were looked up, ``priority_seconds`` are virtual; see
    :class:`sglang.virtual.priority.PriorityMeter`.
    """

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
    """The worker cannot go on: the error in one line, and the traceback."""

    error: str
    traceback: str


Reply = Ready | Progress | Statistics | Failed

encode = msgspec.json.Encoder().encode
decode_command = msgspec.json.Decoder(Command).decode
