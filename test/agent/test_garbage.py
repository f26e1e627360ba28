"""Collections while a batch runs: seldom, bounded, and undone afterwards."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from sglang_agent import garbage


class Node:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


def nodes_looked_at() -> int:
    """Nodes the collector knows; by type, as some objects warn of ``isinstance``."""
    return sum(type(found) is Node for found in gc.get_objects())


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


def test_everything_is_as_before_afterwards() -> None:
    before = gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()
    with garbage.rare_collections():
        assert gc.get_threshold()[0] == garbage.YOUNG_OBJECTS
    assert (gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()) == before


def test_cycles_are_freed_once_many_objects_have_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "YOUNG_OBJECTS", 5_000)
    with garbage.rare_collections():
        lost = weakref.ref(Node())
        few = [[] for _ in range(1_000)]
        assert lost() is not None
        many = [[] for _ in range(10_000)]
        assert lost() is None
        del few, many


async def test_cycles_are_freed_once_the_process_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "CHECK_INTERVAL_S", 0.0)
    size = 0
    with garbage.rare_collections():
        watch = asyncio.create_task(garbage.collect_when_grown(lambda: size))
        lost = weakref.ref(Node())
        for _ in range(5):
            await asyncio.sleep(0)
        assert lost() is not None
        size = garbage.GROWTH_BYTES + 1
        for _ in range(5):
            await asyncio.sleep(0)
        assert lost() is None
        watch.cancel()


def test_what_survived_is_not_looked_at_again() -> None:
    with garbage.rare_collections():
        kept = [Node() for _ in range(100)]
        gc.collect()
        assert nodes_looked_at() == 0
    assert nodes_looked_at() == len(kept)
