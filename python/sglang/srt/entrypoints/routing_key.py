"""The routing key of a request: one rule for every inference route."""

from __future__ import annotations

from typing import Any

HEADER = "x-smg-routing-key"


def apply_header(obj: Any, request: Any) -> None:
    """Let the routing key header of the HTTP request win over the body's field.

    ``request`` may be None (the offline engine) or come without headers (gRPC).
    """
    key = getattr(request, "headers", {}).get(HEADER)
    if key:
        obj.routing_key = key
