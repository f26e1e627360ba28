"""The workload profile: what a batch's trajectories need from the cache.

L_kv(D) of equation 2 is ``final_context_tokens.mean``: the tokens that a complete
trajectory holds at its final inference turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from sglang_agent.errors import UsageError
from sglang_agent.report.spans import spread

PROFILE_VERSION = 1


class Turn(msgspec.Struct, frozen=True):
    """One request as far as a source knows it; unknown numbers are None.

    ``messages`` are digests of the messages in the request, one each, so that
    contexts can be compared; ``environment_s`` is the service time of the job that
    the turn led to.
    """

    input_tokens: int
    output_tokens: int | None = None
    index: int | None = None
    messages: tuple[int, ...] | None = None
    environment_s: float | None = None

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache when the turn is done."""
        return self.input_tokens + (self.output_tokens or 0)


class Contexts(msgspec.Struct, frozen=True):
    """The turns of one trajectory, in order, at least one."""

    id: str
    turns: list[Turn]


class Quantity(msgspec.Struct, frozen=True):
    """Distribution of one measured quantity."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class WorkloadProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The profile file. A quantity that no source knows is None.

    ``forked_share`` is the share of trajectories with a turn that goes on from an
    earlier turn than the last; ``shrunk_share`` of those whose context became
    shorter. ``states_per_path`` is how many recurrent states a path should keep so
    that 9 of 10 trajectories find each state they go back to.
    """

    version: int = PROFILE_VERSION
    name: str
    trajectories: int
    turns: Quantity
    final_context_tokens: Quantity
    peak_context_tokens: Quantity
    output_tokens_per_turn: Quantity | None
    environment_seconds: Quantity | None
    forked_share: float
    shrunk_share: float
    states_per_path: int
    incomplete_trajectories: int = 0
    skipped_lines: int = 0


class Path(msgspec.Struct, frozen=True):
    """How a trajectory's contexts follow each other."""

    returns: int
    shrinks: int


def build_profile(
    name: str,
    trajectories: Sequence[Contexts],
    *,
    incomplete: int = 0,
    skipped_lines: int = 0,
) -> WorkloadProfile:
    """Measure complete trajectories; raises :class:`UsageError` when there is none.

    ``incomplete`` trajectories and ``skipped_lines`` were left out by the reader and
    are only recorded.
    """
    if not trajectories:
        raise UsageError(
            f"{name}: no complete trajectory to measure "
            f"({incomplete} incomplete, {skipped_lines} lines skipped)"
        )
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    paths = [follow(trajectory.turns) for trajectory in trajectories]
    returns = sorted(float(path.returns) for path in paths)
    ninth = returns[math.ceil(0.9 * len(returns)) - 1]
    return WorkloadProfile(
        name=name,
        trajectories=len(trajectories),
        turns=_quantity([len(t.turns) for t in trajectories]),
        final_context_tokens=_quantity(
            [t.turns[-1].context_tokens for t in trajectories]
        ),
        peak_context_tokens=_quantity(
            [max(turn.context_tokens for turn in t.turns) for t in trajectories]
        ),
        output_tokens_per_turn=_known([turn.output_tokens for turn in turns]),
        environment_seconds=_known([turn.environment_s for turn in turns]),
        forked_share=sum(path.returns > 0 for path in paths) / len(paths),
        shrunk_share=sum(path.shrinks > 0 for path in paths) / len(paths),
        states_per_path=1 + int(ninth),
        incomplete_trajectories=incomplete,
        skipped_lines=skipped_lines,
    )


def follow(turns: Sequence[Turn]) -> Path:
    """Count the turns that go back to an earlier one, and those that are shorter.

    Where messages are known, a turn that starts with those of an earlier turn but
    not with those of the last went back, and one that starts with neither was
    rewritten (compaction). Where only lengths are known, the two look alike when
    the context could hold an earlier turn's; then it counts as having gone back,
    which is the reading that keeps more states. Two turns with one index are a fork.
    """
    returns = shrinks = 0
    for place in range(1, len(turns)):
        before, turn = turns[place - 1], turns[place]
        shrinks += turn.input_tokens < before.input_tokens
        returns += _went_back(turns[: place - 1], before, turn)
    return Path(returns, shrinks)


def _went_back(earlier: Sequence[Turn], before: Turn, turn: Turn) -> bool:
    if turn.messages is not None and before.messages is not None:
        if _starts_with(turn, before) and turn.messages != before.messages:
            return False
        return turn.messages == before.messages or any(
            _starts_with(turn, old) for old in earlier
        )
    if turn.index is not None and turn.index == before.index:
        return True
    return turn.input_tokens < before.input_tokens and any(
        old.context_tokens <= turn.input_tokens for old in earlier
    )


def _starts_with(turn: Turn, old: Turn) -> bool:
    if turn.messages is None or old.messages is None:
        return False
    return turn.messages[: len(old.messages)] == old.messages


def advice(profile: WorkloadProfile) -> list[str]:
    """What the profile means for the cache's settings, in lines for people."""
    lines = []
    if profile.forked_share > 0:
        lines.append(
            f"{profile.forked_share:.1%} of the trajectories go on from an earlier turn: "
            "--mamba-max-states-per-path 1 keeps only the newest state of a path, so "
            f"those turns would find nothing; consider {max(profile.states_per_path, 2)}"
        )
    if profile.shrunk_share > 0:
        lines.append(
            f"{profile.shrunk_share:.1%} of the trajectories get a shorter context at some "
            f"turn; the longest they hold is {profile.peak_context_tokens.mean:,.0f} tokens "
            f"on average, {profile.final_context_tokens.mean:,.0f} at the end"
        )
    if profile.incomplete_trajectories:
        lines.append(
            f"{profile.incomplete_trajectories} trajectories that failed were left out"
        )
    if profile.skipped_lines:
        lines.append(f"{profile.skipped_lines} lines were left out")
    return lines


def _known(values: Sequence[float | None]) -> Quantity | None:
    known = [value for value in values if value is not None]
    return _quantity(known) if known else None


def _quantity(values: Sequence[float]) -> Quantity:
    measured = spread(values)
    return Quantity(
        measured.mean, measured.p50, measured.p90, measured.p99, measured.max
    )
