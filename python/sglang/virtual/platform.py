"""The device of a virtual worker: host memory, and nothing that computes."""

from __future__ import annotations

import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang.srt import platforms


class VirtualPlatform(SRTPlatform):
    """A CPU on which no kernel ever runs."""

    _enum = PlatformEnum.OOT
    device_name = "virtual"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self) -> bool:
        return False

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True


def use_virtual_platform() -> None:
    """Make this the process's platform; must precede the scheduler's import."""
    platforms._current_platform = VirtualPlatform()
    if not torch.cuda.is_available():
        # prepare_for_decode pins host tensors without asking the platform.
        torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.set_num_threads(1)
