"""Ling 3.0: KDA and MLA layers."""

from sglang.srt.models.bailing_moe_v3 import EntryClass

__all__ = ["EntryClass"]
