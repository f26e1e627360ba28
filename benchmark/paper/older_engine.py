"""A virtual worker that keeps recurrent states in the order of an older engine.

SGLang 0.5.23 refreshes only the state that a match uses; its comment at that place says
what refreshing the ancestors as well used to do: the states of one trajectory stay side
by side, and a cold trajectory is evicted whole. The published cliffs are those of the
latter (README.md, where it differs), so the reproduction runs with it. The tree core is
the engine's own, which matches the prompt up to each ancestor's state in turn.
"""

from __future__ import annotations

import os
import sys
from itertools import takewhile
from typing import Any

BACKEND = "rust-refreshing-paths"


def register_backend() -> None:
    """Offer the tree core under its name; the engine must have been imported."""
    from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
        register_tree_core_backend,
    )

    class PathRefreshingTreeCore(RustUnifiedTreeCore):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self._recency: dict[int, None] = {}  # of nodes with states, oldest first

        def supports_fast_match_prefix(self) -> bool:
            return False  # prefixes of waiting requests are not refreshed (README.md)

        def match_prefix(self, params: Any) -> Any:
            result = super().match_prefix(params)
            self._refresh_path(params.key, result.best_match_node)
            return result

        def begin_insert(self, params: Any) -> Any:
            self._inserting = params.key
            return self._refreshed(super().begin_insert(params))

        def resume_insert(self) -> Any:
            return self._refreshed(super().resume_insert())

        def _refreshed(self, step: Any) -> Any:
            if step.result is not None:
                self._refresh_path(self._inserting, step.result.last_device_node)
            return step

        def _refresh_path(self, key: Any, node_id: int) -> None:
            """Make the states from the root down to the node the most recent ones.

            The engine has just made the node's own the most recent.
            """
            path = self._ends_of_states(node_id)
            if node_id in path:
                self._note_use(node_id)
            tokens = memoryview(key.token_ids)  # whose slices are not copied
            for at in list(path)[self._in_place(path) :]:
                self._note_use(at)
                self._binding.match_prefix(
                    self._bindings.MatchParamsBinding(
                        key=tokens[: path[at]],
                        extra_key=key.extra_key,
                        cache_salt=key.cache_salt,
                    )
                )

        def _note_use(self, at: int) -> None:
            self._recency.pop(at, None)
            self._recency[at] = None

        def _in_place(self, path: dict[int, int]) -> int:
            """How many states need no match: with the rest gone, they are the latest."""
            latest = list(takewhile(path.__contains__, reversed(self._recency)))
            in_order = reversed(latest)
            return sum(1 for _ in takewhile(lambda at: at in in_order, path))

        def _ends_of_states(self, node_id: int) -> dict[int, int]:
            """The states' nodes from the root down, and for how many tokens each stands."""
            (path,) = self._binding.collect_path_info([node_id])
            state = int(ComponentType.MAMBA)
            value = self._binding.get_component_device_value
            return {
                at: end for at, _, _, end, *_ in path if value(at, state) is not None
            }

    register_tree_core_backend(
        BACKEND, lambda params, _: PathRefreshingTreeCore(params)
    )


def main() -> int:
    """Be the worker."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = BACKEND
    from sglang import virtual_worker

    class OlderSession(virtual_worker._Session):
        def _start(self, command: Any) -> Any:
            # Not earlier: the engine must be imported on the virtual platform.
            register_backend()
            return super()._start(command)

    virtual_worker._Session = OlderSession
    return virtual_worker.main(["--fork"])


if __name__ == "__main__":
    sys.exit(main())
