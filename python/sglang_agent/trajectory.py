"""What the schedulers know of a trajectory: its label and its observed progress."""

from __future__ import annotations


class Trajectory:
    """One sample's execution as the action scheduler sees it.

    ``turns`` is n_j and ``mean_turn_s`` the mean inference duration of equation 14,
    both over the turns completed so far. Share one object between all jobs of a
    sample and tell it of each finished inference turn.
    """

    __slots__ = ("label", "total_turn_s", "turns")

    def __init__(self, label: str) -> None:
        self.label = label
        self.turns = 0
        self.total_turn_s = 0.0

    def complete_turn(self, duration_s: float) -> None:
        """Record a finished inference turn that took ``duration_s`` seconds.

        Raises ValueError when the duration is negative or not finite.
        """
        if not 0.0 <= duration_s < float("inf"):
            raise ValueError(f"duration_s must be finite and >= 0, got {duration_s!r}")
        self.turns += 1
        self.total_turn_s += duration_s

    @property
    def mean_turn_s(self) -> float:
        """Mean duration of the completed turns, 0 before the first one."""
        return self.total_turn_s / self.turns if self.turns else 0.0

    def __repr__(self) -> str:
        return f"Trajectory({self.label!r}, turns={self.turns})"
