"""An independent float64 model of the tiny hybrid checkpoint.

Written from the definition of the layers, token by token, without a cache that could
be wrong: a sequence is always read from its first token on. ``Reader`` keeps the
recurrent states and keys of one sequence, so that continuing it costs no second pass.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


class HybridModel:
    """The checkpoint in float64."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: x.astype(np.float64) for name, x in tensors.items()}

    def layer(self, index: int) -> dict[str, Array]:
        prefix = f"model.layers.{index}."
        return {
            name.removeprefix(prefix): x
            for name, x in self.weights.items()
            if name.startswith(prefix)
        }


class Kda:
    """One KDA layer reading one sequence."""

    def __init__(self, weights: dict[str, Array], config: dict[str, object]) -> None:
        self.w = weights
        self.heads = config["num_attention_heads"]
        self.width = config["head_dim"]
        self.lower_bound = config["kda_lower_bound"]
        size = self.heads * self.width
        self.windows = {name: np.zeros((3, size)) for name in "qkv"}
        self.state = np.zeros((self.heads, self.width, self.width))  # [H, V, K]

    def _convolved(self, name: str, x: Array) -> Array:
        inputs = np.vstack((self.windows[name], self.w[f"{name}_proj.weight"] @ x))
        self.windows[name] = inputs[1:]
        taps = self.w[f"{name}_conv1d.weight"][:, 0].T
        return silu((inputs * taps).sum(0)).reshape(self.heads, self.width)

    def step(self, x: Array) -> Array:
        q, k, v = (self._convolved(name, x) for name in "qkv")
        q, k = unit(q) * self.width**-0.5, unit(k)
        raw = (self.w["f_proj.weight"] @ x + self.w["dt_bias"]).reshape(q.shape)
        rate = np.exp(self.w["A_log"])[:, None]
        decay = np.exp(self.lower_bound * sigmoid(rate * raw))
        beta = sigmoid(self.w["b_proj.weight"] @ x)[:, None]
        self.state = self.state * decay[:, None, :]
        error = beta * (v - np.einsum("hvk,hk->hv", self.state, k))
        self.state = self.state + error[:, :, None] * k[:, None, :]
        out = np.einsum("hvk,hk->hv", self.state, q)
        gate = sigmoid(self.w["g_proj.weight"] @ x).reshape(out.shape)
        out = rms_norm(out, self.w["o_norm.weight"], 1e-6) * gate
        return self.w["o_proj.weight"] @ out.ravel()


class Mla:
    """One MLA layer reading one sequence."""

    def __init__(self, weights: dict[str, Array], config: dict[str, object]) -> None:
        self.w = weights
        self.config = config
        self.heads = config["num_attention_heads"]
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def _rotated(self, x: Array, place: int) -> Array:
        """Rotary embedding of interleaved pairs; ``x`` [..., rope]."""
        exponent = np.arange(0, self.rope, 2) / self.rope
        angle = place * self.config["rope_theta"] ** -exponent
        even, odd = x[..., 0::2], x[..., 1::2]
        pairs = (
            even * np.cos(angle) - odd * np.sin(angle),
            even * np.sin(angle) + odd * np.cos(angle),
        )
        return np.stack(pairs, axis=-1).reshape(x.shape)

    def step(self, x: Array) -> Array:
        place = len(self.keys)
        q = (self.w["q_proj.weight"] @ x).reshape(self.heads, -1)
        q[:, self.nope :] = self._rotated(q[:, self.nope :], place)
        down = self.w["kv_a_proj_with_mqa.weight"] @ x
        latent = rms_norm(down[: -self.rope], self.w["kv_a_layernorm.weight"], 1e-6)
        up = (self.w["kv_b_proj.weight"] @ latent).reshape(self.heads, -1)
        shared = np.tile(self._rotated(down[-self.rope :], place), (self.heads, 1))
        self.keys.append(np.hstack((up[:, : self.nope], shared)))
        self.values.append(up[:, self.nope :])
        scores = np.einsum("hd,thd->ht", q, np.stack(self.keys))
        scores = scores * (self.nope + self.rope) ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("ht,thd->hd", weights, np.stack(self.values))
        return self.w["o_proj.weight"] @ out.ravel()


class Reader:
    """Reads one sequence and says what comes next."""

    def __init__(self, model: HybridModel) -> None:
        self.model = model
        config = model.config
        self.layers = []
        for index in range(config["num_hidden_layers"]):
            weights = model.layer(index)
            own = {
                name.removeprefix("attention."): x
                for name, x in weights.items()
                if name.startswith("attention.")
            }
            kind = Mla if (index + 1) % config["layer_group_size"] == 0 else Kda
            self.layers.append((kind(own, config), weights))
        self.log_probabilities = np.zeros(0)

    def read(self, token: int) -> None:
        """Read one token; ``log_probabilities`` then belong to the next one."""
        eps = self.model.config["rms_norm_eps"]
        weights = self.model.weights
        x = weights["model.word_embeddings.weight"][token]
        for attention, w in self.layers:
            x = x + attention.step(rms_norm(x, w["input_layernorm.weight"], eps))
            y = rms_norm(x, w["post_attention_layernorm.weight"], eps)
            up = silu(w["mlp.gate_proj.weight"] @ y) * (w["mlp.up_proj.weight"] @ y)
            x = x + w["mlp.down_proj.weight"] @ up
        x = rms_norm(x, weights["model.norm.weight"], eps)
        logits = weights["lm_head.weight"] @ x
        self.log_probabilities = logits - np.logaddexp.reduce(logits)

    def generate(self, count: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and their log-probabilities; the last is not read."""
        ids: list[int] = []
        values: list[float] = []
        for _ in range(count):
            if ids:
                self.read(ids[-1])
            best = int(self.log_probabilities.argmax())
            ids.append(best)
            values.append(float(self.log_probabilities[best]))
        return ids, values
