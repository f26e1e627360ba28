"""Kimi Delta Attention in plain torch: chunked prefill and single-token decode.

Recurrence per head, with state S [V, K], key k, value v, query q, log gate g [K]
and beta (a scalar)::

    S  <- S * exp(g)                       (each key channel decays by itself)
    S  <- S + beta * (v - S k) k^T
    o   = S q * scale

Prefill uses the chunkwise form of the delta rule: inside a chunk the updates are
the solution of a unit lower triangular system, so only one small step per chunk
is sequential. Decay factors are formed as exp of differences that are never
positive, so that strong gates cannot overflow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

#: Tokens between two states that prefix caching may ask for.
STATE_CHUNK = 64
#: Tokens of one triangular solve; must divide STATE_CHUNK.
SOLVE_CHUNK = 16
#: Upper bound on the tokens whose pairwise decays are held at once.
SPAN = 512

_L2_EPS = 1e-6


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., K] divided by its Euclidean norm along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def log_gate(
    raw: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """Log decay per key channel, never positive.

    ``raw`` [..., H, K], ``a_log`` H elements, ``dt_bias`` H*K elements. With a
    ``lower_bound`` (the safe gate, a negative number) the result stays above it.
    """
    heads, width = raw.shape[-2:]
    rate = a_log.float().reshape(heads, 1).exp()
    x = raw.float() + dt_bias.float().reshape(heads, width)
    if lower_bound is None:
        return -rate * F.softplus(x)
    return lower_bound * torch.sigmoid(rate * x)


@dataclass(frozen=True)
class Sequence:
    """Inputs of one sequence, float32, heads first.

    ``q`` (scaled) and ``k`` [H, T, K], ``v`` [H, T, V], ``g`` (log decay)
    [H, T, K], ``beta`` [H, T].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @property
    def length(self) -> int:
        return self.q.shape[1]

    def spans(self) -> Iterator["Sequence"]:
        """Pieces of at most SPAN tokens."""
        for start in range(0, self.length, SPAN):
            part = slice(start, start + SPAN)
            yield Sequence(
                *(x[:, part] for x in (self.q, self.k, self.v, self.g, self.beta))
            )

    def chunks(self) -> "Sequence":
        """The same with time split in chunks: [H, N, C, ...], zero padded.

        A padded token has k, v, beta and g zero: it changes no state.
        """
        missing = -self.length % SOLVE_CHUNK

        def split(x: torch.Tensor) -> torch.Tensor:
            pad = (0, 0) * (x.dim() - 2) + (0, missing)
            return F.pad(x, pad).unflatten(1, (-1, SOLVE_CHUNK))

        return Sequence(*map(split, (self.q, self.k, self.v, self.g, self.beta)))


