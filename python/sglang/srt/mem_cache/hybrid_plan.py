"""A plan for the hybrid cache of a deployment: numbers, advice and flags.

Pure arithmetic over :mod:`hybrid_capacity`; ``sglang.plan_hybrid_cache`` is its
command line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.hybrid_capacity import (
    DEFAULT_RATIO,
    MOST_STATE,
    Capacity,
    CapacityError,
    PoolSizes,
    UnitCosts,
    aggregate_concurrency,
    balanced_capacity,
    capacity_at,
    deployed_ratio,
    ratio_for_concurrency,
    request_limit,
    size_pools,
)

_EMPTY = PoolSizes(kv_tokens=0, state_slots=0)

# From here on a cap of one state per path visibly costs reuse.
_MANY_FORKS = 0.05

# A mean over fewer trajectories says little about the next batch.
_FEW_TRAJECTORIES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the plan is for.

    mean_final_context: L_kv of equation 2, tokens at the last turn.
    forked_share: share of trajectories that branch off from an earlier turn.
    states_per_path: states a path should keep to serve those, None if not known.
    """

    mean_final_context: float
    name: str = "given on the command line"
    trajectories: int | None = None
    p90_final_context: float | None = None
    forked_share: float = 0.0
    states_per_path: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that a plan depends on; ``budget`` is bytes for both pools of a rank."""

    costs: UnitCosts
    workload: Workload
    budget: int
    workers: int = 1
    dp_ranks: int = 1
    target_concurrency: int | None = None
    max_states_per_path: int = 1
    unified_memory: bool = False
    radix_cache: bool = True
    request_cap_per_rank: int | None = None
    context_length: int | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """What one ratio makes of the budget."""

    ratio: float
    continuous: Capacity
    pools: PoolSizes
    safe_concurrency: int
    max_running_requests: int


@dataclass(slots=True)
class Plan:
    """The recommended split beside the default one, per rank, and the advice."""

    question: Question
    recommended: Split
    default: Split
    warnings: list[str] = field(default_factory=list)

    @property
    def reference_concurrency(self) -> int:
        """Whole trajectories one worker keeps, over its DP ranks."""
        return self.recommended.safe_concurrency * self.question.dp_ranks

    @property
    def reference_concurrency_continuous(self) -> float:
        """The same before slots, pages and the padding slot (equation 4 or 7)."""
        return self._continuous_per_rank * self.question.dp_ranks

    @property
    def aggregate_reference_concurrency(self) -> int:
        """Equation 8 over the workers."""
        return aggregate_concurrency(self.reference_concurrency, self.question.workers)

    @property
    def concurrency_at_p90(self) -> int | None:
        """The same if every trajectory were as long as the 90th percentile."""
        context = self.question.workload.p90_final_context
        if context is None:
            return None
        safe = self.recommended.pools.safe_concurrency(self.question.costs, context)
        return safe * self.question.dp_ranks

    @property
    def kv_tokens_per_trajectory(self) -> float:
        """KV tokens left for each trajectory at the wanted concurrency."""
        wanted = self.question.target_concurrency or self._continuous_per_rank
        context = self.question.workload.mean_final_context
        return self.recommended.continuous.kv * context / wanted

    @property
    def flags(self) -> list[str]:
        """Launch flags to paste."""
        question = self.question
        cap = question.max_states_per_path
        flags = ["--mamba-full-memory-ratio", f"{self.recommended.ratio:g}"]
        if question.radix_cache:
            flags += ["--mamba-max-states-per-path", str(cap)]
        if question.unified_memory:
            flags += ["--enable-unified-memory"]
        return flags

    @property
    def _continuous_per_rank(self) -> float:
        return self.recommended.continuous.joint


def make_plan(question: Question) -> Plan:
    """Answer ``question``.

    Raises:
        CapacityError: for quantities that no plan can be made of.
    """
    plan = Plan(
        question,
        recommended=_split(question, _recommended_ratio(question)),
        default=_split(question, DEFAULT_RATIO),
    )
    plan.warnings += [
        *_capacity_warnings(plan),
        *_target_warnings(plan),
        *_workload_warnings(question),
        *_speculation_warnings(plan),
        *_mode_warnings(question),
    ]
    return plan


def _recommended_ratio(question: Question) -> float:
    target = question.target_concurrency
    context = question.workload.mean_final_context
    if target is None:
        return deployed_ratio(question.budget, question.costs, context)
    ratio = ratio_for_concurrency(question.budget, question.costs, target)
    return float(f"{ratio:.6g}")


def _split(question: Question, ratio: float) -> Split:
    costs, context = question.costs, question.workload.mean_final_context
    continuous = capacity_at(question.budget, ratio, costs, context)
    try:
        pools = size_pools(question.budget, ratio, costs)
    except CapacityError:
        pools = _EMPTY
    safe = pools.safe_concurrency(costs, context)
    if question.unified_memory:
        continuous, safe = _shared(question, pools)
    return Split(ratio, continuous, pools, safe, _running(question, pools))


def _shared(question: Question, pools: PoolSizes) -> tuple[Capacity, int]:
    """One buffer for both: equation 7, but the slots still limit requests."""
    costs, context = question.costs, question.workload.mean_final_context
    shared = balanced_capacity(question.budget, costs, context)
    safe = min(math.floor(shared), pools.request_limit(costs))
    return Capacity(kv=shared, state=shared), safe


def _running(question: Question, pools: PoolSizes) -> int:
    return request_limit(
        pools,
        question.costs,
        context_length=question.context_length,
        requested=question.request_cap_per_rank,
    )


# --------------------------------------------------------------------------
# Advice: one sentence each
# --------------------------------------------------------------------------


def _capacity_warnings(plan: Plan) -> list[str]:
    question, split = plan.question, plan.recommended
    costs, warnings = question.costs, []
    if split.pools.state_slots < costs.state_slots_per_request:
        warnings.append(
            f"ratio {split.ratio:g} leaves {split.pools.state_slots} state slots, less "
            f"than the {costs.state_slots_per_request} of one request: "
            + _least_ratio_advice(question)
        )
    elif split.safe_concurrency == 0:
        context = question.workload.mean_final_context
        warnings.append(
            f"the KV pool of {split.pools.kv_tokens:,} tokens does not hold one "
            f"trajectory of {context:,.0f}: give the cache more memory or ranks"
        )
    if split.max_running_requests < split.safe_concurrency:
        warnings.append(
            f"only {split.max_running_requests} requests run at once on a rank that "
            f"keeps {split.safe_concurrency} trajectories: raise --max-running-requests"
        )
    return warnings


def _least_ratio_advice(question: Question) -> str:
    costs = question.costs
    slots = costs.state_slots_per_request + 1
    least = (
        slots * costs.state_bytes_per_slot
        + 2 * costs.scratch_bytes_per_request
        + costs.fixed_state_bytes
    )
    if least >= question.budget:
        return (
            "give the cache more memory, or halve states (--mamba-ssm-dtype bfloat16)"
        )
    ratio = math.ceil(least / (question.budget - least) * 1e6) / 1e6
    return f"use --mamba-full-memory-ratio {ratio:g} or more"


def _target_warnings(plan: Plan) -> list[str]:
    question, target = plan.question, plan.question.target_concurrency
    if target is None:
        return []
    warnings = []
    left, mean = plan.kv_tokens_per_trajectory, question.workload.mean_final_context
    if left < 0.9 * mean:
        warnings.append(
            f"concurrency {target} leaves {int(left):,} KV tokens a trajectory, far below "
            f"the mean final context of {mean:,.0f}: prefixes will be evicted"
        )
    holds = plan.recommended.pools.request_limit(question.costs)
    if holds < target:
        padded = _ratio_for_slots(question, target)
        warnings.append(
            f"the padding slot leaves room for {holds} of {target} requests: use "
            f"--mamba-full-memory-ratio {padded:g} for all of them"
        )
    return warnings


def _ratio_for_slots(question: Question, requests: int) -> float:
    """A ratio, rounded up, whose slots let ``requests`` run in spite of padding."""
    costs = question.costs
    state_bytes = (
        (requests * costs.state_slots_per_request + 1) * costs.state_bytes_per_slot
        + (requests + 1) * costs.scratch_bytes_per_request
        + costs.fixed_state_bytes
    )
    return math.ceil(state_bytes / (question.budget - state_bytes) * 1e6) / 1e6


def _workload_warnings(question: Question) -> list[str]:
    workload, warnings = question.workload, []
    if workload.forked_share >= _MANY_FORKS and question.max_states_per_path == 1:
        warnings.append(
            f"{workload.forked_share:.0%} of the trajectories fork from an earlier "
            "turn, and a cap of 1 state per path keeps only tails: use "
            f"--mamba-max-states-per-path {max(workload.states_per_path or 4, 2)} or -1 "
            "to keep states where they branch"
        )
    if workload.trajectories is not None and workload.trajectories < _FEW_TRAJECTORIES:
        warnings.append(
            f"the profile holds only {workload.trajectories} trajectories, so its mean "
            "context may not be that of the next batch"
        )
    return warnings


def _speculation_warnings(plan: Plan) -> list[str]:
    """The engine's ratio counts draft states for requests that never run at once."""
    question, costs = plan.question, plan.question.costs
    balanced = balanced_capacity(
        question.budget, costs, question.workload.mean_final_context
    )
    wanted = balanced * costs.state_bytes_per_request
    if question.target_concurrency or wanted <= MOST_STATE * question.budget:
        return []
    slots = math.floor(balanced) * costs.state_slots_per_request * question.dp_ranks
    return [
        f"no ratio buys the slots of the balance, as it counts {costs.draft_tokens} draft "
        f"states for every request that fits: use --max-mamba-cache-size {slots} instead"
    ]


