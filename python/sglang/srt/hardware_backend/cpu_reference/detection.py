"""Whether the reference CPU platform is in charge of this process.

The platform must stay out of the way wherever SGLang has something better: it
activates by itself only if no accelerator is found, the CPU engine of SGLang is
not asked for, and no other platform plugin is installed. ``SGLANG_PLATFORM``
overrules all of that in either direction.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec

PLATFORM_NAME = "cpu_reference"
PLATFORM_GROUP = "sglang.srt.platforms"

Probe = Callable[[], bool]


def _cuda_like() -> bool:
    # ROCm and SAIL also answer through torch.cuda.
    import torch

    return torch.cuda.is_available()


def _xpu() -> bool:
    import torch

    return hasattr(torch, "xpu") and torch.xpu.is_available()


def _npu() -> bool:
    import torch

    return hasattr(torch, "npu") and torch.npu.is_available()


def _hpu() -> bool:
    return find_spec("habana_frameworks") is not None


def _musa() -> bool:
    import torch

    return getattr(torch.version, "musa", None) is not None


def _mps() -> bool:
    import torch

    return hasattr(torch, "mps") and torch.mps.is_available()


#: One probe per device that SGLang's own discovery knows.
PROBES: Mapping[str, Probe] = {
    "cuda": _cuda_like,
    "xpu": _xpu,
    "npu": _npu,
    "hpu": _hpu,
    "musa": _musa,
    "mps": _mps,
}


def find_accelerator(probes: Mapping[str, Probe] = PROBES) -> str | None:
    """Name of the first accelerator that answers, or None."""
    return next((name for name, probe in probes.items() if probe()), None)


def installed_platforms() -> list[str]:
    """Names of all platform plugins on the path, without importing them."""
    return [ep.name for ep in entry_points(group=PLATFORM_GROUP)]


def is_active(
    environ: Mapping[str, str] | None = None,
    *,
    probes: Mapping[str, Probe] = PROBES,
    platforms: Iterable[str] | None = None,
) -> bool:
    """Whether this platform should serve.

    ``environ``, ``probes`` and ``platforms`` default to the process's own; tests
    pass others.
    """
    environ = os.environ if environ is None else environ
    selected = environ.get("SGLANG_PLATFORM", "")
    if selected:
        return selected == PLATFORM_NAME
    if environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return False
    names = installed_platforms() if platforms is None else platforms
    if any(name != PLATFORM_NAME for name in names):
        return False
    return find_accelerator(probes) is None


def activate() -> str | None:
    """Entry point of group ``sglang.srt.platforms``.

    Returns the dotted name of the platform class, or None where the platform
    has no business.
    """
    if not is_active():
        return None
    return f"{__package__}.platform.CpuReferencePlatform"
