"""The action scheduler alone: cost of queueing and of dispatching at depth.

push    microseconds to queue a job while ``--waiting`` others wait
pop     microseconds to end a job and hand its slot to the next in order
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import workload

from sglang_agent import policies
from sglang_agent.garbage import rare_collections
from sglang_agent.gate import Gate, Ticket, _NoWaker
from sglang_agent.policies import QueuedJob


def measure(waiting: int, samples: int, seed: int) -> dict[str, float]:
    chance = random.Random(seed)
    policy = policies.create("caas", band_s=30.0, duration_bucket_s=1.0)
    gate = Gate(1)
    holder = join(gate, policy, QueuedJob(0.0, 0, 0.0))
    jobs = [
        QueuedJob(chance.uniform(0, 600), chance.randrange(90), chance.uniform(0, 20))
        for _ in range(waiting + samples)
    ]
    for job in jobs[:waiting]:
        join(gate, policy, job)
    start_s = time.process_time()
    for job in jobs[waiting:]:
        join(gate, policy, job)
    push_s = time.process_time() - start_s
    start_s = time.process_time()
    for _ in range(samples):
        gate.release(holder)
        holder = next(iter(gate._held))
    pop_s = time.process_time() - start_s
    return {
        "waiting": waiting,
        "push_us": push_s / samples * 1e6,
        "pop_us": pop_s / samples * 1e6,
    }


def join(gate: Gate, policy: policies.JobPolicy, job: QueuedJob) -> Ticket:
    """Do what a slot does on entry, without a coroutine around it."""
    ticket = gate._ticket("sample", policy.key(job), None)
    gate._join(ticket, _NoWaker)
    return ticket


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    workload.pin(workload.CLIENT_CORE)
    with rare_collections():  # as in the program
        best = [
            measure(options.waiting, options.samples, options.seed) for _ in range(5)
        ]
    print(json.dumps(min(best, key=lambda found: found["push_us"] + found["pop_us"])))


if __name__ == "__main__":
    asyncio.run(main())
