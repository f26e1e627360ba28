"""Writes the 1,000 placements that every implementation of LBCH must agree on.

Algorithm 1 and equation 9 of arXiv:2611.16661, written here once more, straight from
the text and apart from the gateway's policy, so that the two check each other. Lines of
``vectors.txt``: label, load factor, gap, pick, branch, loads. Worker ``i`` is
``http://worker-i:30000``; a load of ``-`` marks one that is registered but out.

    python gateway-patch/make_vectors.py
"""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

from blake3 import blake3

FILE = (
    Path(__file__).parent
    / "files/model_gateway/src/policies/bounded_consistent_hashing/vectors.txt"
)
CASES = 1000
VIRTUAL_NODES = 150
FACTORS = ("1", "1.1", "1.25", "1.5", "2")
GAPS = (0, 0, 0, 1, 2, 8)


def position(text: str) -> int:
    """The first 8 bytes, little-endian, of the text's BLAKE3 hash."""
    return int.from_bytes(blake3(text.encode()).digest()[:8], "little")


def clockwise(label: str, workers: int) -> list[int]:
    """The workers in the order in which the ring meets them after ``label``."""
    nodes = [
        (position(f"http://worker-{worker}:30000#{node}"), worker)
        for worker in range(workers)
        for node in range(VIRTUAL_NODES)
    ]
    start = position(label)
    nodes.sort(key=lambda node: (node[0] < start, node[0]))
    return list(dict.fromkeys(worker for _, worker in nodes))


def place(
    label: str, factor: str, gap: int, loads: list[int | None]
) -> tuple[int, str]:
    """Worker and branch; exact arithmetic, so that no rounding decides."""
    present = [load for load in loads if load is not None]
    mean = Fraction(sum(present) + 1, len(present))
    bound = max(mean * Fraction(factor), mean + gap)
    order = [w for w in clockwise(label, len(loads)) if loads[w] is not None]
    for worker in order:
        if (loads[worker] or 0) <= bound:
            return worker, "home" if worker == order[0] else "spill"
    raise AssertionError("a factor of at least 1 leaves somebody eligible")


def lines(seed: int = 0) -> list[str]:
    """The file's lines; half of the cases load the home worker, so that it spills."""
    rng = random.Random(seed)
    out = ["# label factor gap pick branch loads, by gateway-patch/make_vectors.py"]
    for number in range(CASES):
        label = f"{rng.choice(('sample', 'swe', 't'))}-{rng.randrange(10**6)}/{number}"
        factor, gap = rng.choice(FACTORS), rng.choice(GAPS)
        loads: list[int | None] = [
            rng.choice((0, rng.randrange(4), rng.randrange(40)))
            for _ in range(rng.randint(1, 8))
        ]
        order = clockwise(label, len(loads))
        if number % 2:
            loads[order[0]] = rng.randint(5, 60)
        for worker in order[1:]:
            if rng.random() < 0.1:
                loads[worker] = None
        if len(loads) > 1 and rng.random() < 0.1:
            loads[order[0]] = None
            loads[order[1]] = loads[order[1]] or 0
        pick, branch = place(label, factor, gap, loads)
        shown = ",".join("-" if load is None else str(load) for load in loads)
        out.append(f"{label} {factor} {gap} {pick} {branch} {shown}")
    return out


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
