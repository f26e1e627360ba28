"""Runs the real scheduler through one scenario after another, each in a fork.

``python routing_prefix_scenarios.py`` prints one JSON line ``{name: result}`` per
scenario. SGLang is imported once; the forward pass is the null model of
``sglang.virtual``, everything that schedules is the engine's.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import sys
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from sglang.srt import runtime_context
from sglang.virtual import boot as virtual_boot
from sglang.virtual.protocol import CostModel, Request, Segment, WorkerConfig
from sglang.virtual.script import Script
from sglang.virtual.tokens import PromptBuilder, tokens_of

COST = CostModel(0.004, 5e-5, 1e-10, 5e-5, 1.5e-8)
POLICIES = ("fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first")


class Worker:
    """One scheduler that is stepped by hand."""

    def __init__(self, *flags: str, overlap: bool = False, **settings: Any) -> None:
        self._cleanup = ExitStack()
        self.overlap = overlap
        if overlap:
            virtual_boot._FIXED_FLAGS.remove("--disable-overlap-schedule")
            settings["cache_strategy"] = "extra_buffer"
        defaults = {
            "kv_bytes_per_token": 1.0,
            "state_bytes_per_slot": 5200.0,
            "cache_bytes": 4e5,
            "context_length_tokens": 60_000,
            "schedule_policy": "routing-prefix",
            "chunked_prefill_tokens": 8192,
        }
        config = WorkerConfig(
            cost=COST, server_args=list(flags), **(defaults | settings)
        )
        self.scheduler = virtual_boot.boot(config, self._cleanup)
        self._prompts = PromptBuilder()
        self._results: deque[Any] = deque()
        self.finished: list[str] = []
        self.batches: list[list[str]] = []

    def submit(
        self,
        name: str,
        label: str | None,
        prompt: list[tuple[int, int]],
        output: int = 4,
        max_new_tokens: int | None = None,
    ) -> None:
        """Hand in a request; the prompt is a list of (seed, length)."""
        segments = [Segment(seed=seed, length=length) for seed, length in prompt]
        request = Request(
            id=name,
            arrival_ns=0,
            prompt=segments,
            output=Segment(seed=zlib.crc32(name.encode()), length=output),
            max_new_tokens=max_new_tokens or output + 1,
            label=label,
        )
        tokens = self._prompts.build(name, request.prompt)
        self.scheduler.submit(request, tokens, Script(tokens_of(request.output), 0))

    def step(self) -> list[str]:
        """Run one iteration of the event loop; return who was prefilled in it."""
        scheduler = self.scheduler
        with torch.no_grad():
            batch = scheduler.next_batch()
            if batch is not None:
                result = scheduler.run_batch(batch)
                self._results.append((batch.copy() if self.overlap else batch, result))
            if self._results and (not self.overlap or scheduler.last_batch):
                scheduler.process_batch_result(*self._results.popleft())
            scheduler.last_batch = batch
        self.finished += [req.rid for req in scheduler.take_finished()]
        prefilled = []
        if batch is not None and batch.forward_mode.is_extend():
            prefilled = [req.rid for req in batch.reqs]
            self.batches.append(prefilled)
        return prefilled

    def run(self, steps: int = 400) -> list[list[str]]:
        """Step until nothing is left; return the prefill batches."""
        self.batches = []
        for _ in range(steps):
            self.step()
            if not self.scheduler.waiting_queue and self._is_idle():
                with torch.no_grad():
                    self.scheduler.on_idle()  # leak checks; they raise
                return self.batches
        raise AssertionError("not idle in time")

    def steps(self, count: int) -> None:
        """Step in lockstep with other ranks, which must step as often."""
        for _ in range(count):
            self.step()

    def _is_idle(self) -> bool:
        scheduler = self.scheduler
        return (
            scheduler.running_batch.is_empty()
            and scheduler.last_batch is None
            and scheduler.chunked_req is None
            and not self._results
        )

    @property
    def policy(self) -> Any:
        return self.scheduler.policy.routing_prefix

    def labels(self) -> list[str]:
        return list(self.policy.labels)


def admission_order(**settings: Any) -> Any:
    """Three trajectories are served, then seven requests wait for one slot."""
    worker = Worker("--max-running-requests", "1", **settings)
    lengths = {"A": 300, "B": 100, "C": 200}
    for seed, label in enumerate("CBA", start=1):
        worker.submit(f"first {label}", label, [(seed, lengths[label])])
        worker.run()
    worker.policy.labels.capacity = 2
    worker.policy.labels.touch("B")
    worker.policy.labels.touch("A")
    prompts = {label: (seed, lengths[label]) for seed, label in enumerate("CBA", 1)}
    worker.submit("unlabelled", None, [prompts["A"], (10, 50)])
    worker.submit("new", "D", [(11, 80)])
    for label in "BAC":
        worker.submit(label, label, [prompts[label], (12, 30)])
    worker.submit("empty", "", [(13, 40)])
    worker.submit("A again", "A", [(prompts["A"][0], 150), (14, 90)])
    before = worker.policy.counters["prefix_queries"]
    return {
        "batches": worker.run(),
        "queries": worker.policy.counters["prefix_queries"] - before,
        "labels": worker.labels(),
    }


def chunked_prefill() -> Any:
    """A prompt of three chunks is admitted once, when its first chunk is."""
    worker = Worker(chunked_prefill_tokens=256)
    worker.submit("long", "L", [(1, 600)])
    labels = []
    worker.step()
    labels.append(worker.labels())
    worker.submit("short", "S", [(2, 40)])
    while not worker.finished:
        worker.step()
        labels.append(worker.labels())
    worker.run()
    counters = worker.policy.counters
    admitted = counters["admitted_first_tier"] + counters["admitted_second_tier"]
    return {"labels": labels, "admitted": admitted, "finished": sorted(worker.finished)}


def retraction() -> Any:
    """Outputs outgrow the pool: retracted requests enter the queue anew."""
    worker = Worker(
        "--schedule-conservativeness",
        "0.05",
        "--max-total-tokens",
        "3000",
        "--routing-prefix-capacity",
        "16",
    )
    for i in range(8):
        worker.submit(f"r{i}", f"L{i}", [(i, 300)], output=900)
    entered = []
    retracted: set[str] = set()
    for _ in range(4000):
        worker.step()
        for req in worker.scheduler.waiting_queue:
            if req.retraction_count and req.rid not in retracted:
                retracted.add(req.rid)
                entered.append(req.routing_prefix_entry)
        if len(worker.finished) == 8:
            break
    worker.run()
    return {
        "finished": sorted(worker.finished),
        "retracted": len(retracted),
        "entries_are_new": all(e is None or e.sequence > 8 for e in entered),
        "labelled": worker.policy.counters["labelled"],
        "held": len(worker.labels()),
    }


def overlap_schedule() -> Any:
    return admission_order(overlap=True)


def no_prefix_cache() -> Any:
    """Without a prefix cache the policy is first come, first served."""
    log = io.StringIO()
    logging.getLogger("sglang").addHandler(logging.StreamHandler(log))
    logging.getLogger("sglang.srt.managers.routing_prefix").setLevel("WARNING")
    worker = Worker(
        "--disable-radix-cache", "--log-level", "warning", "--max-running-requests", "1"
    )
    for name in "abc":
        worker.submit(name, "L", [(1, 50)])
    return {
        "policy": worker.scheduler.policy.policy.value,
        "active": worker.policy is not None,
        "batches": worker.run(),
        "log": log.getvalue(),
    }


def abort_while_waiting() -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    worker = Worker("--max-running-requests", "1", "--routing-prefix-capacity", "9")
    worker.submit("running", "R", [(1, 50)], output=30)
    worker.step()
    for name in ("first", "gone", "last"):
        worker.submit(name, name, [(2, 50)])
    worker.step()
    worker.scheduler.policy.calc_priority(worker.scheduler.waiting_queue)
    worker.scheduler.abort_request(AbortReq(rid="gone"))
    batches = worker.run()
    return {"batches": batches, "labels": worker.labels()}


def blocked_head() -> Any:
    """The head needs more than is free, the next would fit: nobody passes it."""
    worker = Worker(cache_bytes=3e5, ratio=9.0, chunked_prefill_tokens=60_000)
    free = worker.scheduler.max_total_num_tokens
    worker.submit("fills", "F", [(1, free - 1000)], output=20)
    worker.step()
    worker.submit("head", "H", [(2, 5000)])
    worker.submit("fits", "S", [(3, 200)])
    counts = []
    for _ in range(3):
        worker.scheduler.running_batch.batch_is_full = False
        worker.step()
        counts.append(worker.policy.counters["blocked_passes"])
    waiting = [req.rid for req in worker.scheduler.waiting_queue]
    return {"counts": counts, "waiting": waiting}


def prefill_node() -> Any:
    """The prefill node of a pair builds its batches through the same function."""
    worker = Worker()
    scheduler = worker.scheduler
    # No other node is there to send anything to, so nothing is left to bootstrap.
    scheduler.resolve_waiting_queue_bootstrap = lambda: None
    worker.policy.labels.touch("warm")
    for name in ("cold", "warm"):
        worker.submit(name, name, [(1, 50)])
    with torch.no_grad():
        plan = scheduler.get_next_disagg_prefill_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=None
        )
    batch = [req.rid for req in plan.batch_to_run.reqs]
    return {"batch": batch, "labels": worker.labels()}


def dp_attention() -> Any:
    """Two ranks in one world: each orders, and remembers, only what it serves."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [start_fork(partial(dp_rank, rank, port)) for rank in range(2)]
    return [outcome_of(*rank) for rank in ranks]


