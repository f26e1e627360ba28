"""Moves the series and the pin to another upstream version.

Every insertion goes behind the line that the line it follows became. What cannot be
found there stops the move before anything is written: such a patch is dropped first
and made anew on the new version.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from patches.tools.anchors import Anchor, Anchored, Line, tie
from patches.tools.diff import split_lines
from patches.tools.edit import settle, write_series
from patches.tools.errors import SeriesError
from patches.tools.pin import ROOT, Pin, PinnedWheel, read_pin
from patches.tools.series import load_series, wheel_path
from patches.tools.upstream import (
    Alignment,
    PatchReport,
    compare,
    fetch_version,
    taken_files,
)
from patches.tools.wheel import UpstreamWheel, cache_dir, fetch, sha256_of


def move_series(
    version: str, root: Path = ROOT, tag: str | None = None
) -> list[PatchReport]:
    """Write every patch anew for ``version`` and pin its wheels; all or nothing.

    Returns the report on each patch, for those that need a look. Raises SeriesError
    naming the patches and files that have no place in that version.
    """
    pin = read_pin(root)
    if version == pin.upstream_version:
        raise SeriesError(f"--version: {version} is the pinned version")
    wheels = {name: fetch_version(pin.name, version, name) for name in pin.wheels}
    pinned = UpstreamWheel(fetch(pin, tag))
    other = UpstreamWheel(wheels[pin.wheel(tag).tag])
    tied = tie(load_series(root), pinned.read)
    reports = compare(tied, pinned.read, other.read)
    _refuse(reports, taken_files(root, other), version)
    moved = [_moved(item, pinned, other) for item in tied]
    patches = settle(moved, other.read, root)
    text = _repinned(root, pin, version, wheels)
    for wheel in wheels.values():
        shutil.copyfile(wheel, cache_dir() / wheel.name)
    write_series(patches, root)
    (root / "upstream.toml").write_text(text, "utf-8")
    return reports


def _refuse(reports: Sequence[PatchReport], taken: Sequence[str], version: str) -> None:
    problems = [
        f"patches/{report.name}: has no place in {version}; drop it, move, "
        "then make it anew"
        for report in reports
        if report.state == "broken"
    ]
    problems += [f"{path}: upstream has a file there now" for path in taken]
    if problems:
        raise SeriesError("\nerror: ".join(problems))


def _moved(item: Anchored, old: UpstreamWheel, new: UpstreamWheel) -> Anchored:
    """The same insertions, tied to the lines of the other version."""
    insertions = {}
    for path, tied in item.insertions.items():
        before, after = (
            split_lines(wheel.read(wheel_path(path))) for wheel in (old, new)
        )
        to = Alignment(before, after)
        insertions[path] = tuple((_anchor(anchor, to), text) for anchor, text in tied)
    return replace(item, insertions=insertions)


def _anchor(anchor: Anchor, to: Alignment) -> Anchor:
    upstream = to.there(anchor.upstream)
    assert upstream is not None  # else the report says broken
    line = anchor.line
    if isinstance(line.origin, int):
        line = Line(upstream, line.text)
    return replace(anchor, line=line, upstream=upstream)


def _repinned(root: Path, pin: Pin, version: str, wheels: dict[str, Path]) -> str:
    """``upstream.toml`` with the new version and wheels, all else left as it is."""
    text = (root / "upstream.toml").read_text("utf-8")
    changes = [
        (f'version = "{pin.upstream_version}"', f'version = "{version}"'),
        (f"revision = {pin.revision}", "revision = 1"),
    ]
    for tag, wheel in wheels.items():
        before, after = pin.wheels[tag], PinnedWheel(tag, wheel.name, sha256_of(wheel))
        changes += [(before.file, after.file), (before.sha256, after.sha256)]
    for was, becomes in changes:
        if text.count(was) != 1:
            raise SeriesError(
                f"upstream.toml: {was!r} is there {text.count(was)} times"
            )
        text = text.replace(was, becomes)
    return text
