"""Workload-aware split of the hybrid cache inside the engine.

``--hybrid-workload-profile`` sets the mamba ratio before the pools are sized.
With or without it, the scheduler reports what the pools it got can hold.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import (
    get_context,
    get_memory,
    get_parallel,
    get_schedule,
    get_spec,
)

from sglang.srt.mem_cache.hybrid_capacity import (
    Capacity,
    CapacityError,
    PoolSizes,
    UnitCosts,
    balanced_capacity,
    deployed_ratio,
)
from sglang.srt.mem_cache.hybrid_workload_profile import (
    WorkloadProfile,
    load_workload_profile,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

logger = logging.getLogger(__name__)

PROFILE_SOURCE = "hybrid_workload_profile"

# The unit costs of the target model of this process, recorded while its state
# pool is sized; None until then and for models that the capacity model leaves out.
_unit_costs: UnitCosts | None = None


# --------------------------------------------------------------------------
# Before the pools are sized
# --------------------------------------------------------------------------


def check_hybrid_workload_profile(server_args: Any) -> None:
    """Refuse, before any weight is loaded, a profile that cannot split the cache.

    Raises:
        SystemExit: status 2, after one line, if a command line started the server.
        ValueError: the same line for users of the Python API.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    path = resolving_view(server_args).hybrid_workload_profile
    if path is None:
        return
    try:
        load_workload_profile(path)
        require_splittable(model_config_of(server_args))
    except ValueError as error:
        if getattr(server_args, "_launch_command", None) is None:
            raise
        sys.stderr.write(f"error: --hybrid-workload-profile {path}: {error}\n")
        raise SystemExit(2) from error


def require_splittable(model_config: Any) -> None:
    """Refuse a model whose cache has no two parts to split.

    Raises:
        CapacityError: one line that names the model's architecture.
    """
    arch = model_config.hf_config.architectures[0]
    config = mambaish_config(model_config)
    if config is None:
        raise CapacityError("model", arch, f"{_HYBRID}, this one has nothing to split")
    if model_config.is_hybrid_swa:
        raise CapacityError("model", arch, f"{_HYBRID}, without sliding windows")
    if not config.full_attention_layer_ids:
        raise CapacityError("model", arch, f"{_HYBRID}, this one has no KV cache")


_HYBRID = "a hybrid one, with recurrent state and full attention"


