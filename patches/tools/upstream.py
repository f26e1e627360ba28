"""Tells what another upstream version would do to the series.

Every insertion is tied to the line that it follows in the pinned wheel. The report
says, for each patch, where those lines are in the other wheel, how far they moved, in
which function or class they stand, and which lines around them changed. It changes
nothing: ``patches/tools/move.py`` does.

The report quotes upstream's lines, so it is for the terminal and not for the repository.
"""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patches.tools.anchors import Anchored, tie
from patches.tools.diff import split_lines
from patches.tools.errors import SeriesError
from patches.tools.pin import ROOT, read_pin
from patches.tools.series import ReadFile, load_series, overlay_files, wheel_path
from patches.tools.wheel import UpstreamWheel, cache_dir, fetch

CONTEXT = 3
"""Lines on each side of an insertion that count as its surroundings."""


@dataclass(frozen=True)
class Spot:
    """Where one insertion of a patch belongs in the other version.

    ``here`` and ``there`` are line numbers counted from 1 (0: before the first line);
    ``there`` is None when the line is gone. ``changed`` holds the surroundings that
    differ, as lines of a diff.
    """

    path: str
    symbol: str
    here: int
    there: int | None
    changed: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return self.there is not None and not self.changed


@dataclass(frozen=True)
class PatchReport:
    """What becomes of one patch; ``missing`` are files that the other version lacks."""

    name: str
    spots: tuple[Spot, ...]
    missing: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """``applies``, ``moved``, ``look`` (surroundings changed) or ``broken``."""
        if self.missing or any(spot.there is None for spot in self.spots):
            return "broken"
        if any(spot.changed for spot in self.spots):
            return "look"
        moved = any(spot.there != spot.here for spot in self.spots)
        return "moved" if moved else "applies"


@dataclass(frozen=True)
class UpstreamReport:
    """The whole answer for one version."""

    pinned: str
    other: str
    patches: tuple[PatchReport, ...]
    taken: tuple[str, ...] = field(default=())
    """Our own files whose path upstream uses now."""

    @property
    def clean(self) -> bool:
        return not self.taken and all(
            patch.state in ("applies", "moved") for patch in self.patches
        )


class Version:
    """Files of one version, read once."""

    def __init__(self, read: ReadFile) -> None:
        self._read = read
        self._lines: dict[str, list[str] | None] = {}

    def lines(self, path: str) -> list[str] | None:
        """The lines of a file named as in a patch; None when there is no such file."""
        if path not in self._lines:
            try:
                self._lines[path] = split_lines(self._read(wheel_path(path)))
            except KeyError:
                self._lines[path] = None
        return self._lines[path]


class Alignment:
    """Which line of the other version each line of the pinned one became."""

    def __init__(self, old: Sequence[str], new: Sequence[str]) -> None:
        self.old, self.new = old, new
        self._to = {0: 0}
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for block in matcher.get_matching_blocks():
            for offset in range(block.size):
                self._to[block.a + offset + 1] = block.b + offset + 1

    def there(self, here: int) -> int | None:
        """The number in the other version of line ``here``; both count from 1."""
        return self._to.get(here)

    def symbols(self, here: int) -> tuple[str, str]:
        """The scopes of a line in both versions; the second is empty when it is gone."""
        there = self.there(here)
        old = symbol_at("".join(self.old), max(here, 1))
        if there is None:
            return old, ""
        return old, symbol_at("".join(self.new), max(there, 1))

    def around(self, here: int) -> tuple[str, ...]:
        """What differs within :data:`CONTEXT` lines of position ``here``."""
        first, last = max(1, here - CONTEXT + 1), min(len(self.old), here + CONTEXT)
        kept = [n for n in range(first, last + 1) if n in self._to]
        if not kept:
            return tuple(f"-{line.rstrip()}" for line in self.old[first - 1 : last])
        start = self._to[kept[0]] - (kept[0] - first)
        end = self._to[kept[-1]] + (last - kept[-1])
        before = [line.rstrip("\n") for line in self.old[first - 1 : last]]
        after = [line.rstrip("\n") for line in self.new[max(0, start - 1) : end]]
        diff = difflib.unified_diff(before, after, lineterm="", n=0)
        return tuple(line for line in diff if not line.startswith(("---", "+++", "@@")))


