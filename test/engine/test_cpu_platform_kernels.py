"""The torch kernels against independent float64 models of what they compute."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

Load = Callable[[str], ModuleType]

QUICK = settings(max_examples=20, deadline=None)
SEEDS = st.integers(0, 2**31)
LOWER_BOUNDS = st.sampled_from([None, -5.0, -0.5])
# Lengths around the solve chunk (16), the state chunk (64) and beyond.
LENGTHS = st.lists(
    st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 130]), min_size=1, max_size=3
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Case:
    """Raw inputs of KDA: q, k, v, g [T, H, *], beta [T, H], and parameters."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


def draw(seed: int, length: int, heads: int = 2, key: int = 8, value: int = 6) -> Case:
    rng = torch.Generator().manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, generator=rng) * scale

    return Case(
        q=normal(length, heads, key),
        k=normal(length, heads, key),
        v=normal(length, heads, value),
        g=normal(length, heads, key, scale=8.0),  # some gates shut, some open
        beta=normal(length, heads, scale=2.0),
        a_log=normal(heads),
        dt_bias=normal(heads * key, scale=2.0),
    )


def expected_gate(case: Case, lower_bound: float | None) -> torch.Tensor:
    heads, width = case.g.shape[1:]
    rate = case.a_log.double().exp()[:, None]
    x = case.g.double() + case.dt_bias.double().reshape(heads, width)
    if lower_bound is None:
        return -rate * torch.log1p(torch.exp(-x.abs())) - rate * x.clamp(min=0)
    return lower_bound / (1 + torch.exp(-rate * x))


