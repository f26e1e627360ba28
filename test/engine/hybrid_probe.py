"""Answers many questions about sizing with one import of SGLang.

    python hybrid_probe.py JOBS.json ANSWERS.json

Jobs run in forked children, because much of an engine's state is global:

- ``plan``: the planner's command line; its JSON;
- ``size``: a deployment, a budget and a ratio; the pools of SGLang's own sizing code;
- ``boot``: launch flags; a scheduler is built, and what its pools became returned;
- ``refuse``: launch flags up to the checks before any process starts; the exit code
  and what was written to stderr.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def plan(job: Job) -> Job:
    from sglang.plan_hybrid_cache import main

    output = io.StringIO()
    errors = io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = main([*job["argv"], "--json"])
        except SystemExit as stop:
            code = stop.code
    text = output.getvalue()
    return {
        "code": code,
        "plan": json.loads(text) if text else None,
        "stderr": errors.getvalue(),
    }


def _parse(job: Job) -> Any:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    return prepare_server_args(job["argv"])


def refuse(job: Job) -> Job:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            server_args = _parse(job)
            if job.get("api"):
                server_args._launch_command = None
            server_args.resolve_once()
            server_args.check_server_args()
        except SystemExit as stop:
            return {"code": stop.code, "stderr": errors.getvalue()}
        except ValueError as error:
            return {"code": "ValueError", "stderr": str(error)}
    return {"code": None, "stderr": errors.getvalue()}


def boot(job: Job) -> Job:
    from sglang.srt.managers.scheduler import Scheduler, configure_logger
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController,
    )
    from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish
    from sglang.srt.server_args import PortArgs

    server_args = _parse(job)
    server_args.resolve_once()
    server_args.check_server_args()
    ports = PortArgs.init_new(server_args)
    publish(server_args, role="scheduler", ranks=SpawnRanks(0, None, 0))
    configure_logger(server_args)
    scheduler = Scheduler(server_args, ports)
    pool = scheduler.tp_worker.model_runner.req_to_token_pool.mamba_pool
    controller = SchedulerInternalStateController(scheduler, record_step_time=False)
    state = controller.get_internal_state(None)
    return {
        "kv_tokens": scheduler.max_total_num_tokens,
        "state_slots": get_schedule().max_mamba_cache_size,
        "state_bytes_per_slot": pool.get_kv_size_bytes() / (pool.size + 1),
        "max_running_requests": scheduler.max_running_requests,
        "report": scheduler.hybrid_capacity,
        "label_capacity": state.internal_state.get("routing_prefix_capacity"),
        "internal_state": state.internal_state["hybrid_capacity"],
        "ratio_in_use": state.internal_state["mamba_full_memory_ratio"],
    }


def size(job: Job) -> Job:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import get_parallel, get_schedule

    from sglang.srt.mem_cache import hybrid_model_costs

    deployment = hybrid_model_costs.Deployment(**job["deployment"])
    with contextlib.ExitStack() as cleanup:
        server_args = hybrid_model_costs._publish(deployment, cleanup)
        kvc = hybrid_model_costs._configurator(
            deployment, server_args, model_config_of(server_args), job.get("stage", 0)
        )
        with get_schedule().override(mamba_full_memory_ratio=job["ratio"]):
            rest = kvc._handle_max_mamba_cache(job["budget"] / (1 << 30))
            # The stages would agree on the smallest of them, and there is but one.
            with get_parallel().override(pp_size=1):
                pools = kvc.config_from_budget(int(rest * (1 << 30)))
            rows = pools.max_total_num_tokens
            return {
                "kv_tokens": kvc.logical_token_capacity(max_total_num_tokens=rows),
                "state_slots": get_schedule().max_mamba_cache_size,
                "max_running_requests": kvc.resolve_max_num_reqs(rows),
            }


KINDS: dict[str, Callable[[Job], Job]] = {
    "plan": plan,
    "size": size,
    "boot": boot,
    "refuse": refuse,
}


PURE = {"plan", "size"}


def answer(jobs: dict[str, Job]) -> dict[str, Job]:
    """The jobs' answers, all from one child of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        answers = {name: _answer_here(job) for name, job in jobs.items()}
        with os.fdopen(writer, "w") as pipe:
            json.dump(answers, pipe, default=str)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text or "null") or {name: _DIED for name in jobs}


_DIED = {"traceback": "the child died"}


def _answer_here(job: Job) -> Job:
    os.environ.update(job.get("env", {}))
    try:
        return KINDS[job["kind"]](job)
    except BaseException:  # whatever it is, the parent shall show it
        return {"traceback": traceback.format_exc()}


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    import sglang.srt.managers.scheduler  # once, for all children

    import sglang.srt.mem_cache.hybrid_model_costs  # noqa: F401

    # Plans put back what they change; an engine's state is global.
    pure = {name: job for name, job in jobs.items() if job["kind"] in PURE}
    answers = answer(pure)
    for name in jobs.keys() - pure.keys():
        answers |= answer({name: jobs[name]})
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