def symbol_at(source: str, line: int) -> str:
    """The innermost function or class around ``line``, dotted; ``module`` at the top."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return "module"
    names: list[str] = []
    node: ast.AST = tree
    while True:
        inner = next((child for child in _scopes(node) if _spans(child, line)), None)
        if inner is None:
            return ".".join(names) or "module"
        names.append(inner.name)
        node = inner


_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _scopes(node: ast.AST) -> Iterator[_Scope]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Scope):
            yield child
        elif not isinstance(child, ast.expr):
            yield from _scopes(child)


def _spans(scope: _Scope, line: int) -> bool:
    return scope.lineno <= line <= (scope.end_lineno or scope.lineno)


def compare(
    tied: Iterable[Anchored], pinned: ReadFile, other: ReadFile
) -> list[PatchReport]:
    """Report on each patch of a series that was tied to the pinned version."""
    old, new = Version(pinned), Version(other)
    alignments: dict[str, Alignment] = {}
    reports = []
    for item in tied:
        spots: list[Spot] = []
        missing = []
        for path, insertions in item.insertions.items():
            here_lines, there_lines = old.lines(path), new.lines(path)
            if here_lines is None or there_lines is None:
                missing.append(path)
                continue
            if path not in alignments:
                alignments[path] = Alignment(here_lines, there_lines)
            origins = [anchor.line.origin for anchor, _ in insertions]
            # One tied to another patch's line goes where that line goes.
            numbers = sorted({n for n in origins if isinstance(n, int)})
            spots += (_spot(path, n, alignments[path]) for n in numbers)
        reports.append(PatchReport(item.patch.name, tuple(spots), tuple(missing)))
    return reports


def _spot(path: str, here: int, alignment: Alignment) -> Spot:
    symbol, other = alignment.symbols(here)
    changed = alignment.around(here)
    if other not in ("", symbol):
        changed = (f"-{symbol}", f"+{other}", *changed)
    return Spot(path, symbol, here, alignment.there(here), changed)


def fetch_version(name: str, version: str, tag: str) -> Path:
    """Return the wheel of another upstream version, downloaded once.

    It is not pinned, so nothing is built from it: it is only read.
    """
    if not re.fullmatch(r"\d+(\.\d+)*([._-]?(a|b|rc|post|dev)\d+)*", version):
        raise SeriesError(f"--version: {version!r} is not a version like 0.5.24")
    folder = cache_dir() / "unpinned"
    pattern = f"{name}-{version}-*{tag}*.whl"
    found = [*folder.glob(pattern), *folder.glob(f"{name}-{version}-py3-*.whl")]
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        _download(folder, name, version, tag)
        found = [*folder.glob(pattern), *folder.glob(f"{name}-{version}-py3-*.whl")]
    if not found:
        raise SeriesError(f"pip downloaded no wheel of {name} {version} for {tag}")
    return found[0]


def _download(folder: Path, name: str, version: str, tag: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", scratch]
        command += ["--python-version", tag.removeprefix("cp")]
        command += [f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise SeriesError(f"pip download of {name} {version} failed: {reason}")
        for wheel in Path(scratch).glob("*.whl"):
            wheel.replace(folder / wheel.name)


def report_upstream(
    version: str, root: Path = ROOT, tag: str | None = None
) -> UpstreamReport:
    """Compare the pinned wheel with that of ``version``, for the whole series."""
    pin = read_pin(root)
    pinned = UpstreamWheel(fetch(pin, tag))
    other = UpstreamWheel(fetch_version(pin.name, version, pin.wheel(tag).tag))
    tied = tie(load_series(root), pinned.read)
    patches = compare(tied, pinned.read, other.read)
    taken = taken_files(root, other)
    return UpstreamReport(pin.upstream_version, version, tuple(patches), taken)


def taken_files(root: Path, other: UpstreamWheel) -> tuple[str, ...]:
    """Our own files whose path the other version uses."""
    return tuple(sorted(set(overlay_files(root)) & set(other.modes)))


_MEANING = {
    "applies": "same lines, same places",
    "moved": "same lines, other places: computed anew",
    "look": "the line is there, lines around it changed",
    "broken": "a file or the line it follows is gone: place it by hand",
}


def lines(report: UpstreamReport) -> Iterator[str]:
    """The report as text, a line at a time."""
    for patch in report.patches:
        yield f"{patch.state:8} {patch.name}"
        for path in patch.missing:
            yield f"    {path}: not in {report.other}"
        for spot in patch.spots:
            yield from _spot_lines(spot)
    for path in report.taken:
        yield f"taken    {path}: upstream has a file there now"
    yield ""
    states = [patch.state for patch in report.patches]
    yield f"{report.pinned} -> {report.other}, {len(states)} patches"
    for state, meaning in _MEANING.items():
        yield f"{states.count(state):5} {state:8} {meaning}"


def _spot_lines(spot: Spot) -> Iterator[str]:
    if spot.clean and spot.there == spot.here:
        return
    place = "gone" if spot.there is None else f"line {spot.there}"
    shift = "" if spot.there is None else f" ({spot.there - spot.here:+d})"
    yield f"    {spot.path}:{spot.here} in {spot.symbol}: {place}{shift}"
    for line in spot.changed:
        yield f"        {line}"
