"""The SRT platform of machines without an accelerator.

Memory is virtual: the pools of KV cache and recurrent state are sized from a fixed
number of bytes instead of the free memory of the moment, so that the same command
gives the same pools on every run.
"""

import logging
import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from . import launch
from .detection import PLATFORM_NAME
from .hooks import install_kernels
from .memory import device_bytes

logger = logging.getLogger(__name__)

#: Tokens of one prefill step where the user names no chunk size.
DEFAULT_CHUNKED_PREFILL_TOKENS = 2048
#: Share of the virtual memory for the pools; the weights live outside of it.
DEFAULT_MEM_FRACTION_STATIC = 0.9


class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """Serves hybrid KDA + MLA models and dense models with torch alone."""

    _enum = PlatformEnum.OOT
    device_name = PLATFORM_NAME
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        # Threads that spin in tiny attention calls make a busy machine several
        # times slower; children inherit the setting through the environment.
        if "OMP_NUM_THREADS" not in os.environ:
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        # A window rounded to bfloat16 would make a resumed prefix differ from a
        # recomputed one.
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")

    def get_device(self, device_id: int = 0) -> str:  # type: ignore[override]
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of the virtual device."""
        return device_bytes()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Settings that make a bare launch command work; explicit flags win."""
        if server_args.device != "cpu":
            return
        # SGLang has already put its own CPU default there, whose kernels are in
        # the CPU build only.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = "torch_native"
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        if server_args.chunked_prefill_size is None:
            server_args.chunked_prefill_size = DEFAULT_CHUNKED_PREFILL_TOKENS
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = DEFAULT_MEM_FRACTION_STATIC
        # Ling keeps its output head in bfloat16, whose logits tie too often for
        # greedy decoding to mean anything.
        server_args.enable_fp32_lm_head = True
        # Nothing overlaps on one thread, and no_buffer refuses the overlap schedule.
        server_args.disable_overlap_schedule = True
        # An idle scheduler that polls without a pause takes a core from the others.
        server_args.sleep_on_idle = True
        launch.install()

    def init_backend(self) -> None:
        """Replace the kernels; runs in the processes that hold a model only."""
        install_kernels()
        logger.info(
            "Reference CPU platform: %d torch thread(s), %d bytes of virtual device "
            "memory.",
            torch.get_num_threads(),
            device_bytes(),
        )
