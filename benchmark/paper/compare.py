"""Holds the simulated results against the paper, claim by claim and cell by cell.

Reads what ``reproduce.py`` has left at every scale, writes ``claims.json``, draws the
figures, and rewrites the tables in README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cell_bars import draw
from claims import CHECKS
from makespans import cost_line, makespan_lines
from reproduce import RESULTS, Store, Variant, scales_in

MARK_BEGIN, MARK_END = "<!-- claims -->", "<!-- end of claims -->"


class Verdict(NamedTuple):
    """What one scale says of a claim; ``holds`` is None if it was not run."""

    ours: str
    holds: bool | None


class Judged(NamedTuple):
    """A claim and its verdict at each scale."""

    where: str
    text: str
    paper: str
    verdicts: dict[str, Verdict]


def main(arguments: list[str] | None = None) -> int:
    """Evaluate, draw, and rewrite the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder = parser.parse_args(arguments).results
    stores = {str(scale): Store(folder, Variant(scale)) for scale in scales_in(folder)}
    if not stores:
        parser.error(f"results: {folder} holds none; run reproduce.py first")
    judged = judge(stores)
    lines = report(stores, judged)
    (folder / "claims.json").write_text(json_of(judged))
    draw(stores, folder)
    readme = folder.parent / "README.md"
    if readme.exists():
        rewrite(readme, lines)
    print("\n".join(lines))
    return 0


def judge(stores: Mapping[str, Store]) -> list[Judged]:
    """Every claim at every scale."""
    found = []
    for evaluate in CHECKS:
        claims = {scale: evaluate(store) for scale, store in stores.items()}
        first = next(iter(claims.values()))
        verdicts = {s: Verdict(claim.ours, claim.holds) for s, claim in claims.items()}
        found.append(Judged(first.where, first.text, first.paper, verdicts))
    return found


def json_of(judged: Sequence[Judged]) -> str:
    """The verdicts for programs."""
    rows = [
        {
            **claim._asdict(),
            "verdicts": {s: v._asdict() for s, v in claim.verdicts.items()},
        }
        for claim in judged
    ]
    return json.dumps(rows, indent=1) + "\n"


def report(stores: Mapping[str, Store], judged: Sequence[Judged]) -> list[str]:
    """All tables, in Markdown."""
    lines = list(claim_table(list(stores), judged))
    for scale, store in stores.items():
        lines += ["", f"Scale {scale}: {cost_line(store)}", "", *makespan_lines(store)]
    return lines


def claim_table(scales: Sequence[str], judged: Sequence[Judged]) -> Iterator[str]:
    """One row a claim, one column a scale; then how many hold."""
    yield f"| figure | claim | paper | {' | '.join(f'scale {s}' for s in scales)} |"
    yield "|---|---|---|" + "---|" * len(scales)
    for claim in judged:
        cells = " | ".join(cell_of(claim.verdicts[scale]) for scale in scales)
        yield f"| {claim.where} | {claim.text} | {claim.paper} | {cells} |"
    for scale in scales:
        verdicts = [claim.verdicts[scale].holds for claim in judged]
        run = [holds for holds in verdicts if holds is not None]
        yield ""
        yield (
            f"Scale {scale}: {sum(run)} of {len(run)} claims that were run hold; "
            f"{len(verdicts) - len(run)} were not run."
        )


def cell_of(verdict: Verdict) -> str:
    """Ours, and whether it fails."""
    return verdict.ours if verdict.holds is not False else f"**no**: {verdict.ours}"


def rewrite(readme: Path, lines: Sequence[str]) -> None:
    """Replace what is between the marks."""
    before, _, rest = readme.read_text().partition(MARK_BEGIN)
    _, _, after = rest.partition(MARK_END)
    body = "\n".join(lines)
    readme.write_text(f"{before}{MARK_BEGIN}\n{body}\n{MARK_END}{after}")


if __name__ == "__main__":
    sys.exit(main())
