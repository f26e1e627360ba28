"""Machine instructions that routing-prefix's own calculation takes, without noise.

The policy runs alone, over fake requests, in a closed loop: every pass admits one
request and one arrives, while ``waiting`` others wait. Valgrind counts instructions;
what the interpreter and the loop itself take is counted in a run without a policy and
subtracted. Beside it stand Algorithm 2 as it is printed (score every waiting request,
sort all of them) and the floor that a policy has which looks at each waiting request
once a pass and asks for the prefix of each labelled request once. Prefix queries
themselves are free here: what one takes is the cache's business.

    python benchmark/scheduler/instructions.py        (needs valgrind; about a minute)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MANAGERS = Path(__file__).parents[2] / "python/sglang/srt/managers"
WAITING = [16, 128, 1024]
PASSES = 1200

Policy = tuple[Callable[[list[Any]], None], Callable[[list[Any]], None]]
"""Orders the waiting queue; takes note of admitted requests."""


def load_policy() -> ModuleType:
    """Import the policy without SGLang, which it needs for its settings only."""
    stubs: dict[str, dict[str, Any]] = {
        "sglang": {"__path__": []},
        "sglang.srt": {"__path__": []},
        "sglang.srt.constants": {"HEALTH_CHECK_RID_PREFIX": "HEALTH_CHECK"},
        "sglang.srt.managers": {"__path__": [str(MANAGERS)]},
        "sglang.srt.managers.routing_prefix_args": {
            "POLICY_NAME": "routing-prefix",
            "resolve_settings": None,
        },
    }
    for name, contents in stubs.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    from sglang.srt.managers import routing_prefix

    return routing_prefix


def nothing(_: int) -> Policy:
    """What the loop takes by itself."""
    return lambda queue: None, lambda admitted: None


def routing_prefix(capacity: int) -> Policy:
    """The engine's policy."""
    policy = load_policy().RoutingPrefix(capacity)
    return lambda queue: policy.sort(queue, prefix_hit), policy.admit


def printed(capacity: int) -> Policy:
    """Algorithm 2, line by line, with a set that is kept in order."""
    labels: dict[str, None] = {}

    def key(req: Any) -> tuple[int, int, int]:
        if req.routing_key not in labels:
            return (1, 0, req.entry)
        if req.hit is None:
            req.hit = prefix_hit(req)
        return (0, -req.hit, req.entry)

    def admit(admitted: list[Any]) -> None:
        for req in admitted:
            labels.pop(req.routing_key, None)
            labels[req.routing_key] = None
            if len(labels) > capacity:
                del labels[next(iter(labels))]

    return lambda queue: queue.sort(key=key), admit


def floor(_: int) -> Policy:
    """Each waiting request is looked at once, each labelled one is asked for once."""

    def look(queue: list[Any]) -> None:
        for req in queue:
            if req.hit is None:
                req.hit = prefix_hit(req)

    return look, lambda admitted: None


POLICIES: dict[str, Callable[[int], Policy]] = {
    "nothing": nothing,
    "floor": floor,
    "printed": printed,
    "routing-prefix": routing_prefix,
}


def prefix_hit(req: Any) -> int:
    """The recorded answer: the query itself is not what is measured."""
    hit: int = req.num_matched_prefix_tokens
    return hit


def drive(policy: Policy, waiting: int, passes: int) -> None:
    """A closed loop of ``waiting`` + 1 trajectories, half as many labels in the set."""
    order, admit = policy
    rng = random.Random(0)
    queue = [request(number, number, rng) for number in range(waiting)]
    for number in range(waiting, waiting + passes):
        queue.append(request(number, number % (waiting + 1), rng))
        order(queue)
        admit([queue.pop(0)])


def request(number: int, trajectory: int, rng: random.Random) -> Any:
    """What the policy reads of a request."""
    return SimpleNamespace(
        rid=str(number),
        entry=number,
        routing_key=f"trajectory-{trajectory}",
        session=None,
        session_id=None,
        routing_prefix_entry=None,
        retraction_count=0,
        num_matched_prefix_tokens=rng.randrange(50_000),
        hit=None,
    )


def instructions(policy: str, waiting: int, passes: int) -> int:
    """Instructions of one whole process."""
    # Not at the top: what is counted need not import it.
    import re
    import subprocess

    command = [
        *("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"),
        *(sys.executable, "-I", "-S", __file__, policy, str(waiting), str(passes)),
    ]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"},
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


def per_pass(policy: str, waiting: int) -> float:
    """Instructions of one pass: start-up and the first ordering cancel out."""
    long, short = PASSES, PASSES // 4
    return (
        instructions(policy, waiting, long) - instructions(policy, waiting, short)
    ) / (long - short)


def main() -> None:
    """Count, or be what is counted."""
    if len(sys.argv) > 1:
        waiting, passes = int(sys.argv[2]), int(sys.argv[3])
        drive(POLICIES[sys.argv[1]](max(1, waiting // 2)), waiting, passes)
        return
    print("| waiting | floor | as printed | routing-prefix |")
    print("|---|---|---|---|")
    for waiting in WAITING:
        loop = per_pass("nothing", waiting)
        counts = [per_pass(name, waiting) - loop for name in list(POLICIES)[1:]]
        cells = " | ".join(f"{count:,.0f}" for count in counts)
        print(f"| {waiting} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
