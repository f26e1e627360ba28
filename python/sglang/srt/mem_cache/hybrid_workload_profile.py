"""The profile of an agent workload, as ``sglang_agent profile`` writes it.

A profile is what the capacity model (:mod:`hybrid_capacity`) needs to know about
past trajectories: above all how long their context was at the last turn.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

PROFILE_VERSION = 1


class ProfileError(ValueError):
    """A workload profile that cannot be used; names the file, field and value."""

    def __init__(self, path: str, field: str, value: object, allowed: str) -> None:
        shown = "missing" if value is None else repr(value)
        super().__init__(f"{path}: {field} is {shown}; it must be {allowed}")


@dataclass(frozen=True, slots=True)
class WorkloadProfile:
    """The part of a profile that sizing needs.

    mean_final_context: L_kv(D) of equation 2, mean tokens at the last turn.
    p90_final_context, max_final_context: tokens, None when not recorded.
    forked_share: share of trajectories that branch off from an earlier turn.
    states_per_path: states a path should keep to serve those, None if not recorded.
    """

    path: str
    name: str
    trajectories: int
    mean_final_context: float
    p90_final_context: float | None
    max_final_context: float | None
    forked_share: float
    states_per_path: int | None


def load_workload_profile(path: str) -> WorkloadProfile:
    """Read and check a profile.

    Raises:
        ProfileError: one line that names the file, the field and the value.
    """
    document = _Document(path, _read_object(path))
    version = document.fields.get("version")
    if version != PROFILE_VERSION or isinstance(version, bool):
        raise ProfileError(path, "version", version, f"{PROFILE_VERSION}")
    context = _Document(
        path, document.nested("final_context_tokens"), "final_context_tokens."
    )
    mean = context.length("mean")
    longest = context.optional_length("max")
    if longest is not None and longest < mean:
        raise ProfileError(
            path, "final_context_tokens.max", longest, f"at least the mean, {mean:g}"
        )
    return WorkloadProfile(
        path=path,
        name=str(document.fields.get("name") or Path(path).stem),
        trajectories=document.count("trajectories"),
        mean_final_context=mean,
        p90_final_context=context.optional_length("p90"),
        max_final_context=longest,
        forked_share=document.share("forked_share"),
        states_per_path=document.optional_count("states_per_path"),
    )


def exit_on_bad_profile(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> None:
    """End a server's command line with one line and status 2 at a bad profile."""
    if args.hybrid_workload_profile is None:
        return
    try:
        load_workload_profile(args.hybrid_workload_profile)
    except ProfileError as error:
        message = f"--hybrid-workload-profile: {error}"
        parser.exit(2, f"{parser.prog}: error: {message}\n")


def _read_object(path: str) -> dict[str, Any]:
    if not path.strip():
        raise ProfileError(repr(path), "path", path, "the path of a workload profile")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ProfileError(path, "file", reason, "a readable JSON file") from error
    try:
        document = json.loads(text)
    except ValueError as error:
        shown = text.strip()[:40]
        raise ProfileError(path, "content", shown, "a JSON object") from error
    if not isinstance(document, dict):
        raise ProfileError(path, "content", text.strip()[:40], "a JSON object")
    return document


@dataclass(frozen=True, slots=True)
class _Document:
    """One object of the profile, with the checks that name its fields."""

    path: str
    fields: dict[str, Any]
    prefix: str = ""

    def nested(self, field: str) -> dict[str, Any]:
        value = self.fields.get(field)
        if not isinstance(value, dict) or not value:
            raise self._error(field, value, "an object with at least a mean")
        return value

    def length(self, field: str) -> float:
        value = self.fields.get(field)
        if not _is_number(value) or not math.isfinite(value) or value <= 0:
            raise self._error(field, value, "a finite number of tokens above 0")
        return float(value)

    def optional_length(self, field: str) -> float | None:
        return None if self.fields.get(field) is None else self.length(field)

    def count(self, field: str) -> int:
        value = self.fields.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(field, value, "a whole number above 0")
        return value

    def optional_count(self, field: str) -> int | None:
        return None if self.fields.get(field) is None else self.count(field)

    def share(self, field: str) -> float:
        value = self.fields.get(field)
        if not _is_number(value) or not 0 <= value <= 1:
            raise self._error(field, value, "a share between 0 and 1")
        return float(value)

    def _error(self, field: str, value: object, allowed: str) -> ProfileError:
        return ProfileError(self.path, self.prefix + field, value, allowed)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
