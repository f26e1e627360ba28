"""The errors a caller of the library can meet; each says what and how much."""

from __future__ import annotations


class UsageError(Exception):
    """Bad input: one line naming the field, the value and what is allowed.

    A command that meets it prints the line and exits with 2.
    """


class QueueTimeout(TimeoutError):
    """No slot came free within the queue deadline; the job was never started."""

    def __init__(self, label: str, server: str | None, limit_s: float) -> None:
        super().__init__(
            f"{label}: no environment slot{_at(server)} within {limit_s:g} s"
        )


class RunTimeout(TimeoutError):
    """A started job ran longer than its run budget, which excludes queueing."""

    def __init__(self, label: str, server: str | None, limit_s: float) -> None:
        super().__init__(
            f"{label}: environment job{_at(server)} ran longer than {limit_s:g} s"
        )


class JobAbandoned(RunTimeout):
    """A job outlived its run budget and ignored cancellation; its slot was freed."""


class WouldBlock(Exception):
    """The no-wait form found no free slot."""


def _at(server: str | None) -> str:
    return "" if server is None else f" at {server}"
