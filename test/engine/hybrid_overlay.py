"""Our torch-free engine modules without the sglang package, whose import costs seconds.

The modules are those of the checkout; while they are imported, ``sglang`` is an empty
package over ``python/sglang``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

OVERLAY = Path(__file__).parents[2] / "python" / "sglang"


def _package(name: str, folder: Path) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    return module


def load(*names: str) -> list[ModuleType]:
    """Import ``names`` that way; the real sglang, imported or not, stays untouched."""
    real = {name: sys.modules[name] for name in sys.modules if _is_sglang(name)}
    for name in real:
        del sys.modules[name]
    try:
        sys.modules["sglang"] = _package("sglang", OVERLAY)
        sys.modules["sglang.srt"] = _package("sglang.srt", OVERLAY / "srt")
        return [importlib.import_module(name) for name in names]
    finally:
        for name in [name for name in sys.modules if _is_sglang(name)]:
            del sys.modules[name]
        sys.modules.update(real)


def _is_sglang(name: str) -> bool:
    return name == "sglang" or name.startswith("sglang.")


capacity, workload_profile, plan, plan_check, plan_hybrid_cache = load(
    "sglang.srt.mem_cache.hybrid_capacity",
    "sglang.srt.mem_cache.hybrid_workload_profile",
    "sglang.srt.mem_cache.hybrid_plan",
    "sglang.srt.mem_cache.hybrid_plan_check",
    "sglang.plan_hybrid_cache",
)
