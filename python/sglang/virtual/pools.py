"""Pool sizes from a chosen budget, by the engine's own formulas."""

from __future__ import annotations

from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator


def use_budget(cache_bytes: int) -> None:
    """Let every pool of this process be sized as if ``cache_bytes`` were free.

    The split by ratio, the cell size and the limit on running requests stay the
    engine's; only the measurement of free memory is replaced, because the host's
    free memory says nothing about the deployment and changes from run to run.
    """

    def available_bytes(self: KVCacheConfigurator, _pre_model_load: int) -> int:
        return int(self._handle_max_mamba_cache(cache_bytes / 2**30) * 2**30)

    KVCacheConfigurator._profile_available_bytes = available_bytes
