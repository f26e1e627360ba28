"""What the workers behind a base URL say of themselves."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import orjson

from sglang_agent.errors import UsageError

_LEVELS = frozenset({"capacity", "overtake_limit", "labels_held"})


class Worker(msgspec.Struct, frozen=True):
    """One worker: its URL and the answer of its ``/server_info`` (None if silent)."""

    url: str
    server_info: dict[str, Any] | None


async def discover(base_url: str, limit_s: float = 10.0) -> list[Worker]:
    """List the workers of a gateway, or the server itself when it is none.

    Raises :class:`UsageError` when nobody answers at ``base_url``.
    """
    timeout = aiohttp.ClientTimeout(total=limit_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        listing = await _get(session, f"{base_url}/workers", base_url)
        urls = _urls(listing) or [base_url]
        return [
            Worker(url, await _get(session, f"{url}/server_info", None)) for url in urls
        ]


async def discover_quietly(base_url: str) -> list[Worker]:
    """As :func:`discover`, but a server that is gone is an empty list."""
    try:
        return await discover(base_url)
    except UsageError:
        return []


def counters_since(
    before: list[Worker], after: list[Worker]
) -> dict[str, dict[str, Any]]:
    """Return what each scheduler's routing-prefix counters say of the time between.

    Settings and levels are those of ``after``; workers that report none are absent.
    """
    earlier = {worker.url: _routing_prefix(worker) for worker in before}
    found = {}
    for worker in after:
        now = _routing_prefix(worker)
        if now:
            found[worker.url] = {
                name: value - earlier.get(worker.url, {}).get(name, 0)
                if isinstance(value, int) and name not in _LEVELS
                else value
                for name, value in now.items()
            }
    return found


async def find_model(base_url: str, limit_s: float = 10.0) -> str:
    """Return the name of the one model served, for users who gave none."""
    timeout = aiohttp.ClientTimeout(total=limit_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        listing = await _get(session, f"{base_url}/v1/models", base_url)
    names = [model["id"] for model in (listing or {}).get("data") or ()]
    if len(set(names)) != 1:
        raise UsageError(
            f"--model: {base_url} serves {len(set(names))} models"
            f" ({', '.join(sorted(set(names))) or 'none'}); name one"
        )
    return str(names[0])


def reference_concurrency(workers: list[Worker]) -> int:
    """Sum the workers' reference concurrency (equation 8).

    Raises :class:`UsageError` naming a worker that has none.
    """
    total = 0
    for worker in workers:
        capacity = (worker.server_info or {}).get("hybrid_capacity") or {}
        reference = capacity.get("reference_concurrency")
        if not isinstance(reference, (int, float)) or reference < 1:
            raise UsageError(
                f"--sample-concurrency: auto; worker {worker.url} reports no"
                " hybrid_capacity.reference_concurrency, start it with"
                " --hybrid-workload-profile or give a whole number"
            )
        total += int(reference)
    return total


def _routing_prefix(worker: Worker) -> dict[str, Any]:
    """Find the snapshot at the top or in the first scheduler's own state."""
    info = worker.server_info or {}
    states = info.get("internal_states") or [{}]
    return info.get("routing_prefix") or states[0].get("routing_prefix") or {}


async def _get(
    session: aiohttp.ClientSession, url: str, must_answer: str | None
) -> dict[str, Any] | None:
    """Fetch JSON; a refusal is None, and so is silence unless it must answer."""
    try:
        async with session.get(url) as response:
            if response.status != 200:
                return None
            found = orjson.loads(await response.read())
            return found if isinstance(found, dict) else None
    except orjson.JSONDecodeError:
        return None
    except (aiohttp.ClientError, TimeoutError) as error:
        if must_answer is None:
            return None
        raise UsageError(
            f"--base-url: {must_answer}; must be a server that answers"
            f" ({str(error) or type(error).__name__})"
        ) from error


def _urls(listing: dict[str, Any] | None) -> list[str]:
    workers = (listing or {}).get("workers") or []
    return [w["url"] for w in workers if isinstance(w, dict) and "url" in w]
