"""Token ids from seeds, and the prompts that grow turn by turn."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from sglang.virtual.models.null_hybrid import STOP_TOKEN, VOCAB_TOKENS
from sglang.virtual.protocol import Segment

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def seeded_tokens(seed: int, length: int) -> array:
    """``length`` token ids that follow from ``seed``, never the stop token.

    SplitMix64 as a counter-based generator, so that the ids depend on no library's
    version and any prefix can be had without the rest.
    """
    with np.errstate(over="ignore"):
        z = (np.arange(1, length + 1, dtype=np.uint64) + np.uint64(seed)) * _GOLDEN
        z ^= np.uint64(seed) << np.uint64(32)
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        z ^= z >> np.uint64(31)
    ids = (z % np.uint64(VOCAB_TOKENS - 1)).astype(np.int64) + STOP_TOKEN + 1
    return array("q", ids.tobytes())


def tokens_of(segment: Segment) -> array:
    """The token ids of one segment."""
    if segment.ids is not None:
        return array("q", segment.ids)
    return seeded_tokens(segment.seed, segment.length)


class _Conversation(NamedTuple):
    segments: list[Segment]
    tokens: array


class PromptBuilder:
    """Builds prompts, keeping each label's last one: turns mostly extend it."""

    def __init__(self) -> None:
        self._by_label: dict[str, _Conversation] = {}

    def build(self, label: str | None, segments: list[Segment]) -> array:
        """The prompt's token ids, as a new array that the caller owns."""
        known = self._by_label.get(label) if label is not None else None
        if known is not None and segments[: len(known.segments)] == known.segments:
            tokens, rest = known.tokens, segments[len(known.segments) :]
        else:
            tokens, rest = array("q"), segments
        for segment in rest:
            tokens.extend(tokens_of(segment))
        if label is not None:
            self._by_label[label] = _Conversation(segments, tokens)
        return tokens[:]

    def forget(self, label: str) -> None:
        """Drop what is kept for a trajectory that is over."""
        self._by_label.pop(label, None)
