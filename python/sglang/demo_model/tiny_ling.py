"""A random hybrid model of the Ling 3.0 kind, small enough for one CPU thread.

Three KDA layers and one MLA layer, dense. The weights are drawn so that what the
engine caches matters: gates decay slowly, so that the recurrent state carries far,
and logits are spread, so that a wrong state changes the next token. A bias towards
closing quotes, braces and end-of-turn lets random text end, inside a JSON grammar
too.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from .tokenizer import END_OF_TURN, closes_string, is_blank, is_number, write_tokenizer

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    hidden: int = 128
    intermediate: int = 256
    layers: int = 4
    group: int = 4  # every group-th layer attends, the others are KDA
    heads: int = 4
    head_dim: int = 32
    latent: int = 32
    rope_dim: int = 8
    conv_width: int = 4
    context: int = 32768


# Log decay per token lies in lower_bound * sigmoid(bias), about -0.005 to -0.05.
_LOWER_BOUND = -5.0
_GATE_BIAS = (-6.9, -4.6)
# Additions to a token's logit. A plain logit has a standard deviation of about 3.4,
# the largest of a few hundred is near 10. Strings and turns end after a dozen tokens
# or so; numbers and white space, which JSON lets grow without end, are held short.
_CLOSING_BIAS = 3.5
_END_BIAS = 4.0
_NUMBER_BIAS = -6.0
_BLANK_BIAS = -12.0
# Root mean square of the residual stream before the final norm, which divides by it.
_FINAL_SCALE = 2.5


def model_config(shape: Shape, vocabulary: int, end_id: int) -> dict[str, object]:
    """``config.json`` of the model."""
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "layer_group_size": shape.group,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 600000.0,
        "tie_word_embeddings": False,
        "num_experts": 1,
        "num_shared_experts": 0,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": shape.latent,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.head_dim,
        "short_conv_kernel_size": shape.conv_width,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": _LOWER_BOUND,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
    }


class _Draw:
    """Seeded weights; matrices are scaled to keep the variance of their input."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, *size: int, std: float) -> np.ndarray:
        return (self._rng.standard_normal(size) * std).astype(np.float32)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return self.normal(rows, columns, std=gain * columns**-0.5)

    def output(self, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        """A matrix that leaves channel 0 of the residual stream alone."""
        weight = self.matrix(rows, columns, gain)
        weight[0] = 0.0
        return weight

    def uniform(self, size: int, low: float, high: float) -> np.ndarray:
        return self._rng.uniform(low, high, size).astype(np.float32)


def _kda(draw: _Draw, shape: Shape) -> Weights:
    width = shape.heads * shape.head_dim
    weights = {f"{n}_proj.weight": draw.matrix(width, shape.hidden) for n in "qkvg"}
    weights["f_proj.weight"] = draw.matrix(width, shape.hidden, gain=0.3)
    weights["b_proj.weight"] = draw.matrix(shape.heads, shape.hidden)
    for name in "qkv":
        weights[f"{name}_conv1d.weight"] = draw.normal(
            width, 1, shape.conv_width, std=0.5
        )
    weights["A_log"] = np.zeros(shape.heads, np.float32)
    weights["dt_bias"] = draw.uniform(width, *_GATE_BIAS)
    weights["o_norm.weight"] = np.ones(shape.head_dim, np.float32)
    weights["o_proj.weight"] = draw.output(shape.hidden, width, gain=2.0)
    return weights


def _mla(draw: _Draw, shape: Shape) -> Weights:
    query = shape.head_dim + shape.rope_dim
    return {
        "q_proj.weight": draw.matrix(shape.heads * query, shape.hidden, gain=2.0),
        "kv_a_proj_with_mqa.weight": draw.matrix(
            shape.latent + shape.rope_dim, shape.hidden
        ),
        "kv_a_layernorm.weight": np.ones(shape.latent, np.float32),
        "kv_b_proj.weight": draw.matrix(shape.heads * 2 * shape.head_dim, shape.latent),
        "o_proj.weight": draw.output(
            shape.hidden, shape.heads * shape.head_dim, gain=2.0
        ),
    }


def _layer(draw: _Draw, shape: Shape, index: int) -> Weights:
    attends = (index + 1) % shape.group == 0
    attention = _mla(draw, shape) if attends else _kda(draw, shape)
    weights = {f"attention.{name}": value for name, value in attention.items()}
    for name in ("gate", "up"):
        weights[f"mlp.{name}_proj.weight"] = draw.matrix(
            shape.intermediate, shape.hidden
        )
    weights["mlp.down_proj.weight"] = draw.output(shape.hidden, shape.intermediate)
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.weight"] = np.ones(shape.hidden, np.float32)
    return {f"model.layers.{index}.{name}": value for name, value in weights.items()}


def _round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, kept as float32: the engine holds the output head so."""
    bits = x.astype(np.float32).view(np.uint32)
    half = 0x7FFF + ((bits >> 16) & 1)
    return ((bits + half) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def logit_bias(tokenizer: Tokenizer) -> np.ndarray:
    """Addition to each token's logit, [vocabulary]."""
    names = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    bias = np.zeros(len(names))
    bias[[closes_string(name) for name in names]] = _CLOSING_BIAS
    bias[[is_number(name) for name in names]] = _NUMBER_BIAS
    bias[[is_blank(name) for name in names]] = _BLANK_BIAS
    bias[tokenizer.token_to_id(END_OF_TURN)] = _END_BIAS
    return bias


def model_weights(shape: Shape, bias: np.ndarray, seed: int) -> Weights:
    """Checkpoint tensors by name.

    Channel 0 of the residual stream is one in every embedding and written by no
    layer; the output head reads the logit bias from it.
    """
    draw = _Draw(seed)
    embeddings = draw.normal(len(bias), shape.hidden, std=1.0)
    embeddings[:, 0] = 1.0
    head = draw.normal(len(bias), shape.hidden, std=0.3)
    head[:, 0] = bias * _FINAL_SCALE
    weights = {
        "model.word_embeddings.weight": embeddings,
        "model.norm.weight": np.ones(shape.hidden, np.float32),
        "lm_head.weight": _round_to_bfloat16(head),
    }
    for index in range(shape.layers):
        weights |= _layer(draw, shape, index)
    return weights


def write_model(folder: Path, seed: int = 0, shape: Shape | None = None) -> None:
    """Write config, checkpoint, tokenizer and chat template into ``folder``."""
    shape = shape or Shape()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder, shape.context)
    end_id = tokenizer.token_to_id(END_OF_TURN)
    bias = logit_bias(tokenizer)
    save_file(
        model_weights(shape, bias, seed),
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    # Last: its presence says that the folder is complete.
    config = model_config(shape, len(bias), end_id)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
