"""The trajectory label: made once a sample, sent with everything a sample asks.

Router and scheduler see it as the ``x-smg-routing-key`` header, at most 128 bytes of
visible ASCII. Code that calls a model by itself while a sample runs (a judge, a
summary) adds :func:`routing_headers` to its request.
"""

from __future__ import annotations

import hashlib
import re
from contextvars import ContextVar

LABEL_HEADER = "x-smg-routing-key"
MAX_LABEL_BYTES = 128

_READABLE_BYTES = 80
_NOT_VISIBLE = re.compile(r"[^\x21-\x7e]+")

current_label: ContextVar[str | None] = ContextVar("sglang_agent_label", default=None)
"""The label of the sample whose code is running, None outside of samples."""


def make_label(sample_id: str, key: str) -> str:
    """Return a label that is readable, valid and unique to ``key``.

    The same sample gets the same label after a resume, so it meets its old cache.
    """
    readable = _NOT_VISIBLE.sub("_", sample_id)[:_READABLE_BYTES]
    return f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def routing_headers(label: str | None = None) -> dict[str, str]:
    """Return the header that ties a request to ``label`` or to the running sample.

    Raises ValueError for a label that no gateway would take, RuntimeError when there
    is none.
    """
    label = label if label is not None else current_label.get()
    if label is None:
        raise RuntimeError("no sample is running here, so there is no label to send")
    if not label or len(label) > MAX_LABEL_BYTES or _NOT_VISIBLE.search(label):
        raise ValueError(
            f"label: {label!r}; must be 1 to {MAX_LABEL_BYTES} visible ASCII characters"
        )
    return {LABEL_HEADER: label}
