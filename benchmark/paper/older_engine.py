"""A virtual worker that keeps recurrent states in the order of an older engine.

SGLang 0.5.23 refreshes only the state that a match uses; its comment at that place says
what refreshing the ancestors as well used to do: the states of one trajectory stay side
by side, and a cold trajectory is evicted whole. The published cliffs are those of the
latter (README.md, where it differs), so the reproduction runs with it. Needs the Python
tree core, whose parts can be replaced.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from key_tail import use_tails


def refresh_path(component: Any, phase: Any, node: Any, root: Any) -> None:
    """Make the states from the root down to ``node`` the most recently used ones."""
    if phase.name == "WALKDOWN":  # once for each node on the way; its end will do
        return
    kind = component.component_type
    recency = component.tree_core.lru_lists[kind]
    path = []
    while node is not root:
        if node.component_data[kind].value is not None and recency.in_list(node):
            path.append(node)
        node = node.parent
    for holder in reversed(path):
        recency.reset_node_mru(holder)


def main() -> int:
    """Be the worker."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
    from sglang import virtual_worker

    class OlderSession(virtual_worker._Session):
        def _start(self, command: Any) -> Any:
            # Not earlier: the engine must be imported on the virtual platform.
            from sglang.srt.mem_cache.unified_cache.components import mamba

            mamba.MambaComponent.refresh_lru = refresh_path
            use_tails()
            return super()._start(command)

    virtual_worker._Session = OlderSession
    return virtual_worker.main(["--fork"])


if __name__ == "__main__":
    sys.exit(main())
