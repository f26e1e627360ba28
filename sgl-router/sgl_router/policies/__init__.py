"""Routing policies, by name: the gateway and the simulator use the same objects.

Importing this package needs the standard library and ``blake3`` only. A policy does
no I/O and reads no clock::

    policy = make_policy("lbch", ["http://a:1", "http://b:1"], load_factor=1.25)
    worker = policy.pick("sample-7", {"http://a:1": 3, "http://b:1": 0})

The keys of ``loads`` are the workers that may take this request; the values are
their in-flight requests (queued or running), counted at selection. The caller adds
one to the picked worker's load and takes it off when the request ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from sgl_router.policies.base import Choice, Loads, Policy, PolicyError
from sgl_router.policies.bounded import BoundedConsistentHashing
from sgl_router.policies.cache_aware import CacheAware
from sgl_router.policies.hashing import ConsistentHashing
from sgl_router.policies.load import LeastLoad, PowerOfTwo, Random, RoundRobin
from sgl_router.policies.ring import HashRing

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        BoundedConsistentHashing,
        ConsistentHashing,
        CacheAware,
        PowerOfTwo,
        LeastLoad,
        RoundRobin,
        Random,
    )
}
"""Every policy by its canonical name."""

ALIASES: dict[str, str] = {"lbch": BoundedConsistentHashing.name}
"""Short names accepted wherever a policy is named."""


def policy_names() -> list[str]:
    """All accepted names, aliases included, as the command line offers them."""
    return [*ALIASES, *POLICIES]


def make_policy(name: str, workers: Iterable[str] = (), **options: object) -> Policy:
    """Build the policy called ``name`` for ``workers`` (URLs, in order of arrival).

    ``options`` are the policy's own constructor arguments; :func:`policy_options`
    lists them.

    Raises:
        PolicyError: the name is unknown, an option is not the policy's, or a value
            is out of range (for instance a load factor below 1).
    """
    policy = POLICIES.get(ALIASES.get(name, name))
    if policy is None:
        allowed = ", ".join(policy_names())
        raise PolicyError(f"policy: {name!r} is unknown; allowed: {allowed}")
    allowed_options = policy_options(name)
    for option in options:
        if option not in allowed_options:
            listed = ", ".join(sorted(allowed_options)) or "none"
            raise PolicyError(f"{name}: no option {option!r}; allowed: {listed}")
    return policy(workers, **options)


def policy_options(name: str) -> frozenset[str]:
    """The names of the constructor options of the policy called ``name``."""
    policy = POLICIES[ALIASES.get(name, name)]
    parameters = inspect.signature(policy).parameters
    return frozenset(parameters) - {"workers"}


__all__ = [
    "ALIASES",
    "POLICIES",
    "BoundedConsistentHashing",
    "CacheAware",
    "Choice",
    "ConsistentHashing",
    "HashRing",
    "LeastLoad",
    "Loads",
    "Policy",
    "PolicyError",
    "PowerOfTwo",
    "Random",
    "RoundRobin",
    "make_policy",
    "policy_names",
    "policy_options",
]
