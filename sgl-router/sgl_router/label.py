"""The trajectory label: which values are valid and how one is written."""

from __future__ import annotations

import re

LABEL_HEADER = "x-smg-routing-key"
"""The header in which the label travels on to the worker."""

LABEL_MAX_BYTES = 128
"""Longest label, in bytes."""

_VALID = re.compile(rb"[\x21-\x7e]{1,%d}" % LABEL_MAX_BYTES)


def parse_label(value: bytes) -> str | None:
    """The label in a header value, or None when it is not 1 to 128 visible ASCII bytes."""
    return value.decode("ascii") if _VALID.fullmatch(value) else None
