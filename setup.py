"""Builds the patched wheel: a PEP 517 backend and the command line of the patch tools.

``pip wheel .`` and ``pip install .`` call :func:`build_wheel`; ``python setup.py
COMMAND`` is the same as ``python -m patches.tools COMMAND`` and needs no install.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from patches.tools import wheel
from patches.tools.__main__ import main

__all__ = ["build_wheel", "main"]


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel for the running interpreter; return its file name (PEP 517).

    ``config_settings`` accepts ``python-tag``, one of the tags in ``upstream.toml``.
    """
    tag = (config_settings or {}).get("python-tag")
    return wheel.build_wheel(Path(wheel_directory), tag).name


if __name__ == "__main__":
    sys.exit(main())
