"""What a running server does with its hybrid cache, beside what was planned."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.hybrid_capacity import CapacityError
from sglang.srt.mem_cache.hybrid_plan import Plan

_TIMEOUT_S = 10.0

# Planned and real pools may differ by what the process uses besides weights.
_TOLERANCE = 0.02


class CheckError(Exception):
    """The server cannot be asked; the message names the URL and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """One DP rank of a server, as it reports itself; None for what it does not say.

    held_share: share of the state slots that are in use just now (0 to 1).
    """

    ratio: float | None
    ratio_origin: str | None
    kv_tokens: int
    state_slots: int
    max_running_requests: int
    state_slots_per_request: int | None = None
    kv_bytes_per_token: float | None = None
    state_bytes_per_slot: int | None = None
    draft_state_bytes_per_request: int = 0
    mean_final_context: float | None = None
    reference_concurrency: int | None = None
    running_requests: float | None = None
    held_share: float | None = None

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of both pools, the padding slot included."""
        if self.kv_bytes_per_token is None or self.state_bytes_per_slot is None:
            return None
        state_bytes = (self.state_slots + 1) * self.state_bytes_per_slot
        return round(self.kv_tokens * self.kv_bytes_per_token) + state_bytes


def read_server(url: str) -> ServerState:
    """Ask ``url`` for its pools, and for their use if it exports metrics.

    Raises:
        CheckError: no server there, or one without a state pool.
    """
    base = url.rstrip("/")
    try:
        info = json.loads(_get(f"{base}/server_info"))
    except ValueError as error:
        raise CheckError(f"{base}/server_info: not JSON") from error
    try:
        metrics = parse_metrics(_get(f"{base}/metrics"))
    except CheckError:
        metrics = {}
    return server_state(info, metrics, base)


def server_state(
    info: Mapping[str, Any], metrics: Mapping[str, float], url: str
) -> ServerState:
    """Read ``/server_info`` and the gauges of ``/metrics``."""
    # A rank's own report: the top level adds the ranks up.
    state = (info.get("internal_states") or [{}])[0]
    report = state.get("hybrid_capacity") or info.get("hybrid_capacity")
    usage: dict[str, Any] = {
        "running_requests": metrics.get("sglang:num_running_reqs"),
        "held_share": metrics.get("sglang:mamba_usage"),
    }
    if report is not None:
        return ServerState(**_reported(report), **usage)
    slots = state.get("max_mamba_cache_size")
    if slots is None:
        raise CheckError(f"{url}: this server has no recurrent-state pool")
    return ServerState(
        ratio=state.get("mamba_full_memory_ratio"),
        ratio_origin=None,
        kv_tokens=info["max_total_num_tokens"],
        state_slots=slots,
        max_running_requests=state["effective_max_running_requests_per_dp"],
        **usage,
    )


def _reported(report: Mapping[str, Any]) -> dict[str, Any]:
    same = (
        "ratio",
        "ratio_origin",
        "kv_tokens",
        "state_slots",
        "max_running_requests",
        "state_slots_per_request",
        "kv_bytes_per_token",
        "state_bytes_per_slot",
        "draft_state_bytes_per_request",
        "reference_concurrency",
    )
    context = report["mean_final_context_tokens"]
    return {name: report[name] for name in same} | {"mean_final_context": context}


def parse_metrics(text: str) -> dict[str, float]:
    """The largest sample of every unlabelled or labelled series, by name."""
    values: dict[str, float] = {}
    for name, value in re.findall(r"^([a-z_:]+)(?:\{.*\})? (\S+)$", text, re.M):
        values[name] = max(float(value), values.get(name, 0.0))
    return values


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError) as error:
        raise CheckError(f"{url}: {getattr(error, 'reason', error)}") from error


# --------------------------------------------------------------------------
# Findings
# --------------------------------------------------------------------------


def describe_server(server: ServerState) -> list[str]:
    """What the server really runs, and what it holds against what it reserves."""
    ratio = "unknown" if server.ratio is None else f"{server.ratio:.4g}"
    origin = "" if server.ratio_origin is None else f" ({server.ratio_origin})"
    lines = [
        f"server: ratio {ratio}{origin}, {server.kv_tokens:,} KV tokens, "
        f"{server.state_slots:,} state slots, "
        f"max_running_requests {server.max_running_requests}"
    ]
    if server.reference_concurrency is not None:
        lines.append(
            f"server: reference concurrency {server.reference_concurrency} for "
            f"trajectories of {server.mean_final_context:,.0f} tokens"
        )
    return lines + _use_of_slots(server)


def _use_of_slots(server: ServerState) -> list[str]:
    """Reserve and use are two things: the cap follows from the first alone."""
    running, share = server.running_requests, server.held_share
    if running is None or share is None:
        return ["use: unknown, the server exports no metrics (--enable-metrics)"]
    if not running:
        return ["use: no request is running just now"]
    held = share * server.state_slots
    line = (
        f"use: {running:.0f} running requests hold {held:.0f} of "
        f"{server.state_slots} slots, {held / running:.1f} a request"
    )
    if server.state_slots_per_request is not None:
        line += f"; {server.state_slots_per_request} are reserved for each"
    idle = server.state_slots - held
    if running >= server.max_running_requests and idle >= 1:
        line += (
            f", so the cap of {server.max_running_requests} leaves {idle:.0f} slots "
            "idle (they can keep states of turns between requests)"
        )
    return [line]


def compare(plan: Plan, server: ServerState) -> list[str]:
    """Where the server departs from ``plan``; empty if it runs as planned."""
    split = plan.recommended
    pairs = [
        ("ratio", split.ratio, server.ratio),
        ("KV tokens", split.pools.kv_tokens, server.kv_tokens),
        ("state slots", split.pools.state_slots, server.state_slots),
        (
            "max_running_requests",
            split.max_running_requests,
            server.max_running_requests,
        ),
    ]
    return [
        f"{name}: planned {planned:,.6g}, the server runs {real:,.6g}"
        for name, planned, real in pairs
        if real is not None and _departs(planned, real)
    ]


def _departs(planned: float, real: float) -> bool:
    # One slot or request more or less is rounding, not another configuration.
    slack = max(_TOLERANCE * abs(planned), 1 if isinstance(planned, int) else 0)
    return abs(real - planned) > slack


def require_costs(server: ServerState, url: str) -> None:
    """Refuse to plan from a server that does not say what its units cost."""
    if server.cache_bytes is None or server.state_slots_per_request is None:
        raise CapacityError(
            "--check",
            url,
            "a server with hybrid_capacity, or used with a plan's inputs",
        )