def dp_rank(rank: int, port: int) -> Any:
    place = runtime_context.SpawnRanks(world_rank=rank, dp_rank=rank, gpu_id=rank)
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|0"
    with patch.object(runtime_context, "SpawnRanks", lambda **_: place):
        worker = Worker(
            *("--tp-size", "2", "--attn-dp-size", "2", "--nccl-port", str(port)),
            *("--max-running-requests", "2", "--routing-prefix-capacity", "4"),
        )
    served = [f"{rank}{name}" for name in "AB"]
    for turn, label in enumerate(served):
        if turn <= 1 - rank:  # rank 1 serves one trajectory less
            worker.submit(f"first {label}", label, [(1, 60)])
        worker.steps(8)
    worker.submit("cold", "cold", [(2, 60)])
    worker.submit("warm", served[0], [(1, 60), (3, 10)])
    worker.batches = []
    worker.steps(16)
    parallel = runtime_context.get_parallel()
    return {
        "rank": [parallel.attn_dp_rank, parallel.attn_dp_size],
        "batches": worker.batches,
        "labels": worker.labels(),
        "labelled": worker.policy.counters["labelled"],
    }


def capacity_default() -> Any:
    worker = Worker("--max-running-requests", "7")
    snapshot = worker.policy.snapshot()
    return {name: snapshot[name] for name in ("capacity", "capacity_origin")}


