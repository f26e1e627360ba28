"""Finding a request's label: one documented order, every outcome counted.

1. The headers of ``--routing-key-headers``, in that order; the first valid one wins.
2. With ``--routing-key-from-body``: the body field ``routing_key`` of ``/generate``.
3. With ``--routing-key-from-content``: a hash of the conversation's beginning.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sgl_router.label import LABEL_MAX_BYTES, parse_label
from sgl_router.prompt import body_label, content_label
from sgl_router.wire.errors import bad_request

if TYPE_CHECKING:
    from sgl_router.exchange import Exchange

log = logging.getLogger(__name__)

SOURCES = ("header", "body", "content", "none", "invalid")
"""Where labels come from: the label values of the source counter."""


class LabelReader:
    """Reads labels and counts where they came from."""

    def __init__(
        self,
        headers: Sequence[str],
        *,
        required: bool = False,
        from_body: bool = False,
        from_content: bool = False,
    ) -> None:
        self.headers = tuple(header.lower().encode() for header in headers)
        self.required = required
        self.from_body = from_body
        self.from_content = from_content
        self.may_read_body = from_body or from_content
        self.sources: Counter[str] = Counter()
        self._warned = False

    def read_head(self, exchange: Exchange) -> None:
        """Take the label from the request's headers.

        Raises:
            MessageError: a label is required, absent, and the body is not asked.
        """
        given = exchange.head.labels
        if given is not None:
            for header in self.headers:
                value = given.get(header)
                label = parse_label(value) if value is not None else None
                if label is not None:
                    exchange.label = label
                    exchange.label_source = "header"
                    self.sources["header"] += 1
                    return
            exchange.label_source = "invalid"
        if not (self.may_read_body and self.reads_body(exchange)):
            self._missing(exchange)

    def reads_body(self, exchange: Exchange) -> bool:
        """Whether the body is to be read for a label."""
        if exchange.label is not None or not self.may_read_body:
            return False
        return exchange.has_body and (
            self.from_content or exchange.route.name == "/generate"
        )

    def read_body(self, exchange: Exchange, body: bytes) -> None:
        """Take the label from the body, where an option allows it.

        Raises:
            MessageError: a label is required and there is none here either.
        """
        if exchange.label is not None:
            return
        if self.from_body and exchange.route.name == "/generate":
            exchange.label, exchange.label_source = body_label(body), "body"
        if exchange.label is None and self.from_content:
            exchange.label, exchange.label_source = content_label(body), "content"
        if exchange.label is None:
            exchange.label_source = "none"
            self._missing(exchange)
        else:
            self.sources[exchange.label_source] += 1

    def _missing(self, exchange: Exchange) -> None:
        self.sources[exchange.label_source] += 1
        names = ", ".join(header.decode() for header in self.headers)
        if self.required:
            raise bad_request(
                f"routing key: none of {names} holds 1 to {LABEL_MAX_BYTES} bytes of "
                "visible ASCII"
            )
        if not self._warned:
            self._warned = True
            log.warning(
                "a request came without a valid routing key (%s); such requests are "
                "spread by load and counted in smg_routing_key_source_total",
                names,
            )
