"""Six public hybrid families: the numbers of their configs, and costs worked out by hand.

A cost is written as the published numbers multiply, for bfloat16 KV caches and
convolution windows and float32 states, on one GPU:

- KV cache of a token: layers x (keys and values of each KV head), or for latent
  attention layers x (latent + rotary part);
- state of a slot: layers x (window of every convolved channel + state matrices).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Family:
    """A config folder's content and its two unit costs in bytes."""

    config: dict[str, Any]
    kv_bytes_per_token: int
    state_bytes_per_slot: int


KIMI_LINEAR_48B = Family(
    config={
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 72,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-05,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 1048576,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [
                *(1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15),
                *(17, 18, 19, 21, 22, 23, 25, 26),
            ],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
    kv_bytes_per_token=7 * (512 + 64) * BF16,
    # q, k and v are convolved; one 128 x 128 matrix a head.
    state_bytes_per_slot=20 * (3 * 3 * 32 * 128 * BF16 + 32 * 128 * 128 * FP32),
)

# The family's layout, five KDA layers to one of latent attention; sizes are the test's.
LING_3 = Family(
    config={
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "torch_dtype": "bfloat16",
        "vocab_size": 157184,
        "hidden_size": 4096,
        "intermediate_size": 9216,
        "num_hidden_layers": 42,
        "layer_group_size": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "max_position_embeddings": 131072,
    },
    kv_bytes_per_token=7 * (512 + 64) * BF16,
    state_bytes_per_slot=35 * (3 * 3 * 32 * 128 * BF16 + 32 * 128 * 128 * FP32),
)

QWEN3_NEXT_80B = Family(
    config={
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "max_position_embeddings": 262144,
    },
    kv_bytes_per_token=12 * 2 * 2 * 256 * BF16,
    state_bytes_per_slot=36
    * (3 * (2 * 16 * 128 + 32 * 128) * BF16 + 32 * 128 * 128 * FP32),
)

NEMOTRON_H_8B = Family(
    config={
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "torch_dtype": "bfloat16",
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "max_position_embeddings": 8192,
    },
    kv_bytes_per_token=4 * 2 * 8 * 128 * BF16,
    # x, B and C are convolved.
    state_bytes_per_slot=24
    * (3 * (128 * 64 + 2 * 8 * 128) * BF16 + 128 * 64 * 128 * FP32),
)

FALCON_H1_7B = Family(
    config={
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "torch_dtype": "bfloat16",
        "vocab_size": 130048,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 44,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "max_position_embeddings": 262144,
    },
    # Every layer has both.
    kv_bytes_per_token=44 * 2 * 2 * 128 * BF16,
    state_bytes_per_slot=44
    * (3 * (24 * 128 + 2 * 1 * 256) * BF16 + 24 * 128 * 256 * FP32),
)

GRANITE_4_H_TINY = Family(
    config={
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "torch_dtype": "bfloat16",
        "vocab_size": 100352,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 40,
        "layer_types": [
            "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)
        ],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "position_embedding_type": "nope",
        "max_position_embeddings": 131072,
    },
    kv_bytes_per_token=4 * 2 * 4 * 128 * BF16,
    state_bytes_per_slot=36
    * (3 * (48 * 64 + 2 * 1 * 128) * BF16 + 48 * 64 * 128 * FP32),
)

FAMILIES = {
    "kimi-linear-48b": KIMI_LINEAR_48B,
    "ling-3": LING_3,
    "qwen3-next-80b": QWEN3_NEXT_80B,
    "nemotron-h-8b": NEMOTRON_H_8B,
    "falcon-h1-7b": FALCON_H1_7B,
    "granite-4-h-tiny": GRANITE_4_H_TINY,
}

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
