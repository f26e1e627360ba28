"""Changes to the series: a new patch, an edited one, one less."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patches.tools.anchors import Anchored, place, tie
from patches.tools.check import sort_key
from patches.tools.diff import FileDiff, Patch, render
from patches.tools.errors import SeriesError
from patches.tools.export import export_file, export_patch
from patches.tools.features import read_features
from patches.tools.pin import ROOT, read_pin
from patches.tools.series import (
    Applied,
    ReadFile,
    apply_series,
    load_series,
    patches_dir,
)
from patches.tools.tree import read_through, restamp
from patches.tools.wheel import UpstreamWheel, fetch


def new_patch(
    name: str,
    tree: Path,
    header: Sequence[tuple[str, str]],
    files: Sequence[str] = (),
    root: Path = ROOT,
) -> None:
    """Add a patch that holds what ``tree`` has beyond its feature's last patch.

    ``files`` limits it to some paths (``srt/...``). The patch takes its place in the
    order of the series, and the tree counts as holding it from then on.
    """
    patches = load_series(root)
    if any(patch.name == name for patch in patches):
        raise SeriesError(f"patches/{name}: exists; 'refresh' changes it")
    rank = _ranks(root)
    feature = name.split("/")[0]
    if feature not in rank:
        raise SeriesError(f"feature {feature!r} is not in features.toml")
    held = [p for p in patches if rank[p.feature] <= rank[feature]]
    upstream = UpstreamWheel(fetch(read_pin(root)))
    diffs = _export_tree(held, tree, upstream, files)
    patch = Patch(name, tuple(header), diffs)
    tied = tie([*held, patch], upstream.read) + tie(patches, upstream.read)[len(held) :]
    settled = settle(tied, upstream.read, root)
    write_series(settled, root)
    restamp(tree, [p.name for p in settled if rank[p.feature] <= rank[feature]][-1])


def edit_patch(
    name: str, tree: Path, files: Sequence[str] = (), root: Path = ROOT
) -> None:
    """Replace a patch by what ``tree``, made through it, now differs in."""
    patches = load_series(root)
    at = _index(patches, name)
    _require_through(tree, name)
    upstream = UpstreamWheel(fetch(read_pin(root)))
    diffs = _diffs(apply_series(patches[:at], upstream.read), tree, upstream, files)
    edited = Patch(name, patches[at].header, diffs)
    tied = tie(patches, upstream.read)
    tied[at] = tie([*patches[:at], edited], upstream.read)[at]
    write_series(settle(tied, upstream.read, root), root)


def drop_patch(name: str, root: Path = ROOT) -> None:
    """Take a patch out of the series and move the later ones up."""
    patches = load_series(root)
    at = _index(patches, name)
    upstream = UpstreamWheel(fetch(read_pin(root)))
    tied = tie(patches, upstream.read)
    del tied[at]
    write_series(settle(tied, upstream.read, root), root)
    (patches_dir(root) / name).unlink()


def refresh_all(root: Path = ROOT) -> None:
    """Write every patch as the exporter would; no change for a clean series."""
    upstream = UpstreamWheel(fetch(read_pin(root)))
    write_series(_canonical(load_series(root), upstream.read), root)


def _ranks(root: Path) -> dict[str, int]:
    return {feature.name: i for i, feature in enumerate(read_features(root))}


def _index(patches: Sequence[Patch], name: str) -> int:
    names = [patch.name for patch in patches]
    if name not in names:
        raise SeriesError(f"patch {name!r} is not listed in patches/series")
    return names.index(name)


def _require_through(tree: Path, wanted: str) -> None:
    """Refuse a tree that holds more or fewer patches than the edit is based on."""
    through = read_through(tree)
    if through != wanted:
        raise SeriesError(
            f"{tree}: holds the series through {through or 'nothing'}; the edit needs "
            f"a tree made with --through {wanted or 'none'}"
        )


def _export_tree(
    held: Sequence[Patch], tree: Path, upstream: UpstreamWheel, files: Sequence[str]
) -> tuple[FileDiff, ...]:
    _require_through(tree, held[-1].name if held else "")
    return _diffs(apply_series(held, upstream.read), tree, upstream, files)


def _diffs(
    before: Applied, tree: Path, upstream: UpstreamWheel, files: Sequence[str]
) -> tuple[FileDiff, ...]:
    paths = [f"sglang/{path}" for path in files] or _changed(before, tree, upstream)
    if not paths:
        raise SeriesError(f"{tree}: nothing in it differs from the series")
    return tuple(
        export_file(f"python/{p}", before.content(p), (tree / p).read_bytes())
        for p in sorted(paths)
    )


def _changed(before: Applied, tree: Path, upstream: UpstreamWheel) -> list[str]:
    return [
        path
        for path in upstream.modes
        if path.startswith("sglang/")
        and path.endswith(".py")
        and path != "sglang/_version.py"
        and (tree / path).read_bytes() != before.content(path)
    ]


def settle(tied: Sequence[Anchored], read: ReadFile, root: Path) -> list[Patch]:
    """Position the patches anew and put them into the one right order.

    Raises SeriesError when an anchor is gone or when the order changes the result.
    """
    placed = place(tied, read)
    rank = _ranks(root)
    order = sorted(
        range(len(placed)),
        key=lambda i: (rank[placed[i].feature], *sort_key(placed[i])),
    )
    moved = place([tied[i] for i in order], read)
    if apply_series(moved, read).files != apply_series(placed, read).files:
        raise SeriesError(
            "in the order of the series (path, then line) the patches give another "
            "result; put lines at one place into one patch"
        )
    return _canonical(moved, read)


def _canonical(patches: Sequence[Patch], read: ReadFile) -> list[Patch]:
    applied = Applied(read)
    exported = []
    for patch in patches:
        exported.append(export_patch(patch, applied))
        applied.push(patch)
    return exported


def write_series(patches: Sequence[Patch], root: Path) -> None:
    """Write the patches that differ from their files, and the list of all."""
    base = patches_dir(root)
    for patch in patches:
        path, text = base / patch.name, render(patch)
        if not path.exists() or path.read_text("utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
    (base / "series").write_text(_series_text(base, patches), "utf-8")


def _series_text(base: Path, patches: Sequence[Patch]) -> str:
    lines = [
        line
        for line in (base / "series").read_text("utf-8").splitlines()
        if line.startswith("#")
    ]
    feature = ""
    for patch in patches:
        if patch.feature != feature:
            lines.append("")
            feature = patch.feature
        lines.append(patch.name)
    return "\n".join(lines) + "\n"
