"""Reads ``upstream.toml``: the pinned wheels and the version derived from them."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patches.tools.errors import SeriesError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class PinnedWheel:
    """One upstream wheel: its tag (``cp311``), file name and sha256."""

    tag: str
    file: str
    sha256: str

    @property
    def platform(self) -> str:
        """Return the platform tag, the last part of the file name."""
        return self.file.removesuffix(".whl").rsplit("-", 1)[1]


@dataclass(frozen=True)
class Pin:
    """What this distribution is built from."""

    name: str
    upstream_version: str
    local: str
    revision: int
    wheels: Mapping[str, PinnedWheel]
    entry_points: Mapping[str, Mapping[str, str]]

    @property
    def version(self) -> str:
        """Return the version of the patched wheel, ``0.5.23+makespan.1``."""
        return f"{self.upstream_version}+{self.local}.{self.revision}"

    @property
    def upstream_dist_info(self) -> str:
        return f"{self.name}-{self.upstream_version}.dist-info"

    @property
    def dist_info(self) -> str:
        return f"{self.name}-{self.version}.dist-info"

    def wheel(self, tag: str | None = None) -> PinnedWheel:
        """Return the wheel of ``tag``, or of the running interpreter."""
        tag = tag or f"cp{sys.version_info.major}{sys.version_info.minor}"
        if tag not in self.wheels:
            allowed = ", ".join(sorted(self.wheels))
            raise SeriesError(f"python tag {tag!r}: no pinned wheel, only {allowed}")
        return self.wheels[tag]

    def wheel_file(self, tag: str | None = None) -> str:
        """Return the file name of the patched wheel."""
        upstream = self.wheel(tag).file
        return upstream.replace(f"-{self.upstream_version}-", f"-{self.version}-", 1)


def read_pin(root: Path = ROOT) -> Pin:
    """Read ``upstream.toml`` of the project at ``root``.

    Raises SeriesError naming the field that is missing or malformed.
    """
    path = root / "upstream.toml"
    try:
        data = tomllib.loads(path.read_text("utf-8"))
        return _pin(data)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SeriesError(f"{path.name}: {error}") from None
    except KeyError as error:
        raise SeriesError(f"{path.name}: field {error} is missing") from None


def _pin(data: dict[str, Any]) -> Pin:
    wheels = {
        tag: PinnedWheel(tag, entry["file"], entry["sha256"])
        for tag, entry in data["wheels"].items()
    }
    for wheel in wheels.values():
        if not re.fullmatch("[0-9a-f]{64}", wheel.sha256):
            raise SeriesError(
                f"upstream.toml: wheels.{wheel.tag}.sha256: "
                f"{wheel.sha256!r} is not 64 hex digits"
            )
    if type(data["revision"]) is not int or data["revision"] < 1:
        raise SeriesError(
            f"upstream.toml: revision: {data['revision']!r} is not a positive integer"
        )
    return Pin(
        name=data["name"],
        upstream_version=data["version"],
        local=data["local"],
        revision=data["revision"],
        wheels=wheels,
        entry_points=data.get("entry-points", {}),
    )