def _mode_warnings(question: Question) -> list[str]:
    warnings = []
    if question.unified_memory:
        warnings.append(
            "unified memory: one buffer serves both caches, so the ratio is "
            "informational; it only sets the number of state slots"
        )
    if not question.radix_cache:
        warnings.append(
            "without the radix cache no turn reuses an earlier one: the reference "
            "concurrency only says how many requests fit"
        )
    return warnings


# --------------------------------------------------------------------------
# Output
# --------------------------------------------------------------------------


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The plan for other programs; pools, costs and sizes are those of a rank."""
    question, costs = plan.question, plan.question.costs
    context = question.workload.mean_final_context
    split, default = plan.recommended, plan.default
    return {
        "ratio": split.ratio,
        "reference_concurrency": plan.reference_concurrency,
        "reference_concurrency_continuous": plan.reference_concurrency_continuous,
        "reference_concurrency_at_p90": plan.concurrency_at_p90,
        "workers": question.workers,
        "aggregate_reference_concurrency": plan.aggregate_reference_concurrency,
        "default_ratio": default.ratio,
        "default_concurrency": default.safe_concurrency * question.dp_ranks,
        "binding_pool_at_default": default.continuous.binding_pool,
        "cache_bytes": question.budget,
        "kv_tokens": split.pools.kv_tokens,
        "state_slots": split.pools.state_slots,
        "max_running_requests": split.max_running_requests,
        "mean_final_context_tokens": context,
        "kv_tokens_per_trajectory": plan.kv_tokens_per_trajectory,
        "kv_bytes_per_token": costs.kv_bytes_per_token,
        "state_bytes_per_slot": costs.state_bytes_per_slot,
        "state_slots_per_request": costs.state_slots_per_request,
        "draft_state_bytes_per_request": costs.scratch_bytes_per_request,
        "kv_bytes_per_trajectory": costs.kv_bytes_per_trajectory(context),
        "state_bytes_per_trajectory": costs.state_bytes_per_request,
        "flags": plan.flags,
        "warnings": plan.warnings,
    }


def plan_as_text(plan: Plan) -> str:
    """The plan for people."""
    lines = [*_inputs(plan), "", *_table(plan), "", *_conclusion(plan)]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def _inputs(plan: Plan) -> list[str]:
    question, costs = plan.question, plan.question.costs
    workload = question.workload
    context = workload.mean_final_context
    count = "" if workload.trajectories is None else f"{workload.trajectories:,} "
    draft = costs.scratch_bytes_per_request
    return [
        f"workload     {count}trajectories ({workload.name}), "
        f"mean final context {context:,.0f} tokens",
        f"a token      {costs.kv_bytes_per_token:,.0f} bytes of KV cache",
        f"a request    {costs.state_slots_per_request} state slots of "
        f"{mib(costs.state_bytes_per_slot)}"
        + (f", and {mib(draft)} of draft states" if draft else ""),
        f"a trajectory {mib(costs.kv_bytes_per_trajectory(context))} of KV cache + "
        f"{mib(costs.state_bytes_per_request)} of state",
        f"the cache    {mib(question.budget)} on a rank",
    ]


def _table(plan: Plan) -> list[str]:
    header = (
        "",
        "ratio",
        "KV tokens",
        "state slots",
        "KV holds",
        "state holds",
        "safe",
    )
    rows = [
        header,
        _row("recommended", plan.recommended),
        _row("default", plan.default),
    ]
    return [
        f"{row[0]:<12}" + "".join(f"{cell:>13}" for cell in row[1:]) for row in rows
    ]


def _row(name: str, split: Split) -> tuple[str, ...]:
    return (
        name,
        f"{split.ratio:.4g}",
        f"{split.pools.kv_tokens:,}",
        f"{split.pools.state_slots:,}",
        f"{split.continuous.kv:.2f}",
        f"{split.continuous.state:.2f}",
        str(split.safe_concurrency),
    )


def _conclusion(plan: Plan) -> list[str]:
    question = plan.question
    pool = {"kv": "the KV cache", "state": "the state pool", "both": "neither pool"}
    binding = pool[plan.default.continuous.binding_pool]
    several = (
        ""
        if question.workers == 1
        else f", {plan.aggregate_reference_concurrency} on {question.workers} workers"
    )
    return [
        f"reference concurrency: {plan.reference_concurrency_continuous:.2f}, so "
        f"{plan.reference_concurrency} whole trajectories a worker{several}",
        *_longer(plan),
        f"at the default {DEFAULT_RATIO}: "
        f"{plan.default.safe_concurrency * question.dp_ranks}; {binding} limits it",
        f"requests that can run at once: {plan.recommended.max_running_requests} a rank",
        "flags: " + " ".join(plan.flags),
    ]


def _longer(plan: Plan) -> list[str]:
    context = plan.question.workload.p90_final_context
    if context is None:
        return []
    return [
        f"if all were as long as the 90th percentile, {context:,.0f} tokens: "
        f"{plan.concurrency_at_p90}"
    ]


def mib(size: float) -> str:
    """``size`` bytes for people: MiB, or GiB from 10 GiB on."""
    unit, name = (1 << 30, "GiB") if size >= 10 << 30 else (1 << 20, "MiB")
    return f"{size / unit:,.2f} {name}"
