"""Turns the JSON of a task's ``environment`` into typed settings, with clear errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_WHERE = re.compile(r"^(?P<what>.*?) - at `(?P<path>[^`]*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def parse(settings: Mapping[str, Any], into: type[T], where: str = "environment") -> T:
    """Validate ``settings``, the value of the field ``where``, as a msgspec struct.

    Raises ValueError with one line: the field, its value, and what is allowed.
    """
    try:
        return msgspec.convert(dict(settings), into)
    except msgspec.ValidationError as error:
        raise ValueError(_explain(str(error), settings, where)) from error


def _explain(message: str, settings: Mapping[str, Any], where: str) -> str:
    match = _WHERE.match(message)
    if match is None:
        return f"{where}: {message}"
    path = match["path"].removeprefix("$")
    value = _value_at(settings, path)
    shown = "" if value is None else f" is {value!r}"
    return f"{where}{path}{shown}: {match['what']}"


def _value_at(settings: Any, path: str) -> Any:
    """The value under a msgspec path; None where the path cannot be followed."""
    for key, index in _STEP.findall(path):
        try:
            settings = settings[key] if key else settings[int(index)]
        except (KeyError, IndexError, TypeError):
            return None
    return settings
