"""Why a message was refused."""

from __future__ import annotations


class MessageError(Exception):
    """A message that breaks the rules of HTTP or our limits.

    Attributes:
        status: the HTTP status that answers it.
        code: short machine-readable reason, bounded in number.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def bad_request(message: str) -> MessageError:
    """A 400: the message cannot be understood in one way only."""
    return MessageError(400, "bad_request", message)
