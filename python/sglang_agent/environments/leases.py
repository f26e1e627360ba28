"""Whose a leftover is: names that tell whether their process still lives.

A lease (a child process, a container, a sandbox folder) carries the process that took
it. After a kill -9 nobody gives it back, so the next process that takes one of its
kind looks for leases whose owner is gone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

OWNER_VARIABLE = "SGLANG_AGENT_OWNER"


def owner() -> str:
    """This process, told apart from a later one with the same number."""
    return f"{_place()}-{os.getpid()}-{_started(os.getpid())}"


def is_gone(owner: str) -> bool:
    """Whether the process behind an :func:`owner` string is known to have ended.

    Of a process on another machine, or in a container with numbers of its own, nothing
    is known from here, so its leases are left alone.
    """
    place, _, process = owner.partition("-")
    number, _, started = process.partition("-")
    if place != _place() or not number.isdigit():
        return False
    return _started(int(number)) != started


def kill_processes(variable: str, is_wanted: Callable[[str], bool]) -> list[int]:
    """Kill processes of ours by the value of a variable in their environment.

    Looks at ``/proc``, so it finds none elsewhere than on Linux. Returns their ids.
    """
    start = f"{variable}=".encode()
    killed = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(start) and is_wanted(
                    entry[len(start) :].decode(errors="replace")
                ):
                    os.kill(int(folder.name), signal.SIGKILL)
                    killed.append(int(folder.name))
    return killed


def end_orphans() -> list[int]:
    """Kill processes whose owner is gone; returns their ids."""
    return kill_processes(OWNER_VARIABLE, is_gone)


end_orphans_once = functools.cache(end_orphans)
"""As :func:`end_orphans`, the first time it is called in a process."""


@functools.cache
def _place() -> str:
    """The boot of this machine and the namespace in which process numbers count."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        return "unknown"


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name, in brackets, may hold spaces; the 22nd field is the 20th after it.
    return stat.rpartition(")")[2].split()[19]
