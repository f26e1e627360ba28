"""Builds the gateway; on request its data path is compiled to native code by mypyc.

The sources are the same either way. A compiled build needs a C compiler and mypy::

    SGL_ROUTER_COMPILE=1 pip install --no-build-isolation ./sgl-router
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

PACKAGE = Path("sgl_router")
INTERPRETED = {"config", "control", "launch_router", "policies", "probes", "server"}
"""Modules off the data path, and policies, which others may subclass."""


def extensions() -> list[Extension]:
    """What is compiled: nothing unless the environment asks for it."""
    asked = os.environ.get("SGL_ROUTER_COMPILE", "0")
    if asked not in ("0", "1"):
        raise SystemExit(f"SGL_ROUTER_COMPILE: {asked!r} is not allowed; give 0 or 1")
    builds = {"bdist_wheel", "build_ext", "editable_wheel"} & set(sys.argv)
    if asked == "0" or not builds:  # pip also runs this file to read the metadata
        return []
    from mypyc.build import mypycify

    modules = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    compiled = [
        str(PACKAGE / path)
        for path in modules
        if path.stem != "__init__" and not INTERPRETED & {path.stem, path.parts[0]}
    ]
    return mypycify(compiled, opt_level="3")


setup(ext_modules=extensions())
