"""Inserts into the Python tree core without copying the rest of the key at every node.

The core cuts a key at each node it passes, which copies what is left: on a path of n
nodes, n/2 times the prompt. That was a fifth of the seconds of a swe batch. A
:class:`Tail` says where the rest begins instead; results are the same.
"""

from __future__ import annotations

from typing import Any


class Tail:
    """The tokens of ``key`` from ``offset`` on."""

    __slots__ = ("key", "offset")

    def __init__(self, key: Any, offset: int) -> None:
        self.key, self.offset = key, offset

    def __len__(self) -> int:
        return len(self.key) - self.offset

    def __getitem__(self, rest: slice) -> Tail:
        if rest.start is None or rest.stop is not None or rest.step is not None:
            raise ValueError(f"slice: {rest}; a tail only gives its own rest")
        return Tail(self.key, self.offset + rest.start)

    def child_key(self, page_size: int) -> Any:
        """The first page, as the core looks up children."""
        return self.key.child_key_at(self.offset, page_size)

    def copy(self) -> Any:
        """A key of its own."""
        return self.key[self.offset :]


def use_tails() -> None:
    """Change the core of this process; needs the engine to be imported."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    match, advance = RadixKey.match, UnifiedTreeCore._advance_insert
    add_node = UnifiedTreeCore._add_new_node

    def match_tail(self: Any, other: Any, page_size: int = 1) -> int:
        if isinstance(other, Tail):
            return self.match_at(other.key, other.offset, page_size)
        return match(self, other, page_size)

    def advance_with_tail(self: Any) -> Any:
        state = self._ongoing_insert_walk_state
        if not isinstance(state.key, Tail):
            state.key = Tail(state.key, 0)
        return advance(self)

    def add_copy(self: Any, parent: Any, key: Any, *rest: Any, **named: Any) -> Any:
        own = key.copy() if isinstance(key, Tail) else key
        return add_node(self, parent, own, *rest, **named)

    RadixKey.match = match_tail
    UnifiedTreeCore._advance_insert = advance_with_tail
    UnifiedTreeCore._add_new_node = add_copy
