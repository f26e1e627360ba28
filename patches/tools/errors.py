"""The one exception of these tools."""

from __future__ import annotations


class SeriesError(Exception):
    """Something about the pin, the series or the tree is wrong; one line says what."""
