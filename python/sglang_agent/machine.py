"""What a figure was measured on."""

from __future__ import annotations

import contextlib
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def processor() -> str:
    """Name of the processor; the architecture where the system has no name for it."""
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def in_words() -> str:
    """Processor and number of cores."""
    return f"{processor()}, {os.cpu_count()} cores"


def machine() -> dict[str, object]:
    """Everything that a results file says of it, with the date (UTC) and the load."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_at_start": os.getloadavg(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
