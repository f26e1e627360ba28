"""How many environments may be starting at once.

Samples are admitted by the dozen, and each may start several processes. Side by side
on a few cores they would all be slow, and some would run into their time limit, so
starts take turns, in the order in which they were asked for. A limit on starting
counts from a start's turn.
"""

from __future__ import annotations

import asyncio
import os
from weakref import WeakKeyDictionary

LEAST = 2
_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    WeakKeyDictionary()
)


def start_turn() -> asyncio.Semaphore:
    """The gate of the running event loop: ``async with start_turn(): ...``."""
    loop = asyncio.get_running_loop()
    if loop not in _gates:
        _gates[loop] = asyncio.Semaphore(max(os.cpu_count() or LEAST, LEAST))
    return _gates[loop]
