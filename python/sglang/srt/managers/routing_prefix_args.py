"""Checks and resolves the flags of routing-prefix scheduling; light to import."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import msgspec
from sglang.srt.runtime_context import get_context, get_schedule

logger = logging.getLogger(__name__)

POLICY_NAME = "routing-prefix"


class RoutingPrefixSettings(msgspec.Struct, frozen=True):
    """Resolved settings; ``capacity_origin`` says where the capacity came from."""

    capacity: int
    capacity_origin: str
    overtake_limit: int | None


def default_capacity(trajectories: int) -> int:
    """Return how many labels to keep where ``trajectories`` can be served at once.

    Twice as many: a label is renewed at admission only, so in a set as large as the
    running batch every admission pushes out the label of the request that has decoded
    longest, and its next turn comes back to the second tier.
    """
    return 2 * trajectories


def resolve_settings(max_running_requests: int | None) -> RoutingPrefixSettings:
    """Resolve the published flags.

    Without ``--routing-prefix-capacity`` the capacity is :func:`default_capacity` of
    the reference concurrency when the cache sizing published that, else of
    ``max_running_requests``.
    """
    capacity = get_schedule().routing_prefix_capacity
    if get_context().server_args.routing_prefix_capacity is not None:
        origin = "flag"
    elif capacity is not None:
        origin = "reference_concurrency"
    else:
        capacity = max_running_requests and default_capacity(max_running_requests)
        origin = "max_running_requests"
    if capacity is None or capacity < 1:
        raise ValueError(
            f"routing_prefix_capacity: {capacity!r} ({origin}) is not a positive integer"
        )
    return RoutingPrefixSettings(
        capacity, origin, get_schedule().routing_prefix_overtake_limit
    )


def find_problem(args: Any) -> str | None:
    """Return what is wrong with the flags in ``args``, in one line, else None."""
    capacity = args.routing_prefix_capacity
    if capacity is not None and capacity < 1:
        return f"--routing-prefix-capacity: {capacity} is not a positive integer"
    limit = args.routing_prefix_overtake_limit
    if limit is not None and limit < 0:
        return f"--routing-prefix-overtake-limit: {limit} is negative"
    if args.schedule_policy != POLICY_NAME:
        return None
    for flag, given in (
        ("--enable-priority-scheduling", args.enable_priority_scheduling),
        ("--dllm-algorithm", args.dllm_algorithm is not None),
    ):
        if given:
            return f"--schedule-policy {POLICY_NAME} cannot be combined with {flag}"
    return None


def check_args(args: Any) -> None:
    """Raise ValueError when the flags are wrong; warn about flags without effect."""
    problem = find_problem(args)
    if problem is not None:
        raise ValueError(problem)
    if args.schedule_policy == POLICY_NAME:
        return
    for flag, value in (
        ("--routing-prefix-capacity", args.routing_prefix_capacity),
        ("--routing-prefix-overtake-limit", args.routing_prefix_overtake_limit),
    ):
        if value is not None:
            logger.warning(
                "%s has no effect without --schedule-policy %s", flag, POLICY_NAME
            )


def exit_on_problem(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command line with one line and status 2 when the flags are wrong."""
    problem = find_problem(args)
    if problem is not None:
        parser.exit(2, f"{parser.prog}: error: {problem}\n")


def routing_prefix_section(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ``routing_prefix`` entry of ``/server_info``, summed over the ranks.

    Every data-parallel rank schedules, and keeps a label set, of its own.
    ``first_tier_share`` is the share of admitted requests whose label was in the set,
    None before the first one. Returns an empty mapping when the policy is not in use.
    """
    found = [state["routing_prefix"] for state in states if "routing_prefix" in state]
    if not found:
        return {}
    settings = {"capacity_origin", "overtake_limit"}
    first = found[0]
    total = {
        name: value if name in settings else sum(entry[name] for entry in found)
        for name, value in first.items()
    }
    admitted = total["admitted_first_tier"] + total["admitted_second_tier"]
    total["first_tier_share"] = (
        total["admitted_first_tier"] / admitted if admitted else None
    )
    return {"routing_prefix": total}
