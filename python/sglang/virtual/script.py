"""What the null model says: every request's output is written before it starts."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from sglang.virtual.models.null_hybrid import STOP_TOKEN

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_ATTRIBUTE = "virtual_script"


class Script:
    """One request's output tokens, ending with the stop token."""

    __slots__ = ("arrival_ns", "first_token_ns", "tokens")

    def __init__(self, tokens: array, arrival_ns: int) -> None:
        tokens.append(STOP_TOKEN)
        self.tokens = tokens
        self.arrival_ns = arrival_ns
        self.first_token_ns: int | None = None

    def remaining(self, req: Req) -> int:
        """Tokens that ``req`` still has to be given."""
        return min(len(self.tokens), req.sampling_params.max_new_tokens) - len(
            req.output_ids
        )

    def next_token(self, req: Req) -> int:
        """The token that the next pass samples."""
        return self.tokens[len(req.output_ids)]

    def next_tokens(self, req: Req, count: int) -> array:
        """The tokens that the next ``count`` passes sample."""
        done = len(req.output_ids)
        return self.tokens[done : done + count]


def attach(req: Req, script: Script) -> None:
    """Tie the script to the request, through retraction and all."""
    setattr(req, _ATTRIBUTE, script)


def script_of(req: Req) -> Script:
    """The script attached to ``req``."""
    return getattr(req, _ATTRIBUTE)