def apply_hybrid_workload_profile(
    kvc: KVCacheConfigurator,
    *,
    budget_gib: float,
    state_bytes: int,
    extra_bytes_per_slot: int,
    fixed_state_bytes: int,
    keeps_draft_states: bool,
) -> None:
    """Record what a token and a slot cost, and set the ratio from the profile.

    Called while the state pool is sized, before the ratio is read. ``budget_gib`` is
    for both pools; all bytes are those of the largest pipeline stage.
    ``keeps_draft_states`` says whether the state budget also pays for the
    intermediates of speculative decoding.
    """
    global _unit_costs
    row_bytes = _kv_bytes_per_row(kvc)
    if row_bytes is None:
        return
    cap = get_schedule().max_running_requests
    _unit_costs = UnitCosts(
        kv_bytes_per_row=row_bytes,
        state_bytes_per_slot=state_bytes + extra_bytes_per_slot,
        state_slots_per_request=kvc._calculate_mamba_ratio(),
        draft_tokens=(
            get_spec().speculative_num_draft_tokens if keeps_draft_states else 0
        ),
        scratch_bytes_per_draft_token=state_bytes,
        draft_request_cap=None if cap is None else max(1, cap // kvc.attn_dp_size),
        fixed_state_bytes=fixed_state_bytes,
        page_size=get_schedule().page_size,
        tokens_per_row=kvc.logical_token_capacity(max_total_num_tokens=1),
    )
    _override_ratio(budget_gib * (1 << 30), _unit_costs)


def recorded_unit_costs() -> UnitCosts | None:
    """Unit costs of the model whose state pool was sized last, if it is hybrid."""
    return _unit_costs


def _kv_bytes_per_row(kvc: KVCacheConfigurator) -> int | None:
    """Bytes of a row of the KV pool; the largest stage's under PP.

    A stage without full-attention layers has none of its own, so every stage
    takes the maximum: they must size equal state pools.
    """
    # Local import: the configurator's module imports kv_cache_configurator lazily.
    from sglang.srt.model_executor.pool_configurator import (
        DefaultPoolConfigurator,
        create_memory_pool_configurator,
    )

    configurator = create_memory_pool_configurator(kvc)
    if not isinstance(configurator, DefaultPoolConfigurator):
        return None
    row_bytes = configurator._cell_size
    if kvc.pp_size > 1 and torch.distributed.is_initialized():
        row_bytes = _max_over_ranks(row_bytes)
    return row_bytes or None


def _max_over_ranks(value: int) -> int:
    tensor = torch.tensor(value, dtype=torch.int64)
    torch.distributed.all_reduce(
        tensor,
        op=torch.distributed.ReduceOp.MAX,
        group=get_parallel().world_group.cpu_group,
    )
    return int(tensor.item())


def _override_ratio(budget: float, costs: UnitCosts) -> None:
    profile = _loaded_profile()
    if profile is None or ratio_origin() != "profile" or budget <= 0:
        return
    get_context().override(
        PROFILE_SOURCE,
        mamba_full_memory_ratio=deployed_ratio(
            budget, costs, profile.mean_final_context
        ),
    )


def _loaded_profile() -> WorkloadProfile | None:
    path = get_schedule().hybrid_workload_profile
    return None if path is None else load_workload_profile(path)


def ratio_origin() -> str:
    """Who decides the split, the strongest first.

    ``max_mamba_cache_size`` and ``max_running_requests`` fix the state slots, so
    that no ratio is read; then an explicit ``flag``, the ``profile``, the ``model``
    family's own setting, and the ``default``.
    """
    if _asked("max_mamba_cache_size") is not None:
        return "max_mamba_cache_size"
    schedule = get_schedule()
    if get_memory().disable_radix_cache and schedule.max_running_requests is not None:
        return "max_running_requests"
    if _asked("mamba_full_memory_ratio") is not None:
        return "flag"
    if schedule.hybrid_workload_profile is not None:
        return "profile"
    declared = getattr(get_context().server_args, "_resolved_overrides", None) or ()
    by_model = any("mamba_full_memory_ratio" in fields for _, fields in declared)
    return "model" if by_model else "default"


def _asked(field: str) -> Any:
    """What the command line gave, before any resolution; None if nothing."""
    return getattr(get_context().server_args, field)


# --------------------------------------------------------------------------
# After the pools are sized
# --------------------------------------------------------------------------


class HybridCapacityReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one scheduler's hybrid cache holds: ``hybrid_capacity`` of /server_info.

    Costs and footprints are bytes on one rank, pools are logical tokens and usable
    state slots. The capacities and the reference concurrency count trajectories of
    the profile's mean final context and are null without a profile.
    """

    ratio: float
    ratio_origin: str
    workload_profile: str | None
    mean_final_context_tokens: float | None
    kv_bytes_per_token: float
    state_bytes_per_slot: int
    state_slots_per_request: int
    draft_state_bytes_per_request: int
    kv_bytes_per_trajectory: float | None
    state_bytes_per_trajectory: int
    kv_tokens: int
    state_slots: int
    kv_capacity: float | None
    state_capacity: float
    binding_pool: str | None
    reference_concurrency: int | None
    reference_concurrency_continuous: float | None
    max_running_requests: int
    unified_memory: bool
    note: str | None


def report_hybrid_capacity(
    *, kv_tokens: int, max_running_requests: int
) -> dict[str, Any] | None:
    """Describe the pools as sized, as a :class:`HybridCapacityReport`, and log it.

    ``kv_tokens`` are logical tokens. Returns None for a model that keeps no
    recurrent state or whose split the capacity model does not cover.
    """
    if _unit_costs is None:
        return None
    report = _build_report(
        _unit_costs,
        PoolSizes(kv_tokens, get_schedule().max_mamba_cache_size),
        _loaded_profile(),
        max_running_requests,
    )
    _publish_label_capacity(report.reference_concurrency)
    if get_parallel().tp_rank == 0:
        logger.info(describe(report))
    return msgspec.structs.asdict(report)


def _publish_label_capacity(reference_concurrency: int | None) -> None:
    """Let the default of ``--routing-prefix-capacity`` follow from it."""
    schedule = get_schedule()
    if not reference_concurrency or "routing_prefix_capacity" not in schedule:
        return
    if schedule.routing_prefix_capacity is None:
        # With the flag there is the policy.
        from sglang.srt.managers.routing_prefix_args import default_capacity

        get_context().override(
            "hybrid_capacity",
            routing_prefix_capacity=default_capacity(reference_concurrency),
        )


def _build_report(
    costs: UnitCosts,
    pools: PoolSizes,
    profile: WorkloadProfile | None,
    max_running_requests: int,
) -> HybridCapacityReport:
    context = None if profile is None else profile.mean_final_context
    unified = get_memory().enable_unified_memory
    sized = _SizedCapacity.of(costs, pools, context, unified)
    return HybridCapacityReport(
        ratio=_ratio_in_effect(costs, pools),
        ratio_origin=ratio_origin(),
        workload_profile=None if profile is None else profile.name,
        mean_final_context_tokens=context,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        state_bytes_per_slot=costs.state_bytes_per_slot,
        state_slots_per_request=costs.state_slots_per_request,
        draft_state_bytes_per_request=costs.scratch_bytes_per_request,
        kv_bytes_per_trajectory=(
            None if context is None else costs.kv_bytes_per_trajectory(context)
        ),
        state_bytes_per_trajectory=costs.state_bytes_per_request,
        kv_tokens=pools.kv_tokens,
        state_slots=pools.state_slots,
        kv_capacity=sized.kv,
        state_capacity=pools.state_slots / costs.state_slots_per_request,
        binding_pool=sized.binding_pool,
        reference_concurrency=sized.whole,
        reference_concurrency_continuous=sized.continuous,
        max_running_requests=max_running_requests,
        unified_memory=unified,
        note=_UNIFIED_NOTE if unified else None,
    )


def _ratio_in_effect(costs: UnitCosts, pools: PoolSizes) -> float:
    """The ratio that was read, or the one that slots fixed otherwise amount to."""
    if ratio_origin() not in _FIXED_SLOTS:
        return get_schedule().mamba_full_memory_ratio
    state_bytes = (pools.state_slots + 1) * costs.state_bytes_per_slot
    ratio = state_bytes / (pools.kv_tokens * costs.kv_bytes_per_token)
    return float(f"{ratio:.6g}")


_FIXED_SLOTS = {
    "max_mamba_cache_size": "--max-mamba-cache-size",
    "max_running_requests": "--max-running-requests",
}

_UNIFIED_NOTE = (
    "unified memory: one buffer serves both caches, so the ratio is informational; "
    "it only sets the number of state slots"
)


class _SizedCapacity(msgspec.Struct, frozen=True):
    """The capacity of the pools as sized, where a mean context is known."""

    kv: float | None = None
    binding_pool: str | None = None
    continuous: float | None = None
    whole: int | None = None

    @classmethod
    def of(
        cls,
        costs: UnitCosts,
        pools: PoolSizes,
        context: float | None,
        unified: bool,
    ) -> _SizedCapacity:
        if context is None:
            return cls()
        capacity = pools.capacity(costs, context)
        if unified:
            return cls._of_shared_buffer(costs, pools, context, capacity)
        return cls(
            kv=capacity.kv,
            binding_pool=capacity.binding_pool,
            continuous=capacity.joint,
            whole=pools.safe_concurrency(costs, context),
        )

    @classmethod
    def _of_shared_buffer(
        cls, costs: UnitCosts, pools: PoolSizes, context: float, capacity: Capacity
    ) -> _SizedCapacity:
        # Equation 7, but no more requests than there are slots for.
        state_bytes = pools.state_slots * costs.state_bytes_per_slot
        total = pools.kv_tokens * costs.kv_bytes_per_token + state_bytes
        shared = balanced_capacity(total, costs, context)
        continuous = min(shared, capacity.state)
        pool = "shared" if shared < capacity.state else "state"
        return cls(capacity.kv, pool, continuous, math.floor(continuous))


def describe(report: HybridCapacityReport) -> str:
    """One line for people: the split, why it is so, and what it holds."""
    line = (
        f"Hybrid cache: ratio {report.ratio:.4g} ({_origin_in_words(report)}), "
        f"{report.kv_tokens:,} KV tokens, {report.state_slots:,} state slots of "
        f"{report.state_bytes_per_slot / (1 << 20):.2f} MiB, "
        f"{report.state_slots_per_request} a request, "
        f"max_running_requests {report.max_running_requests}"
    )
    if report.reference_concurrency is None:
        return f"{line}; no workload profile, so no reference concurrency"
    return (
        f"{line}; trajectories of {report.mean_final_context_tokens:,.0f} tokens "
        f"({report.workload_profile}): KV holds {report.kv_capacity:.1f}, states hold "
        f"{report.state_capacity:.1f}, reference concurrency "
        f"{report.reference_concurrency}"
        + (f"; {report.note}" if report.note is not None else "")
    )


def _origin_in_words(report: HybridCapacityReport) -> str:
    origin = report.ratio_origin
    beaten = "" if report.workload_profile is None else ", not by the profile"
    if origin in _FIXED_SLOTS:
        return f"fixed by {_FIXED_SLOTS[origin]}{beaten}"
    return {
        "flag": f"set by --mamba-full-memory-ratio{beaten}",
        "profile": "from the workload profile",
        "model": "set by the model family",
        "default": "default",
    }[origin]


def hybrid_capacity_section(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ``hybrid_capacity`` entry of ``/server_info``, over the DP ranks.

    Capacities add up, costs are those of one rank. Empty for other models.
    """
    reports = [
        state["hybrid_capacity"] for state in states if "hybrid_capacity" in state
    ]
    if not reports:
        return {}
    total = dict(reports[0])
    for field in _ADDED_OVER_RANKS:
        if total[field] is not None:
            total[field] = sum(report[field] for report in reports)
    return {"hybrid_capacity": total}


_ADDED_OVER_RANKS = (
    "kv_tokens",
    "state_slots",
    "kv_capacity",
    "state_capacity",
    "reference_concurrency",
    "reference_concurrency_continuous",
    "max_running_requests",
)


# --------------------------------------------------------------------------
# Prometheus
# --------------------------------------------------------------------------

_GAUGES = {
    "ratio": "State memory over KV memory that the cache was split by.",
    "kv_bytes_per_token": "Bytes of KV cache one token takes on one rank.",
    "state_bytes_per_slot": "Bytes of one recurrent-state slot on one rank.",
    "state_slots_per_request": "State slots the engine reserves for a request.",
    "kv_tokens": "Tokens the KV pool holds.",
    "state_slots": "Usable slots of the state pool.",
    "mean_final_context_tokens": "Mean final context of the workload profile.",
    "reference_concurrency": "Trajectories of the profile that both pools keep.",
}


def emit_hybrid_capacity(
    collector: SchedulerMetricsCollector, report: Mapping[str, Any] | None
) -> None:
    """Set the ``sglang:hybrid_capacity_*`` gauges, once, if a profile was given."""
    if report is None or report["workload_profile"] is None:
        return
    # Imported late, as by the collector: PROMETHEUS_MULTIPROC_DIR is set by now.
    from prometheus_client import Gauge

    for field, documentation in _GAUGES.items():
        if report[field] is not None:
            gauge = (collector._gauge_cls or Gauge)(
                name=f"sglang:hybrid_capacity_{field}",
                documentation=documentation,
                labelnames=collector.labels.keys(),
                multiprocess_mode="mostrecent",
            )
            collector._log_gauge(gauge, report[field])
