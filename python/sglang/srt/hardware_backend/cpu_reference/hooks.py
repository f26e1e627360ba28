"""Which parts of SGLang the platform replaces, and with what.

``init_backend`` of an out-of-tree platform runs while the model runner is imported,
in the scheduler process only. The hook registry also rebinds copies that other
modules have already imported.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import attention, causal_conv, gated_norm, kda, state_tracking
from .memory import device_bytes

_OPS = "sglang.kernels.ops"
_CONV = f"{_OPS}.mamba.causal_conv1d_triton"
_TRACK = f"{_OPS}.mamba.mamba_state_scatter_triton"
_FLA = f"{_OPS}.attention.fla"

#: Upstream name -> replacement.
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    f"{_CONV}.causal_conv1d_fn": causal_conv.causal_conv1d_fn,
    f"{_CONV}.causal_conv1d_update": causal_conv.causal_conv1d_update,
    f"{_FLA}.kda.chunk_kda": kda.chunk_kda,
    f"{_FLA}.fused_recurrent.fused_recurrent_kda_packed_decode": kda.packed_decode,
    f"{_OPS}.attention.linear.fused_sigmoid_gating_recurrent"
    ".fused_sigmoid_gating_delta_rule_update": kda.gated_decode,
    f"{_FLA}.fused_norm_gate.rms_norm_gated": gated_norm.rms_norm_gated,
    f"{_TRACK}.track_mamba_states_if_needed": (
        state_tracking.track_mamba_states_if_needed
    ),
    f"{_TRACK}.track_mamba_states_all_layers": (
        state_tracking.track_mamba_states_all_layers
    ),
    "sglang.srt.layers.attention.torch_native_backend"
    ".TorchNativeAttnBackend._run_sdpa_forward_extend": attention.run_extend,
    "sglang.srt.utils.common.get_free_cpu_memory": device_bytes,
}


def _pin_memory(original: Callable[..., Any], tensor: Any, *args: Any) -> Any:
    # Decode with extra_buffer pins without asking the platform.
    return original(tensor, *args) if torch.cuda.is_available() else tensor


def _use_latent_attention() -> None:
    """Make MLA layers attend over the latent cache.

    Without a handler of its own torch_native is given Triton's, which picks plain
    multi-head attention for a prefill without a prefix, and that reads the latent
    pool with the wrong width.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(
        "torch_native", lambda attn, forward_batch: AttnForwardMethod.MLA
    )


def install_kernels() -> None:
    """Install every replacement in this process. Calling it again changes nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, replacement in REPLACEMENTS.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)
    HookRegistry.register("torch.Tensor.pin_memory", _pin_memory, HookType.AROUND)
    HookRegistry.apply_hooks()
    _use_latent_attention()
