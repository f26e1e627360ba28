"""Size of the virtual device."""

import os
from collections.abc import Mapping

MEMORY_VARIABLE = "SGLANG_CPU_MEMORY_BYTES"
DEFAULT_MEMORY_BYTES = 1 << 30


def device_bytes(environ: Mapping[str, str] | None = None) -> int:
    """Bytes that the cache pools are sized from.

    Raises ValueError if the variable is not a positive whole number.
    """
    text = (os.environ if environ is None else environ).get(MEMORY_VARIABLE)
    if text is None:
        return DEFAULT_MEMORY_BYTES
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"{MEMORY_VARIABLE}: {text!r} is not a positive whole number of bytes"
        )
    return int(text)
