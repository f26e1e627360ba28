"""The two validators: form and order without upstream, exactness with it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from patches.tools.diff import Patch, render
from patches.tools.errors import SeriesError
from patches.tools.export import export_patch
from patches.tools.features import Feature, feature_problems, read_features
from patches.tools.pin import ROOT, read_pin
from patches.tools.series import (
    Applied,
    load_patch,
    overlay_files,
    patches_dir,
    read_series,
    refuse_overwrites,
)
from patches.tools.wheel import UpstreamWheel, fetch


def check_form(root: Path = ROOT) -> list[str]:
    """Return what is wrong with the series, a line each; needs no upstream."""
    try:
        read_pin(root)
        names, features = read_series(root), read_features(root)
    except SeriesError as error:
        return [str(error)]
    problems = _listing_problems(names, root)
    patches: list[Patch] = []
    for name in names:
        try:
            patches.append(load_patch(name, root))
        except SeriesError as error:
            problems.append(str(error))
    problems += [problem for patch in patches for problem in _patch_problems(patch)]
    problems += _order_problems(patches, features)
    return problems + feature_problems(features, names, root)


def _listing_problems(names: Sequence[str], root: Path) -> list[str]:
    base = patches_dir(root)
    files = {path.relative_to(base).as_posix() for path in base.rglob("*.patch")}
    unlisted = [f"patches/{n}: not listed in series" for n in sorted(files - {*names})]
    twice = sorted({n for n in names if names.count(n) > 1})
    return unlisted + [f"patches/series: {name} is listed twice" for name in twice]


def _patch_problems(patch: Patch) -> list[str]:
    problems = []
    if not patch.field("Subject").startswith(f"{patch.feature}: "):
        problems.append(f"patches/{patch.name}: Subject must start '{patch.feature}: '")
    paths = [file.path for file in patch.files]
    if paths != sorted(set(paths)):
        problems.append(f"patches/{patch.name}: files are not in ascending order")
    for file in patch.files:
        blank = any(line != line.rstrip() for i in file.insertions for line in i.lines)
        if blank:
            problems.append(f"patches/{patch.name}: {file.path}: trailing blanks")
    return problems


def sort_key(patch: Patch) -> tuple[str, int]:
    """Return what orders the patches of one feature: the first place they touch."""
    first = patch.files[0]
    return first.path, first.insertions[0].after


def _order_problems(patches: Sequence[Patch], features: list[Feature]) -> list[str]:
    """Compare with the one right order, and follow each file's blob ids."""
    rank = {feature.name: i for i, feature in enumerate(features)}
    problems = []
    for previous, patch in itertools.pairwise(patches):
        ranks = [rank.get(p.feature, len(rank)) for p in (previous, patch)]
        keys = sort_key(previous), sort_key(patch)
        if ranks[0] > ranks[1] or (ranks[0] == ranks[1] and keys[0] > keys[1]):
            problems.append(
                f"patches/series: {patch.name} must stand before {previous.name} "
                "(order: features.toml, then path, then line)"
            )
    last: dict[str, tuple[str, str]] = {}
    for patch in patches:
        for file in patch.files:
            name, after = last.get(file.path, ("", file.before))
            if after != file.before:
                problems.append(
                    f"patches/{patch.name}: {file.path}: made for blob "
                    f"{file.before[:12]}, but {name} leaves {after[:12]} (wrong order?)"
                )
            last[file.path] = (patch.name, file.after)
    return problems


def check_exact(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """Return what is wrong when the series meets the pinned wheel, a line each."""
    try:
        upstream = UpstreamWheel(fetch(read_pin(root), tag))
        refuse_overwrites(overlay_files(root), upstream.modes)
        applied = Applied(upstream.read)
        problems: list[str] = []
        for name in read_series(root):
            problems += _exact_problems(load_patch(name, root), applied, root)
        return problems + _syntax_problems(applied.files)
    except SeriesError as error:
        return [str(error)]


def _exact_problems(patch: Patch, applied: Applied, root: Path) -> list[str]:
    before = Applied(applied.read, dict(applied.files))
    applied.push(patch)
    text = (patches_dir(root) / patch.name).read_text("utf-8")
    if render(export_patch(patch, before)) == text:
        return []
    return [f"patches/{patch.name}: 'refresh' would write it differently"]


def _syntax_problems(files: dict[str, bytes]) -> list[str]:
    problems = []
    for path, data in files.items():
        try:
            compile(data, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            problems.append(f"{path}:{error.lineno}: {error.msg} after the series")
    return problems
