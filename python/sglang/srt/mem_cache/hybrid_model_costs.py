"""Unit costs of a hybrid model from its config folder, without a GPU.

Runs SGLang's own configuration and sizing classes on a context that describes the
deployment, so that a new model or layout needs nothing here. Importing them takes
seconds; the planner does it only when it was given a model.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import (
    _mamba_radix_cache_resolution,
    _pipeline_parallel_overlap_disable,
    model_config_of,
    resolved_view,
    use_mla_backend,
)
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    resolve_spec_aux_hidden_state_config,
)
from sglang.srt.runtime_context import get_context, get_exec, get_schedule
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang.srt.mem_cache import hybrid_capacity_engine
from sglang.srt.mem_cache.hybrid_capacity import CapacityError, UnitCosts

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

# Far above any machine, so that sizing only tells what the units cost.
_PLENTY_GIB = 1e6

# What SGLang sets under speculative decoding when nobody gives a number.
SPECULATIVE_REQUEST_CAP = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The launch flags that decide what a token and a slot cost.

    Names and values are those of ``sglang.launch_server``; ``mamba_conv_dtype`` is
    the environment variable SGLANG_MAMBA_CONV_DTYPE of the server.
    """

    model_path: str
    tp_size: int = 1
    pp_size: int = 1
    attn_dp_size: int = 1
    dcp_size: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    mamba_ssm_dtype: str | None = None
    mamba_conv_dtype: str = "bfloat16"
    page_size: int = 1
    context_length: int | None = None
    mamba_radix_cache_strategy: str = "auto"
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_draft_model_path: str | None = None
    max_running_requests: int | None = None
    trust_remote_code: bool = False

    @property
    def request_cap(self) -> int | None:
        """What ``--max-running-requests`` becomes; None if SGLang estimates it."""
        if self.max_running_requests is None and self.speculative_algorithm is not None:
            return SPECULATIVE_REQUEST_CAP
        return self.max_running_requests

    @property
    def request_cap_per_rank(self) -> int | None:
        """:attr:`request_cap` of one attention-DP rank."""
        cap = self.request_cap
        return None if cap is None else max(1, cap // self.attn_dp_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Unit costs and what they rest on, for people to check.

    context_length: the longest context the model serves, in tokens.
    """

    costs: UnitCosts
    architecture: str
    context_length: int
    kv_cache_dtype: str
    cache_strategy: str
    overlap: bool


def read_model_costs(deployment: Deployment) -> ModelCosts:
    """Unit costs of the largest pipeline stage's rank.

    Raises:
        CapacityError: no config there, or a model without anything to split.
    """
    _require_config(deployment.model_path)
    with ExitStack() as cleanup:
        server_args = _publish(deployment, cleanup)
        model_config = model_config_of(server_args)
        hybrid_capacity_engine.require_splittable(model_config)
        stages = [
            _stage_costs(deployment, server_args, model_config, stage)
            for stage in range(deployment.pp_size)
        ]
        return ModelCosts(
            costs=_largest(stages),
            architecture=model_config.hf_config.architectures[0],
            context_length=model_config.context_len,
            kv_cache_dtype=str(_kv_dtype(deployment, model_config)[1]),
            cache_strategy=(
                "no radix cache"
                if deployment.disable_radix_cache
                else get_exec().mamba.mamba_radix_cache_strategy
            ),
            overlap=not get_schedule().disable_overlap_schedule,
        )


def _require_config(model_path: str) -> None:
    if not (Path(model_path) / "config.json").is_file():
        raise CapacityError("--model-path", model_path, "a folder with a config.json")


def _publish(deployment: Deployment, cleanup: ExitStack) -> ServerArgs:
    """Describe the deployment to SGLang until ``cleanup`` closes."""
    enter = cleanup.enter_context
    enter(envs.SGLANG_MAMBA_CONV_DTYPE.override(deployment.mamba_conv_dtype))
    if deployment.mamba_ssm_dtype is not None:
        enter(envs.SGLANG_MAMBA_SSM_DTYPE.override(deployment.mamba_ssm_dtype))
    fields = {
        name: getattr(deployment, name)
        for name in Deployment.__dataclass_fields__
        if name != "mamba_conv_dtype"
    }
    fields["max_running_requests"] = deployment.request_cap
    context = get_context()
    with context.override_server_args(device="cuda", **fields) as asked:
        view = resolved_view(asked)
        # In the server's order: the strategy is chosen before PP drops the overlap.
        fields |= _mamba_radix_cache_resolution(view)
        fields |= _pipeline_parallel_overlap_disable(view)
        fields["_model_config"] = model_config_of(asked)
    return enter(context.override_server_args(device="cuda", **fields))


def _stage_costs(
    deployment: Deployment,
    server_args: ServerArgs,
    model_config: ModelConfig,
    stage: int,
) -> UnitCosts | None:
    """Unit costs of one pipeline stage; None for a stage without KV cache."""
    kvc = _configurator(deployment, server_args, model_config, stage)
    with get_schedule().override(max_mamba_cache_size=None):
        kvc._handle_max_mamba_cache(_PLENTY_GIB)
    return hybrid_capacity_engine.recorded_unit_costs()


def _configurator(
    deployment: Deployment,
    server_args: ServerArgs,
    model_config: ModelConfig,
    stage: int,
) -> KVCacheConfigurator:
    """SGLang's own sizing object, for the rank of a stage that nobody launched."""
    algorithm = SpeculativeAlgorithm.from_string(deployment.speculative_algorithm)
    start, end = get_pp_indices(
        model_config.num_hidden_layers, stage, deployment.pp_size
    )
    kv_cache_dtype_str, kv_cache_dtype = _kv_dtype(deployment, model_config)
    return KVCacheConfigurator(
        device="cuda",
        gpu_id=0,
        attn_dp_size=deployment.attn_dp_size,
        pp_size=deployment.pp_size,
        pp_group=None,
        model=None,
        model_config=model_config,
        server_args=server_args,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_dtype_str=kv_cache_dtype_str,
        model_dtype=model_config.dtype,
        page_size=deployment.page_size,
        sliding_window_size=None,
        spec_algorithm=algorithm,
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=resolve_spec_aux_hidden_state_config(
            server_args=server_args,
            model_config=model_config,
            spec_algorithm=algorithm,
            is_draft_worker=False,
        ),
        is_hybrid_swa=False,
        is_hybrid_swa_compress=False,
        use_mla_backend=use_mla_backend(server_args),
        layer_info=ModelLayerInfo(
            start_layer=start, end_layer=end, num_effective_layers=end - start
        ),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
    )


def _kv_dtype(
    deployment: Deployment, model_config: ModelConfig
) -> tuple[str, torch.dtype]:
    """(the flag's word, the dtype) of the KV cache."""
    word, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=deployment.kv_cache_dtype,
        model=None,
        model_dtype=model_config.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    return word or deployment.kv_cache_dtype, dtype


def _largest(stages: list[UnitCosts | None]) -> UnitCosts:
    """The costs every stage sizes by: slots are alike, KV rows are the largest."""
    sized = [stage for stage in stages if stage is not None]
    return max(sized, key=lambda costs: costs.kv_bytes_per_row)
