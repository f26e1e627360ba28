"""From a :class:`WorkerConfig` to a scheduler that is ready to be stepped."""

from __future__ import annotations

import gc
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.virtual import models

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang.virtual.protocol import WorkerConfig

# Nothing is decoded to text and nothing is logged per pass.
_FIXED_FLAGS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--load-format", "dummy"),
    *("--dtype", "bfloat16"),
    *("--decode-log-interval", "1000000000"),
    *("--log-level", "error"),
    "--skip-tokenizer-init",
    "--disable-overlap-schedule",
]


def prepare_process() -> None:
    """Do once what does not depend on a configuration (and takes most of the time).

    Afterwards the process may be forked, a child per configuration.
    """
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = models.__name__
    # A virtual run must not depend on what else is installed.
    os.environ["SGLANG_PLUGINS"] = "none"
    from sglang.virtual.platform import use_virtual_platform

    use_virtual_platform()
    from sglang.srt.managers import scheduler  # noqa: F401
    from sglang.virtual.models import null_hybrid

    null_hybrid.register()
    # A hundred thousand imported objects need not be looked at again.
    gc.freeze()


def flags_of(config: WorkerConfig, model_folder: Path) -> list[str]:
    """The ``sglang.launch_server`` flags that ``config`` stands for."""
    optional = {
        "--mamba-full-memory-ratio": config.ratio,
        "--max-running-requests": config.max_running_requests,
    }
    return [
        *("--model-path", str(model_folder)),
        *_FIXED_FLAGS,
        *("--schedule-policy", config.schedule_policy),
        *("--context-length", str(config.context_length_tokens)),
        *("--chunked-prefill-size", str(config.chunked_prefill_tokens)),
        *("--page-size", str(config.page_size)),
        *("--mamba-radix-cache-strategy", config.cache_strategy),
        *("--mamba-max-states-per-path", str(config.max_states_per_path)),
        *(w for k, v in optional.items() if v is not None for w in (k, str(v))),
        *config.server_args,
    ]


def boot(config: WorkerConfig, cleanup: ExitStack) -> Scheduler:
    """Build the scheduler; ``cleanup`` removes its files."""
    from sglang.srt.managers.scheduler import configure_logger
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    from sglang.srt.managers import schedule_policy
    from sglang.virtual import pools
    from sglang.virtual.models import null_hybrid
    from sglang.virtual.scheduler import VirtualScheduler

    quotient = config.state_bytes_per_slot / config.kv_bytes_per_token
    rows = null_hybrid.state_rows_for(quotient)
    scale = null_hybrid.state_bytes(rows) / config.state_bytes_per_slot
    folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
    null_hybrid.write_model(folder, rows, config.context_length_tokens)
    pools.use_budget(round(config.cache_bytes * scale))

    if config.prefix_match_queue_limit is not None:
        limit = config.prefix_match_queue_limit
        schedule_policy.WAITING_QUEUE_PREFIX_MATCH_MAX = limit
    server_args = prepare_server_args(flags_of(config, folder))
    port_args = PortArgs.init_new(server_args)
    ranks = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    publish(server_args, role="scheduler", ranks=ranks)
    configure_logger(server_args)
    scheduler = VirtualScheduler(server_args, port_args)
    # What run_event_loop would have set up.
    scheduler.schedule_stream.synchronize = lambda: None
    scheduler._war_barrier_enabled = False
    scheduler.metrics_reporter.start_scheduler_time_accounting()
    return scheduler
