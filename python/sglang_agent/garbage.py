"""How often the cyclic garbage collector may hold up a batch.

What a turn needs is freed by its reference count, so with thousands of turns in
flight a collection walks through all of them and finds next to nothing. It comes
seldom here: when many objects have gathered, or when the process has grown, because
the code of an environment may leave large cycles behind.
"""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

YOUNG_OBJECTS = 1_500_000
GROWTH_BYTES = 2**29
CHECK_INTERVAL_S = 1.0


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect seldom inside, and look at nothing twice that survived."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    gc.callbacks.append(_freeze_survivors)
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze_survivors)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def collect_when_grown(resident_bytes: Callable[[], int] | None = None) -> None:
    """Collect whenever ``GROWTH_BYTES`` have come since the last time; never ends."""
    resident_bytes = resident_bytes or _resident_bytes
    before = resident_bytes()
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        if resident_bytes() - before > GROWTH_BYTES:
            gc.collect()
            before = resident_bytes()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
    del info
    if phase == "stop":
        gc.freeze()
