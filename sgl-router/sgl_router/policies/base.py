"""What every routing policy offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple


class PolicyError(ValueError):
    """A policy name or option that cannot be used; the message names it."""


class Choice(NamedTuple):
    """A picked worker and the branch of the policy that picked it."""

    worker: str
    branch: str


class Loads(dict[str, int]):
    """Loads by worker that keep their sum ready.

    Whoever stores by key instead of calling :meth:`put` keeps ``total`` right himself.
    """

    __slots__ = ("total",)

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        """Sum of all loads."""

    def put(self, worker: str, load: int) -> None:
        """Set ``worker``'s load, whether it was there or not."""
        self.total += load - self.get(worker, 0)
        self[worker] = load

    def drop(self, worker: str) -> None:
        """Take ``worker`` out, if it is there."""
        self.total -= self.pop(worker, 0)


def total_load(loads: Mapping[str, int]) -> int:
    """Sum of all loads, at once where it is kept ready."""
    return loads.total if type(loads) is Loads else sum(loads.values())


class Policy(ABC):
    """Picks the worker for one request; no I/O, no clock, no count keeping.

    Args:
        workers: the URLs of the registered workers, in order of arrival. Later
            changes are told with :meth:`update_workers`.

    A policy may keep state of its own (a counter, a seeded generator, remembered
    prefixes): the same calls in the same order give the same answers.
    """

    name: ClassVar[str]
    branches: ClassVar[tuple[str, ...]]
    """Every branch name :meth:`choose` may give: the label values of its metric."""
    needs_text: ClassVar[bool] = False
    """True when :meth:`choose` wants the prompt text (the gateway then reads bodies)."""

    def __init__(self, workers: Iterable[str] = (), **options: Any) -> None:
        if options:
            raise PolicyError(f"{self.name}: unknown options {sorted(options)}")
        self.update_workers(workers)

    def update_workers(self, workers: Iterable[str]) -> None:  # noqa: B027
        """Take the registered workers, healthy or not (a no-op where none matter)."""

    def home_shares(self) -> Mapping[str, float]:
        """Part of all labels each worker is home to; empty where labels have no home."""
        return {}

    @abstractmethod
    def choose(
        self, label: str | None, loads: Mapping[str, int], text: str | None = None
    ) -> Choice:
        """Pick from ``loads`` (worker URL -> in-flight requests; never empty).

        ``label`` is the trajectory label, None when the request carries no valid
        one. ``text`` is the prompt, only given to policies that ask for it.

        Raises:
            ValueError: ``loads`` is empty.
        """

    def pick(
        self, label: str | None, loads: Mapping[str, int], text: str | None = None
    ) -> str:
        """:meth:`choose` without the branch."""
        return self.choose(label, loads, text).worker


def least_loaded(loads: Mapping[str, int], turn: int) -> str:
    """The worker with the smallest load; ``turn`` rotates among equals."""
    smallest = min(loads.values())
    equals = [worker for worker, load in loads.items() if load == smallest]
    return equals[turn % len(equals)]
