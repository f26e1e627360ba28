"""What routing may read from a body, for the options that ask for it."""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3

from sgl_router.label import parse_label


def _parsed(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; empty when it is anything else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def prompt_text(body: bytes) -> str:
    """The prompt as text, in the order the model reads it; "" when there is none."""
    request = _parsed(body)
    for field in ("messages", "input", "prompt", "text"):
        value = request.get(field)
        if isinstance(value, str):
            return value
        if value:
            return json.dumps(value)
    tokens = request.get("input_ids")
    return json.dumps(tokens) if tokens else ""


def body_label(body: bytes) -> str | None:
    """The ``routing_key`` field of a body, when it is a valid label."""
    value = _parsed(body).get("routing_key")
    if not isinstance(value, str) or not value.isascii():
        return None
    return parse_label(value.encode())


def content_label(body: bytes) -> str | None:
    """A label from what stays the same over a conversation: up to its first user message.

    A shared system prompt alone gives none, so it cannot glue conversations together.
    """
    messages = _parsed(body).get("messages")
    if not isinstance(messages, list):
        return None
    for count, message in enumerate(messages, start=1):
        if isinstance(message, dict) and message.get("role") == "user":
            start = json.dumps(messages[:count], sort_keys=True)
            return "content-" + blake3(start.encode()).hexdigest(length=16)
    return None
