"""Unpacked trees: a patched one for development, and patching one that exists."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from patches.tools.diff import blob_id
from patches.tools.errors import SeriesError
from patches.tools.pin import ROOT, read_pin
from patches.tools.series import (
    apply_series,
    load_series,
    overlay_files,
    read_series,
    refuse_overwrites,
)
from patches.tools.wheel import Entry, UpstreamWheel, fetch, patched_entries, record

STAMP = ".makespan-tree.json"
"""Marks a folder as made by :func:`make_tree`: what was written, so it can change."""

_LINK = "link"


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
    take effect. ``through`` names the last patch to apply, ``none`` applies none. A
    tree made before is brought up to date, touching only files that differ. Raises
    SeriesError when ``output`` holds something else, or edits that would be lost.
    """
    held = _read_files(output)
    pin = read_pin(root)
    upstream = UpstreamWheel(fetch(pin, tag))
    entries = patched_entries(pin, upstream, root, through)
    wanted = [*entries, record(pin, entries)]
    changed = [entry for entry in wanted if not _in_place(output, entry, link=link)]
    _refuse_lost_edits(output, changed, held)
    for path in sorted(held.keys() - {entry.path for entry in wanted}):
        (output / path).unlink(missing_ok=True)
    names = [through] if through else read_series(root)[-1:]
    _write_stamp(output, wanted, names[0] if names else "", link=link)
    for entry in changed:
        _place(output / entry.path, entry, link=link)


def _stamp(tree: Path) -> dict[str, Any]:
    try:
        stamp: dict[str, Any] = json.loads((tree / STAMP).read_text("utf-8"))
    except OSError:
        raise SeriesError(f"{tree}: not a tree made by the 'tree' command") from None
    return stamp


def _read_files(output: Path) -> dict[str, str]:
    if not output.exists() or not any(output.iterdir()):
        return {}
    files: dict[str, str] = _stamp(output)["files"]
    return files


def read_through(tree: Path) -> str:
    """Return the last patch applied to a tree, empty when it holds none."""
    through: str = _stamp(tree)["through"]
    return "" if through == "none" else through


def restamp(tree: Path, through: str) -> None:
    """Record that the edits of a tree are now the series up to ``through``."""
    stamp = _stamp(tree)
    files = {
        path: value if value == _LINK else blob_id((tree / path).read_bytes())
        for path, value in stamp["files"].items()
    }
    text = json.dumps({"through": through, "files": files})
    (tree / STAMP).write_text(text, "utf-8")


def _write_stamp(
    output: Path, entries: Iterable[Entry], through: str, *, link: bool
) -> None:
    output.mkdir(parents=True, exist_ok=True)
    files = {
        entry.path: _LINK if link and entry.source else blob_id(entry.data)
        for entry in entries
    }
    text = json.dumps({"through": through, "files": files})
    (output / STAMP).write_text(text, "utf-8")


def _refuse_lost_edits(
    output: Path, changed: Iterable[Entry], held: dict[str, str]
) -> None:
    for entry in changed:
        path = output / entry.path
        if held.get(entry.path, _LINK) == _LINK or not path.is_file():
            continue
        if blob_id(path.read_bytes()) != held[entry.path]:
            raise SeriesError(
                f"{path}: edited since the tree was made; export it with 'new' or "
                "'refresh', or remove the file to give the edit up"
            )


def _in_place(output: Path, entry: Entry, *, link: bool) -> bool:
    path = output / entry.path
    if link and entry.source:
        return path.is_symlink() and path.readlink() == entry.source.resolve()
    return path.is_file() and not path.is_symlink() and path.read_bytes() == entry.data


def _place(path: Path, entry: Entry, *, link: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if link and entry.source:
        path.symlink_to(entry.source.resolve())
    else:
        path.write_bytes(entry.data)
        path.chmod(entry.mode & 0o777)


def apply_to(tree: Path, root: Path = ROOT) -> list[str]:
    """Patch an unpacked upstream wheel in place and add our own files.

    Returns the paths written. Raises SeriesError, with nothing written, when a file is
    not the one the series was made for; that includes a tree that is patched already.
    """
    if not (tree / "sglang").is_dir():
        raise SeriesError(f"{tree}: no folder 'sglang' in it")
    overlay = overlay_files(root)
    applied = apply_series(load_series(root), lambda path: _read(tree, path))
    refuse_overwrites(overlay, [p for p in overlay if os.path.lexists(tree / p)])
    new = applied.files | {path: src.read_bytes() for path, src in overlay.items()}
    _write_all(tree, new)
    return sorted(new)


def _read(tree: Path, path: str) -> bytes:
    try:
        return (tree / path).read_bytes()
    except FileNotFoundError:
        raise KeyError(path) from None


def _write_all(tree: Path, files: dict[str, bytes]) -> None:
    """Write every file beside its place first, then rename all of them."""
    with tempfile.TemporaryDirectory(dir=tree) as staging:
        staged = [Path(staging) / str(number) for number in range(len(files))]
        for source, data in zip(staged, files.values(), strict=True):
            source.write_bytes(data)
        for source, path in zip(staged, files, strict=True):
            target = tree / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                source.chmod(target.stat().st_mode & 0o777)
            source.replace(target)
