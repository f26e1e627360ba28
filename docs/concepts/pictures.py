"""Draws the pictures of the concept pages with the product's own policies.

    python docs/concepts/pictures.py

Each picture is an SVG beside this file; the same code gives the same picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from sgl_router.policies import make_policy

HERE = Path(__file__).resolve().parent
GIB = 1 << 30

mpl.rcParams.update(
    {"svg.hashsalt": "makespan", "svg.fonttype": "none", "font.size": 9}
)


def capacities(
    ratios: Sequence[float],
    memory: float = 40 * GIB,
    per_kv: float = 60_000 * 70 * 1024,
    per_state: float = 5 * 40 * (1 << 20),
) -> list[tuple[float, float]]:
    """KV and state capacity (equation 3) for each ratio of state to KV memory.

    ``per_kv`` and ``per_state`` are the bytes of one trajectory in each pool.
    """
    return [
        (memory / (1 + ratio) / per_kv, memory * ratio / (1 + ratio) / per_state)
        for ratio in ratios
    ]


def placements(
    policy_name: str, workers: int, requests: int, label: str
) -> list[list[int]]:
    """In-flight counts after each of ``requests`` that stay open, one label for all."""
    urls = [f"http://worker-{n}:30000" for n in range(workers)]
    policy = make_policy(policy_name, urls)
    loads = dict.fromkeys(urls, 0)
    history = []
    for _ in range(requests):
        loads[policy.pick(label, loads)] += 1
        history.append(list(loads.values()))
    return history


def _axes(width: float = 6.4, height: float = 3.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_capacity() -> Figure:
    """The two capacities against the ratio; they cross at the balancing one."""
    figure, axes = _axes()
    ratios = [10 ** (-2.5 + 3 * i / 200) for i in range(201)]
    kv, state = zip(*capacities(ratios), strict=True)
    axes.plot(ratios, kv, label="KV pool", color="tab:blue")
    axes.plot(ratios, state, label="state pool", color="tab:orange")
    axes.fill_between(
        ratios, [min(pair) for pair in zip(kv, state, strict=True)], color="0.9"
    )
    balance = 5 * 40 * (1 << 20) / (60_000 * 70 * 1024)
    for ratio, text in ((balance, "balance"), (0.9, "default")):
        both = min(capacities([ratio])[0])
        axes.plot([ratio], [both], "o", color="black")
        axes.annotate(
            f"{text} {ratio:.2g}: {both:.1f}",
            (ratio, both),
            xytext=(6, 6),
            textcoords="offset points",
        )
    axes.set(xscale="log", ylim=(0, 20), xlabel="state memory / KV memory, r")
    axes.set_ylabel("trajectories that fit")
    axes.legend(frameon=False)
    return figure


def draw_lbch() -> Figure:
    """One label's open requests, over four workers, under two policies."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    for axes, name in zip(
        figure.subplots(1, 2, sharey=True), ("lbch", "consistent_hashing"), strict=True
    ):
        counts = list(zip(*placements(name, 4, 20, "sample-7"), strict=True))
        steps = list(range(1, 21))
        for number, line in enumerate(counts):
            axes.step(steps, line, where="post", label=f"worker-{number}")
        axes.set(title=name, xlabel="open requests of one trajectory label")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("in flight on the worker")
    figure.axes[1].legend(frameon=False)
    return figure


PICTURES = {"capacity": draw_capacity, "lbch": draw_lbch}


def main() -> None:
    for name, draw in PICTURES.items():
        draw().savefig(HERE / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