def capacity_flag() -> Any:
    worker = Worker(
        "--routing-prefix-capacity", "3", "--routing-prefix-overtake-limit", "5"
    )
    snapshot = worker.policy.snapshot()
    names = ("capacity", "capacity_origin", "overtake_limit")
    return {name: snapshot[name] for name in names}


def seconds(policy: str) -> Callable[[], Any]:
    def measure() -> Any:
        worker = Worker(schedule_policy=policy)
        for i in range(6):
            worker.submit(str(i), f"L{i % 3}", [(i % 3, 60)])
        worker.run()
        scheduler = worker.scheduler
        entries = [getattr(scheduler.policy, "routing_prefix", None)]
        return {
            "seconds": scheduler.policy.priority_seconds,
            "other": entries == [None],
        }

    return measure


SCENARIOS: dict[str, Callable[[], Any]] = {
    "admission_order": admission_order,
    "chunked_prefill": chunked_prefill,
    "retraction": retraction,
    "overlap_schedule": overlap_schedule,
    "no_prefix_cache": no_prefix_cache,
    "abort_while_waiting": abort_while_waiting,
    "blocked_head": blocked_head,
    "prefill_node": prefill_node,
    "dp_attention": dp_attention,
    "capacity_default": capacity_default,
    "capacity_flag": capacity_flag,
    **{f"seconds_{policy}": seconds(policy) for policy in POLICIES},
}


def in_fork(scenario: Callable[[], Any]) -> Any:
    """Run a scenario in a child; return its result, or its traceback as a string."""
    return outcome_of(*start_fork(scenario))


def start_fork(scenario: Callable[[], Any]) -> tuple[int, int]:
    """Run a scenario in a child; return its process id and where it will answer."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result: Any = scenario()
        except BaseException:
            result = traceback.format_exc()
        with os.fdopen(write, "w") as out:
            json.dump(result, out)
        os._exit(0)
    os.close(write)
    return child, read


def outcome_of(child: int, read: int) -> Any:
    """Wait for a child; return its result, or its traceback as a string."""
    with os.fdopen(read) as source:
        text = source.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "the child died"


def main() -> None:
    virtual_boot.prepare_process()
    for name in sys.argv[1:] or SCENARIOS:
        print(json.dumps({name: in_fork(SCENARIOS[name])}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