def recurrence(
    case: Case, state: torch.Tensor, lower_bound: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, V] and states after every token [T + 1, H, V, K], float64."""
    state = state.double()
    gate = expected_gate(case, lower_bound)
    states, out = [state], []
    for t in range(case.q.shape[0]):
        q, k, v = (x[t].double() for x in (case.q, case.k, case.v))
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * q.shape[-1] ** -0.5
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        beta = torch.sigmoid(case.beta[t].double())
        state = state * gate[t].exp()[:, None, :]
        error = v - torch.einsum("hvk,hk->hv", state, k)
        state = state + torch.einsum("h,hv,hk->hvk", beta, error, k)
        out.append(torch.einsum("hvk,hk->hv", state, q))
        states.append(state)
    return torch.stack(out), torch.stack(states)


def starts_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def prefill(
    kda: ModuleType,
    case: Case,
    pool: torch.Tensor,
    slots: list[int],
    lengths: list[int],
    lower_bound: float | None,
    **extra: Any,
) -> Any:
    return kda.chunk_kda(
        q=case.q[None],
        k=case.k[None],
        v=case.v[None],
        g=case.g[None],
        beta=case.beta[None],
        initial_state=pool,
        initial_state_indices=torch.tensor(slots, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor(starts_of(lengths), dtype=torch.int32),
        A_log=case.a_log.reshape(1, 1, -1, 1),
        dt_bias=case.dt_bias,
        lower_bound=lower_bound,
        beta_is_raw=True,
        **extra,
    )


def part(case: Case, start: int, end: int) -> Case:
    cut = (x[start:end] for x in (case.q, case.k, case.v, case.g, case.beta))
    return Case(*cut, case.a_log, case.dt_bias)


def close(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        actual.double(), wanted.double(), rtol=tolerance, atol=tolerance
    )


@QUICK
@given(lengths=LENGTHS, seed=SEEDS, lower_bound=LOWER_BOUNDS)
def test_packed_prefill_equals_the_recurrence(
    cpu_module: Load, lengths: list[int], seed: int, lower_bound: float | None
) -> None:
    kda = cpu_module("kda")
    case = draw(seed, sum(lengths))
    pool = torch.randn(8, 2, 6, 8, generator=torch.Generator().manual_seed(seed))
    before = pool.clone()
    slots = [5, 2, 7][: len(lengths)]
    out, states = prefill(
        kda,
        case,
        pool,
        slots,
        lengths,
        lower_bound,
        output_intermediate_states=True,
    )
    starts, chunks = starts_of(lengths), 0
    for i, slot in enumerate(slots):
        own = part(case, starts[i], starts[i + 1])
        wanted, history = recurrence(own, before[slot], lower_bound)
        close(out[0, starts[i] : starts[i + 1]], wanted)
        close(pool[slot], history[-1])
        every_64 = history[:-1:64]
        close(states[0, chunks : chunks + len(every_64)], every_64)
        chunks += len(every_64)
    untouched = [s for s in range(8) if s not in slots]
    assert torch.equal(pool[untouched], before[untouched])
    assert states.shape[1] == chunks


@QUICK
@given(length=st.integers(2, 140), share=st.floats(0, 1), seed=SEEDS)
def test_a_resumed_prefill_equals_one_in_a_single_piece(
    cpu_module: Load, length: int, share: float, seed: int
) -> None:
    kda = cpu_module("kda")
    case = draw(seed, length)
    cut = 1 + int(share * (length - 2))
    whole, pieces = torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 6, 8)
    wanted = prefill(kda, case, whole, [0], [length], -5.0)
    first = prefill(kda, part(case, 0, cut), pieces, [0], [cut], -5.0)
    second = prefill(kda, part(case, cut, length), pieces, [0], [length - cut], -5.0)
    close(torch.cat((first, second), dim=1), wanted)
    close(pieces, whole)


def test_a_tracked_chunk_gets_the_state_before_it(cpu_module: Load) -> None:
    kda = cpu_module("kda")
    lengths = [130, 70, 10]
    case = draw(3, sum(lengths))
    pool = torch.zeros(3, 2, 6, 8)
    track = torch.full((3, 2, 6, 8), 7.0)
    prefill(
        kda,
        case,
        pool,
        [0, 1, 2],
        lengths,
        None,
        track_state=track,
        track_chunk_idx=torch.tensor([2, 1, -1], dtype=torch.int32),
    )
    zero = torch.zeros(2, 6, 8)
    close(track[0], recurrence(part(case, 0, 130), zero, None)[1][128])
    close(track[1], recurrence(part(case, 130, 200), zero, None)[1][64])
    assert torch.equal(track[2], torch.full((2, 6, 8), 7.0))


def test_a_span_longer_than_the_working_set_changes_nothing(
    cpu_module: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    kda = cpu_module("kda")
    case = draw(4, 300)
    one, many = torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 6, 8)
    wanted = prefill(kda, case, one, [0], [300], -5.0)
    monkeypatch.setattr(kda, "SPAN", 128)
    close(prefill(kda, case, many, [0], [300], -5.0), wanted)
    close(many, one)


@QUICK
@given(batch=st.integers(1, 5), seed=SEEDS, lower_bound=LOWER_BOUNDS)
def test_both_decode_forms_equal_one_step_of_the_recurrence(
    cpu_module: Load, batch: int, seed: int, lower_bound: float | None
) -> None:
    kda = cpu_module("kda")
    case = draw(seed, batch)
    start = torch.randn(9, 2, 6, 8, generator=torch.Generator().manual_seed(seed))
    slots = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:batch]
    packed_pool, plain_pool = start.clone(), start.clone()
    packed = torch.empty(batch, 1, 2, 6)
    kda.packed_decode(
        mixed_qkv=torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], dim=1),
        a=case.g.flatten(1),
        b=case.beta,
        A_log=case.a_log,
        dt_bias=case.dt_bias,
        scale=8**-0.5,
        initial_state=packed_pool,
        out=packed,
        ssm_state_indices=slots.int(),
        use_qk_l2norm_in_kernel=True,
        lower_bound=lower_bound,
    )
    plain = kda.gated_decode(
        A_log=case.a_log.reshape(1, 1, -1, 1),
        a=case.g.flatten(1),
        dt_bias=case.dt_bias,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=case.q[None],
        k=case.k[None],
        v=case.v[None],
        b=case.beta[None],
        initial_state_source=plain_pool,
        initial_state_indices=slots.int(),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(batch + 1),
        is_kda=True,
        lower_bound=lower_bound,
    )
    for row, slot in enumerate(slots.tolist()):
        own = part(case, row, row + 1)
        wanted, states = recurrence(own, start[slot], lower_bound)
        close(packed[row], wanted)
        close(plain[0, row : row + 1], wanted)
        close(packed_pool[slot], states[-1])
    assert torch.equal(packed_pool, plain_pool)


def test_a_padded_row_gives_zero_and_keeps_the_pool(cpu_module: Load) -> None:
    kda = cpu_module("kda")
    case = draw(5, 2)
    pool = torch.randn(3, 2, 6, 8, generator=torch.Generator().manual_seed(5))
    before = pool.clone()
    out = kda.step(
        case.q,
        case.k,
        case.v,
        -case.g.abs(),
        case.beta.sigmoid(),
        pool,
        torch.tensor([1, -1]),
    )
    assert torch.equal(out[1], torch.zeros(2, 6))
    assert not torch.equal(pool[1], before[1])
    assert torch.equal(pool[[0, 2]], before[[0, 2]])


def test_speculative_verification_is_refused(cpu_module: Load) -> None:
    case = draw(6, 1)
    with pytest.raises(NotImplementedError, match="disable_state_update"):
        cpu_module("kda").gated_decode(
            case.a_log,
            case.g,
            case.dt_bias,
            1.0,
            20.0,
            case.q[None],
            case.k[None],
            case.v[None],
            case.beta,
            torch.zeros(1, 2, 6, 8),
            torch.tensor([0]),
            is_kda=True,
            disable_state_update=True,
        )


@QUICK
@given(lengths=LENGTHS, seed=SEEDS, biased=st.booleans())
def test_convolution_equals_torchs_and_resumes_where_told(
    cpu_module: Load, lengths: list[int], seed: int, biased: bool
) -> None:
    conv = cpu_module("causal_conv")
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), 6, generator=rng)
    weight = torch.randn(6, 4, generator=rng)
    bias = torch.randn(6, generator=rng) if biased else None
    states = torch.randn(5, 3, 6, generator=rng)
    before = states.clone()
    resumed = [i % 2 == 0 for i in range(len(lengths))]
    slots = [4, 0, 2][: len(lengths)]
    out = conv.causal_conv1d_fn(
        x.t(),
        weight,
        bias,
        conv_states=states.transpose(1, 2),
        query_start_loc=torch.tensor(starts_of(lengths)),
        seq_lens_cpu=lengths,
        cache_indices=torch.tensor(slots),
        has_initial_state=torch.tensor(resumed),
    )
    starts = starts_of(lengths)
    for i, slot in enumerate(slots):
        own = x[starts[i] : starts[i + 1]]
        window = before[slot] if resumed[i] else torch.zeros(3, 6)
        padded = torch.cat((window, own)).double()
        wanted = F.conv1d(
            padded.t()[None],
            weight.double()[:, None],
            None if bias is None else bias.double(),
            groups=6,
        )[0]
        close(out[:, starts[i] : starts[i + 1]], F.silu(wanted))
        close(states[slot], padded[-3:])


@QUICK
@given(steps=st.integers(1, 6), seed=SEEDS)
def test_convolution_steps_equal_a_prefill(
    cpu_module: Load, steps: int, seed: int
) -> None:
    conv = cpu_module("causal_conv")
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, steps, 6, generator=rng)
    weight = torch.randn(6, 4, generator=rng)
    stepped, whole = torch.zeros(2, 4, 3, 6)
    slots = torch.tensor([3, 1])
    wanted = conv.causal_conv1d_fn(
        x.flatten(0, 1).t(),
        weight,
        None,
        conv_states=whole.transpose(1, 2),
        query_start_loc=torch.tensor([0, steps, 2 * steps]),
        seq_lens_cpu=[steps, steps],
        cache_indices=slots,
    )
    outs = [
        conv.causal_conv1d_update(
            x[:, t],
            stepped.transpose(1, 2),
            weight,
            activation="silu",
            conv_state_indices=slots,
        )
        for t in range(steps)
    ]
    close(torch.stack(outs, dim=1).flatten(0, 1).t(), wanted)
    close(stepped, whole)


def test_a_padded_convolution_row_keeps_its_window(cpu_module: Load) -> None:
    conv = cpu_module("causal_conv")
    states = torch.ones(2, 6, 3)
    out = conv.causal_conv1d_update(
        torch.ones(2, 6),
        states,
        torch.ones(6, 4),
        conv_state_indices=torch.tensor([-1, 1]),
    )
    assert torch.equal(out, torch.tensor([[0.0] * 6, [4.0] * 6]))
    assert torch.equal(states[0], torch.ones(6, 3))


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_gated_norm(cpu_module: Load, activation: str) -> None:
    x, g = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.linspace(0.5, 2.0, 8)
    norm = cpu_module("gated_norm").rms_norm_gated
    actual = norm(x, g, weight, None, activation=activation, eps=1e-5)
    xd, gd = x.double(), g.double()
    gate = 1 / (1 + torch.exp(-gd))
    if activation != "sigmoid":
        gate = gate * gd
    wanted = xd / (xd.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight * gate
    close(actual, wanted)


@pytest.mark.parametrize("layers", [None, 3])
def test_tracking_copies_only_masked_rows(cpu_module: Load, layers: int | None) -> None:
    tracking = cpu_module("state_tracking")
    lead = () if layers is None else (layers,)
    slot_axis = len(lead)
    conv = torch.randn(*lead, 6, 3, 4, generator=torch.Generator().manual_seed(1))
    ssm = torch.randn(*lead, 6, 2, 4, 4, generator=torch.Generator().manual_seed(2))
    wanted = [x.clone() for x in (conv, ssm)]
    for x in wanted:
        x.select(slot_axis, 5).copy_(x.select(slot_axis, 1))
    track = (
        tracking.track_mamba_states_if_needed
        if layers is None
        else tracking.track_mamba_states_all_layers
    )
    track(
        conv,
        ssm,
        torch.tensor([0, 1, 2, -1]),
        torch.tensor([False, True, False, True]),
        torch.tensor([3, 5, 4, 4]),
        4,
    )
    assert torch.equal(conv, wanted[0])
    assert torch.equal(ssm, wanted[1])


@QUICK
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=3
    ),
    window=st.sampled_from([None, 3]),
    groups=st.sampled_from([1, 2]),
    seed=SEEDS,
)
def test_prefill_attention_equals_a_masked_softmax(
    cpu_module: Load,
    requests: list[tuple[int, int]],
    window: int | None,
    groups: int,
    seed: int,
) -> None:
    attention = cpu_module("attention")
    rng = torch.Generator().manual_seed(seed)
    heads = 2
    table = torch.randperm(100, generator=rng)[:99].reshape(3, 33)
    keys = torch.randn(100, heads, 8, generator=rng)
    values = torch.randn(100, heads, 6, generator=rng)
    total = sum(count for _, count in requests)
    query = torch.randn(total, heads * groups, 8, generator=rng)
    out = torch.empty(total, heads * groups, 6)
    prefixes, counts = zip(*requests, strict=True)
    attention.run_extend(
        None,
        query,
        out,
        keys,
        values,
        table,
        torch.arange(len(requests)),
        torch.tensor([p + c for p, c in requests]),
        torch.tensor(prefixes),
        torch.tensor(counts),
        scaling=0.3,
        enable_gqa=groups > 1,
        causal=True,
        sliding_window_size=window,
    )
    done = 0
    for row, (prefix, count) in enumerate(requests):
        slots = table[row, : prefix + count]
        k = keys[slots].double().repeat_interleave(groups, dim=1)
        v = values[slots].double().repeat_interleave(groups, dim=1)
        for i in range(count):
            place = prefix + i
            first = 0 if window is None else max(0, place - window)
            scores = torch.einsum("hd,thd->ht", query[done].double(), k) * 0.3
            weights = scores[:, first : place + 1].softmax(-1)
            close(out[done], torch.einsum("ht,thd->hd", weights, v[first : place + 1]))
            done += 1


def test_long_prefills_are_cut_in_blocks(
    cpu_module: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = cpu_module("attention")
    rng = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(20, 2, 4, generator=rng) for _ in range(3))

    def run() -> torch.Tensor:
        out = torch.empty(20, 2, 4)
        return attention.run_extend(
            None,
            query,
            out,
            keys,
            values,
            torch.arange(20)[None],
            torch.tensor([0]),
            torch.tensor([20]),
            torch.tensor([0]),
            torch.tensor([20]),
            causal=True,
        )

    wanted = run()
    monkeypatch.setattr(attention, "QUERY_BLOCK", 7)
    close(run(), wanted)
