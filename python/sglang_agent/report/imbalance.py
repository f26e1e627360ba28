"""How unevenly requests and generated tokens fell on the workers.

The paper defines both measures for two workers (equations 17 to 20). For W workers
we take the sum of differences over all pairs,

    d = sum over i < j of |x_i - x_j|  /  ((W - 1) * sum of x_i)

which is the paper's |x_1 - x_2| / (x_1 + x_2) at W = 2, is 0 when all workers have
the same and 1 when one worker has everything, whatever W is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sglang_agent.report.spans import Span


def unevenness(loads: Sequence[float]) -> float | None:
    """d of the module's formula; None for fewer than two workers or no load."""
    total = math.fsum(loads)
    if len(loads) < 2 or total <= 0:
        return None
    # In ascending order the pairs' differences add up to a weighted sum.
    last = len(loads) - 1
    differences = math.fsum(
        (2 * place - last) * load for place, load in enumerate(sorted(loads))
    )
    return differences / (last * total)


def request_imbalance(spans: Mapping[str, Sequence[Span]]) -> float | None:
    """beta (equations 17 and 18): unevenness of in-flight requests over time.

    ``spans`` holds the requests of every worker, idle workers included. Only the
    time with more than one request in flight counts; None when there is none.
    """
    if len(spans) < 2:
        return None
    names = list(spans)
    events = sorted(
        (instant, step, place)
        for place, name in enumerate(names)
        for start, end in spans[name]
        for instant, step in ((start, 1), (end, -1))
    )
    loads = [0.0] * len(names)
    weighted: list[float] = []
    retained: list[float] = []
    before = 0.0
    for instant, step, place in events:
        if sum(loads) > 1 and instant > before:
            weighted.append((unevenness(loads) or 0.0) * (instant - before))
            retained.append(instant - before)
        loads[place] += step
        before = instant
    total = math.fsum(retained)
    return math.fsum(weighted) / total if total > 0 else None