def _intra_chunk(
    part: Sequence, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Interaction of the tokens inside each chunk.

    ``decay`` is the cumulated log gate [H, N, C, K]. Returns ``kk`` and ``qk``
    [H, N, C, C]: for token i and an earlier j the inner product of k_i (q_i)
    with k_j decayed from j to i; ``qk`` includes j = i, ``kk`` does not.
    """
    size = decay.shape[2]
    between = decay.unsqueeze(3) - decay.unsqueeze(2)  # [H, N, i, j, K]
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    between.masked_fill_(later[:, :, None], float("-inf"))
    carried = between.exp_().mul_(part.k.unsqueeze(2))
    pair = torch.stack((part.k, part.q), dim=-1)  # [H, N, i, K, 2]
    kk, qk = (carried @ pair).unbind(-1)
    return kk.tril(-1), qk


def _run_span(
    part: Sequence, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One span from ``state`` [H, V, K].

    Returns the output [H, T, V], the state before every chunk [N, H, V, K] and
    the state after the span.
    """
    length = part.length
    part = part.chunks()
    decay = part.g.cumsum(2)
    grown = decay.exp()
    kk, qk = _intra_chunk(part, decay)

    beta = part.beta.unsqueeze(-1)
    system = kk * beta + torch.eye(SOLVE_CHUNK, dtype=kk.dtype, device=kk.device)
    sources = torch.cat((part.k * grown, part.v), dim=-1) * beta
    solved = torch.linalg.solve_triangular(
        system, sources, upper=False, unitriangular=True
    )
    width = part.k.shape[-1]
    from_state, from_values = solved[..., :width], solved[..., width:]
    to_end = part.k * (decay[:, :, -1:] - decay).exp()
    end_decay = grown[:, :, -1:]

    before, updates = [], []
    for n in range(decay.shape[1]):
        before.append(state)
        update = torch.baddbmm(
            from_values[:, n], from_state[:, n], state.transpose(1, 2), alpha=-1
        )
        updates.append(update)
        state = torch.baddbmm(
            state * end_decay[:, n], update.transpose(1, 2), to_end[:, n]
        )
    states = torch.stack(before, dim=1)  # [H, N, V, K]
    out = (part.q * grown) @ states.transpose(2, 3) + qk @ torch.stack(updates, dim=1)
    return out.flatten(1, 2)[:, :length], states.transpose(0, 1), state


def run_sequence(
    seq: Sequence, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A whole sequence from ``state`` [H, V, K].

    Returns the output [H, T, V], the state before every STATE_CHUNK tokens
    [ceil(T / STATE_CHUNK), H, V, K] and the final state.
    """
    outputs, states = [], []
    for part in seq.spans():
        out, before, state = _run_span(part, state)
        outputs.append(out)
        states.append(before[:: STATE_CHUNK // SOLVE_CHUNK])
    return torch.cat(outputs, dim=1), torch.cat(states), state


def _expand_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the query or key heads (axis -2) of ``x`` to match the value heads."""
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    track_state: torch.Tensor | None = None,
    track_chunk_idx: torch.Tensor | None = None,
    beta_is_raw: bool = False,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Prefill of sequences packed along the token axis.

    ``q``, ``k`` [1, T, H, K], ``v`` [1, T, HV, V], ``g`` [1, T, HV, K],
    ``beta`` [1, T, HV]. ``initial_state`` is the state pool
    [slots, HV, V, K], read and updated in place at ``initial_state_indices``
    (a negative index starts from zero and stores nothing). ``track_state[i]``
    receives the state of sequence i before its chunk ``track_chunk_idx[i]``
    (-1: none). Returns the output [1, T, HV, V], with
    ``output_intermediate_states`` also the states before every chunk
    [1, chunks, HV, V, K]. The two chunk tables serve other kernels only.
    """
    del chunk_indices, chunk_offsets
    if initial_state is None or initial_state_indices is None or cu_seqlens is None:
        raise NotImplementedError("packed sequences with a state pool are expected")
    heads, value_width = v.shape[2:]
    qf, kf = (_expand_heads(x[0].float(), heads) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        qf, kf = l2_normalize(qf), l2_normalize(kf)
    gate = g[0].float()
    if A_log is not None and dt_bias is not None:
        gate = log_gate(gate, A_log, dt_bias, lower_bound)
    weight = beta[0].float().sigmoid() if beta_is_raw else beta[0].float()
    scaled = qf * (k.shape[-1] ** -0.5 if scale is None else scale)
    whole = Sequence(
        *(x.transpose(0, 1) for x in (scaled, kf, v[0].float(), gate, weight))
    )

    out = torch.empty_like(v)
    intermediate = []
    bounds = cu_seqlens.tolist()
    slots = initial_state_indices.tolist()
    tracked = [-1] * len(slots) if track_chunk_idx is None else track_chunk_idx.tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        seq = Sequence(
            *(x[:, start:end] for x in (whole.q, whole.k, whole.v, whole.g, whole.beta))
        )
        slot = slots[i]
        shape = (heads, value_width, kf.shape[-1])
        first = initial_state[slot].float() if slot >= 0 else qf.new_zeros(shape)
        result, states, last = run_sequence(seq, first)
        out[0, start:end] = result.transpose(0, 1).to(out.dtype)
        if slot >= 0:
            initial_state[slot] = last.to(initial_state.dtype)
        if track_state is not None and tracked[i] >= 0:
            track_state[i] = states[tracked[i]].to(track_state.dtype)
        intermediate.append(states)
    if output_intermediate_states:
        return out, torch.cat(intermediate).unsqueeze(0)
    return out


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """One token for each of B requests; the pool is updated in place.

    ``q`` (scaled), ``k`` [B, H, K], ``v`` [B, H, V], ``g`` log decay [B, H, K],
    ``beta`` [B, H], ``pool`` [slots, H, V, K]. Rows with a negative slot give
    zero and touch no state. Returns [B, H, V].
    """
    live = slots >= 0
    rows = slots.clamp(min=0).long()
    state = pool[rows].float() * g.exp().unsqueeze(2)
    error = v - (state @ k.unsqueeze(-1)).squeeze(-1)
    state += (error * beta.unsqueeze(-1)).unsqueeze(-1) * k.unsqueeze(2)
    out = (state @ q.unsqueeze(-1)).squeeze(-1)
    if bool(live.all()):
        pool[rows] = state.to(pool.dtype)
        return out
    pool[rows[live]] = state[live].to(pool.dtype)
    return out * live[:, None, None]


def packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode from the packed convolution output.

    ``mixed_qkv`` [B, 2*H*K + HV*V], ``a`` [B, HV*K], ``b`` [B, HV] (raw beta),
    ``initial_state`` the pool [slots, HV, V, K], ``out`` [B, 1, HV, V] (filled).
    """
    heads, value_width, key_width = initial_state.shape[1:]
    q_size = (mixed_qkv.shape[1] - heads * value_width) // 2
    q, k, v = mixed_qkv.float().split([q_size, q_size, heads * value_width], dim=-1)
    q, k = (_expand_heads(x.unflatten(-1, (-1, key_width)), heads) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalize(q), l2_normalize(k)
    result = step(
        q * scale,
        k,
        v.unflatten(-1, (heads, value_width)),
        log_gate(a.unflatten(-1, (heads, key_width)), A_log, dt_bias, lower_bound),
        b.float().sigmoid(),
        initial_state,
        ssm_state_indices,
    )
    out[:, 0] = result.to(out.dtype)
    return out, initial_state


def gated_decode(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    **unsupported: object,
) -> torch.Tensor:
    """Decode from separate q, k [1, B, H, K] and v [1, B, HV, V].

    Serves one token per sequence of a KDA layer; speculative verification and
    the GDN gate are not offered on this platform. Returns [1, B, HV, V].
    """
    del softplus_beta, softplus_threshold, cu_seqlens
    given = [name for name, value in unsupported.items() if value not in (None, False)]
    if not is_kda or given or v.shape[1] != initial_state_indices.shape[0]:
        raise NotImplementedError(
            f"only plain KDA decode runs on this platform (got {given or 'other'})"
        )
    batch, heads = v.shape[1:3]
    width = k.shape[-1]
    qf, kf = (_expand_heads(x[0].float(), heads) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        qf, kf = l2_normalize(qf), l2_normalize(kf)
    result = step(
        qf * (width**-0.5 if scale is None else scale),
        kf,
        v[0].float(),
        log_gate(a.reshape(batch, heads, width), A_log, dt_bias, lower_bound),
        b.float().reshape(batch, heads).sigmoid(),
        initial_state_source,
        initial_state_indices,
    )
    return result.unsqueeze(0).to(v.dtype)
