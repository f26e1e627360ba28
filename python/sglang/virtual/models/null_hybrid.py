"""A hybrid model without weights: one full-attention and one recurrent layer.

The pools are real tensors, so the geometry is as small as the quotient of state bytes
to KV bytes allows. One token of KV takes :data:`KV_BYTES`; the state's head is made
as large as needed to keep the quotient of the deployed model within
:data:`QUOTIENT_TOLERANCE`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.linear_attn_model_registry import (
    LinearAttnModelSpec,
    register_linear_attn_model,
)
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2StateDType,
)
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from torch import nn
from transformers import AutoConfig, PretrainedConfig

ARCHITECTURE = "VirtualHybridForCausalLM"
VOCAB_TOKENS = 1 << 17
STOP_TOKEN = 0
HEAD_DIM = 2
KV_BYTES = 2 * HEAD_DIM * 2
QUOTIENT_TOLERANCE = 0.02
CONV_KERNEL = 2


class VirtualHybridConfig(PretrainedConfig):
    """Layer 0 is recurrent, layer 1 is attention; ``state_rows`` sizes the state."""

    model_type = "sglang_virtual_hybrid"

    def __init__(self, state_rows: int = 1, context_length: int = 4096, **kwargs: Any):
        self.state_rows = state_rows
        self.hidden_size = HEAD_DIM
        self.intermediate_size = HEAD_DIM
        self.num_hidden_layers = 2
        self.num_attention_heads = 1
        self.num_key_value_heads = 1
        self.head_dim = HEAD_DIM
        self.vocab_size = VOCAB_TOKENS
        self.max_position_embeddings = context_length
        kwargs.setdefault("architectures", [ARCHITECTURE])
        kwargs.setdefault("eos_token_id", STOP_TOKEN)
        super().__init__(**kwargs)

    @property
    def linear_layer_ids(self) -> list[int]:
        return [0]

    @property
    def full_attention_layer_ids(self) -> list[int]:
        return [1]

    @property
    def mamba2_cache_params(self) -> KimiLinearCacheParams:
        shape = KimiLinearStateShape.create(
            tp_world_size=1,
            num_heads=self.state_rows,
            head_dim=1,
            conv_kernel_size=CONV_KERNEL,
        )
        dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
        return KimiLinearCacheParams(
            shape=shape, dtype=dtype, layers=self.linear_layer_ids
        )


class VirtualAttnBackend(MambaAttnBackendBase):
    """Never asked for metadata: the forward pass is replaced as a whole."""


class VirtualHybridForCausalLM(nn.Module):
    """One parameter, so that the loader has something to look at."""

    def __init__(self, config: VirtualHybridConfig, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """There are none."""


EntryClass = VirtualHybridForCausalLM


def register() -> None:
    """Make the configuration known to transformers and to SGLang."""
    AutoConfig.register(VirtualHybridConfig.model_type, VirtualHybridConfig)
    register_linear_attn_model(
        LinearAttnModelSpec(
            config_class=VirtualHybridConfig,
            backend_class_name=f"{__name__}.{VirtualAttnBackend.__name__}",
            arch_names=[ARCHITECTURE],
            uses_mamba_radix_cache=True,
            support_mamba_cache=True,
            support_mamba_cache_extra_buffer=True,
        )
    )


def state_bytes(state_rows: int) -> int:
    """Bytes of one state slot of ``state_rows`` rows."""
    return VirtualHybridConfig(
        state_rows=state_rows
    ).mamba2_cache_params.mamba_cache_per_req


def state_rows_for(quotient: float) -> int:
    """Rows that make a slot ``quotient`` tokens of KV large.

    Raises ValueError when the quotient is too small to be represented.
    """
    rows = max(1, round(quotient * KV_BYTES / state_bytes(1)))
    error = abs(state_bytes(rows) / KV_BYTES / quotient - 1)
    if not math.isfinite(error) or error > QUOTIENT_TOLERANCE:
        raise ValueError(
            f"state_bytes_per_slot / kv_bytes_per_token: {quotient:g} cannot be "
            f"represented within {QUOTIENT_TOLERANCE:.0%}; allowed: about "
            f"{state_bytes(1) / KV_BYTES / (2 * QUOTIENT_TOLERANCE):.0f} and more"
        )
    return rows


def write_model(folder: Path, state_rows: int, context_length: int) -> None:
    """Write the ``config.json`` that ``--model-path`` points to."""
    config = VirtualHybridConfig(state_rows=state_rows, context_length=context_length)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
