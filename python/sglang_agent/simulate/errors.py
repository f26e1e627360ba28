"""What can go wrong in a simulation."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """The run cannot go on; the message gives the cause, a worker's included."""


class RequestRefused(Exception):
    """The engine gave one request up (too long, say); its trajectory has failed."""
