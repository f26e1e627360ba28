"""Unpacked trees: a patched one for development, and patching one that exists."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from patches.tools.errors import SeriesError
from patches.tools.pin import ROOT, read_pin
from patches.tools.series import (
    apply_series,
    load_series,
    overlay_files,
    refuse_overwrites,
)
from patches.tools.wheel import Entry, UpstreamWheel, fetch, patched_entries, record

STAMP = ".makespan-tree.json"
"""Marks a folder as made by :func:`make_tree`: what it holds, so that it can change."""


def make_tree(
    output: Path,
    *,
    link: bool = False,
    tag: str | None = None,
    through: str | None = None,
    root: Path = ROOT,
) -> None:
    """Make ``output`` a patched, unpacked tree that works first on PYTHONPATH.

    With ``link`` our own files are symbolic links into the checkout, so that edits
    take effect. A tree made before is brought up to date, touching only files whose
    content differs. Raises SeriesError when ``output`` holds something else.
    """
    held = _read_stamp(output)
    pin = read_pin(root)
    upstream = UpstreamWheel(fetch(pin, tag))
    entries = patched_entries(pin, upstream, root, through)
    wanted = [*entries, record(pin, entries)]
    for path in sorted(held - {entry.path for entry in wanted}):
        (output / path).unlink(missing_ok=True)
    _write_stamp(output, wanted, through)
    for entry in wanted:
        _place(output / entry.path, entry, link=link)


def _read_stamp(output: Path) -> set[str]:
    if not output.exists() or not any(output.iterdir()):
        return set()
    try:
        return set(json.loads((output / STAMP).read_text("utf-8"))["files"])
    except OSError:
        raise SeriesError(
            f"{output}: not empty and not a tree of this tool; name another folder"
        ) from None


def read_through(tree: Path) -> str | None:
    """Return the last patch applied to a tree, None when the whole series is."""
    try:
        stamp = json.loads((tree / STAMP).read_text("utf-8"))
    except OSError:
        raise SeriesError(
            f"{tree}: not a tree of this tool ('tree' makes one)"
        ) from None
    through: str | None = stamp["through"]
    return through


def _write_stamp(output: Path, entries: list[Entry], through: str | None) -> None:
    output.mkdir(parents=True, exist_ok=True)
    stamp = {"through": through, "files": [entry.path for entry in entries]}
    (output / STAMP).write_text(json.dumps(stamp), "utf-8")


def _place(path: Path, entry: Entry, *, link: bool) -> None:
    target = entry.source.resolve() if link and entry.source else None
    if target and path.is_symlink() and path.readlink() == target:
        return
    if not target and _holds(path, entry.data):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or (path.exists() and target):
        path.unlink()
    if target:
        path.symlink_to(target)
    else:
        path.write_bytes(entry.data)
        path.chmod(entry.mode & 0o777)


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and not path.is_symlink() and path.read_bytes() == data


def apply_to(tree: Path, root: Path = ROOT) -> list[str]:
    """Patch an unpacked upstream wheel in place and add our own files.

    Returns the paths written. Raises SeriesError, with nothing written, when a file is
    not the one the series was made for; that includes a tree that is patched already.
    """
    if not (tree / "sglang").is_dir():
        raise SeriesError(f"{tree}: no folder 'sglang' in it")
    overlay = overlay_files(root)
    refuse_overwrites(overlay, _existing(tree, overlay))
    applied = apply_series(load_series(root), lambda path: _read(tree, path))
    new = applied.files | {path: src.read_bytes() for path, src in overlay.items()}
    _write_all(tree, new)
    return sorted(new)


def _existing(tree: Path, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if os.path.lexists(tree / path)]


def _read(tree: Path, path: str) -> bytes:
    try:
        return (tree / path).read_bytes()
    except FileNotFoundError:
        raise KeyError(path) from None


def _write_all(tree: Path, files: dict[str, bytes]) -> None:
    """Write every file beside its place first, then rename all of them."""
    with tempfile.TemporaryDirectory(dir=tree) as staging:
        staged = Path(staging)
        for number, data in enumerate(files.values()):
            (staged / str(number)).write_bytes(data)
        for number, path in enumerate(files):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            if (tree / path).exists():
                (staged / str(number)).chmod((tree / path).stat().st_mode & 0o777)
            (staged / str(number)).replace(tree / path)
