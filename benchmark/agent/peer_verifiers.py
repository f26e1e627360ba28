"""The same work in verifiers (its in-process tool environment of 0.1), over HTTP.

Run by the Python of an environment with ``verifiers<0.2``: since 0.2 every rollout is
a process of its own, which is other work.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import time
from typing import Any

import verifiers as vf
import workload
from datasets import Dataset
from verifiers.types import ClientConfig

KEY_VARIABLE = "BENCH_STUB_KEY"


async def look(turn: int) -> str:
    """Look it up.

    Args:
        turn: Which turn this is.
    """
    return "found"


def environment(trajectories: int) -> vf.ToolEnv:
    questions = [f"Task {n}: look it up." for n in range(trajectories)]
    return vf.ToolEnv(
        dataset=Dataset.from_dict(
            {"question": questions, "answer": [""] * trajectories}
        ),
        tools=[look],
        max_turns=workload.TURNS + 1,
        rubric=vf.Rubric(funcs=[lambda **_: 0.0]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=workload.TRAJECTORIES)
    options = parser.parse_args()
    workload.pin(workload.CLIENT_CORE)
    os.environ[KEY_VARIABLE] = "none"
    work = environment(options.trajectories)
    with workload.stub_server(0.0) as url:
        client = ClientConfig(api_base_url=f"{url}/v1", api_key_var=KEY_VARIABLE)
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        found = asyncio.run(
            work.evaluate(
                client,
                "stub",
                num_examples=options.trajectories,
                rollouts_per_example=1,
                max_concurrent=workload.SAMPLE_CONCURRENCY,
            )
        )
        wall_s = time.monotonic() - start_s
        cpu_s = time.process_time() - start_cpu_s
    check(found, options.trajectories)
    turns = options.trajectories * workload.TURNS
    version = importlib.metadata.version("verifiers")
    print(
        json.dumps(
            {
                "contender": f"verifiers {version}",
                "turns": turns,
                "turns_per_s_whole": turns / wall_s,
                "turns_per_cpu_s": turns / cpu_s,
            }
        )
    )


def check(found: dict[str, Any], trajectories: int) -> None:
    """Refuse a figure for work that was not done."""
    turns = sum(
        message["role"] == "assistant"
        for rollout in found["outputs"]
        for message in rollout["completion"]
    )
    if turns != trajectories * workload.TURNS:
        raise SystemExit(f"{turns} turns were done instead of all")


if __name__ == "__main__":
    main()
