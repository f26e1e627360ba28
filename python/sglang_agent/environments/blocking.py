"""Runs blocking code beside the event loop.

asyncio's own pool has a few more threads than cores, which would be a second, hidden
limit under the environment concurrency, and Python waits for its threads at exit, so
one stuck job would hang a finished batch. Here every call has a daemon thread of its
own; how many there are at once is the action scheduler's business.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_numbers = itertools.count(1)


async def run_blocking(function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function`` in a thread and wait for it.

    When cancelled, the wait ends at once and the thread's result is dropped: Python
    cannot stop a thread.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            set_it(value)

    def hand_over(set_it: Callable[[Any], None], value: Any) -> None:
        # The loop may have been closed while the call ran.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, set_it, value)

    def work() -> None:
        try:
            value = context.run(function, *arguments)
        except BaseException as error:
            hand_over(outcome.set_exception, error)
        else:
            hand_over(outcome.set_result, value)

    name = f"environment-job-{next(_numbers)}"
    threading.Thread(target=work, name=name, daemon=True).start()
    return await outcome
