"""Faster start-up on machines where importing is most of it.

An engine is three processes, and importing SGLang takes each of them ten seconds or
more of CPU time. Without a device to initialise nothing speaks against forking the
process that has imported everything already.
"""

import multiprocessing
import os
import threading
from typing import Any

#: Set by SGLang for packages of other people; naming ours makes it look up the
#: architectures found there first, and import all two hundred models only for others.
MODEL_PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
MODEL_PACKAGE = f"{__package__}.models"


def can_fork() -> bool:
    """Whether no other Python thread could leave a lock behind in a forked child."""
    return hasattr(os, "fork") and threading.active_count() == 1


def _fork_children(*_: Any, **__: Any) -> None:
    # Called right before the first child starts.
    if can_fork():
        multiprocessing.set_start_method("fork", force=True)


def install() -> None:
    """Prepare this process for launching an engine; harmless where none is."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    os.environ.setdefault(MODEL_PACKAGE_VARIABLE, MODEL_PACKAGE)
    HookRegistry.register(
        "sglang.srt.utils.numa_utils.configure_subprocess",
        _fork_children,
        HookType.BEFORE,
    )
    HookRegistry.apply_hooks()
