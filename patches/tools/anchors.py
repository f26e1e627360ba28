"""Where insertions belong, independent of line numbers.

A position in a zero-context patch counts the lines that earlier patches inserted above
it. To edit one patch in the middle of the series, every insertion is first tied to the
line it follows: a line of upstream, or a line that another patch inserted. From these
anchors the positions and blob ids of all later patches are computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from patches.tools.diff import FileDiff, Insertion, Patch, blob_id, insert, split_lines
from patches.tools.errors import SeriesError
from patches.tools.series import ReadFile, wheel_path

Origin = int | str
"""The upstream line number, or the name of the patch that inserted the line."""


@dataclass(frozen=True)
class Line:
    origin: Origin
    text: str


@dataclass(frozen=True)
class Anchor:
    """The line an insertion follows, and the last upstream line up to there.

    ``ends_run`` says that no inserted line came after it.
    """

    line: Line
    upstream: int
    ends_run: bool


@dataclass(frozen=True)
class Anchored:
    """A patch whose insertions are tied to lines instead of line numbers."""

    patch: Patch
    insertions: Mapping[str, tuple[tuple[Anchor, tuple[str, ...]], ...]]


_START = Line(0, "")


class Tracker:
    """Files as lists of lines that know where they came from."""

    def __init__(self, read: ReadFile) -> None:
        self._read = read
        self._files: dict[str, list[Line]] = {}

    def lines(self, path: str) -> list[Line]:
        """Return the lines of a file named as in a patch, as patched so far."""
        if path not in self._files:
            upstream = split_lines(self._read(wheel_path(path)))
            self._files[path] = [Line(i, t) for i, t in enumerate(upstream, start=1)]
        return self._files[path]

    def content(self, path: str) -> bytes:
        return "".join(line.text for line in self.lines(path)).encode("utf-8")

    def push(self, name: str, path: str, insertions: Iterable[Insertion]) -> None:
        """Make the insertions of the patch ``name``."""
        old = self.lines(path)
        new: list[Line] = []
        done = 0
        for insertion in insertions:
            new += old[done : insertion.after]
            new += [Line(name, f"{text}\n") for text in insertion.lines]
            done = insertion.after
        self._files[path] = new + old[done:]

    def anchor(self, path: str, after: int) -> Anchor:
        """Tie position ``after`` of the file to the line that stands there."""
        lines = self.lines(path)
        before = [line.origin for line in lines[:after] if isinstance(line.origin, int)]
        following = lines[after].origin if after < len(lines) else 0
        return Anchor(
            line=lines[after - 1] if after else _START,
            upstream=before[-1] if before else 0,
            ends_run=isinstance(following, int),
        )

    def find(self, path: str, anchor: Anchor) -> int:
        """Return the position of an anchor, or raise SeriesError if it is gone."""
        lines = self.lines(path)
        if anchor.line == _START:
            return 0
        if anchor.line in lines and lines.count(anchor.line) == 1:
            return lines.index(anchor.line) + 1
        if not anchor.ends_run:
            raise SeriesError(
                f"{path}: it follows the line {anchor.line.text.strip()!r} of "
                f"{anchor.line.origin}, which is gone"
            )
        end = next(
            (i for i, line in enumerate(lines, 1) if line.origin == anchor.upstream), 0
        )
        while end < len(lines) and isinstance(lines[end].origin, str):
            end += 1
        return end


def tie(patches: Iterable[Patch], read: ReadFile) -> list[Anchored]:
    """Tie every insertion of a series to the line it follows."""
    tracker = Tracker(read)
    tied: list[Anchored] = []
    for patch in patches:
        found = {
            file.path: tuple(
                (tracker.anchor(file.path, i.after), i.lines) for i in file.insertions
            )
            for file in patch.files
        }
        for file in patch.files:
            tracker.push(patch.name, file.path, file.insertions)
        tied.append(Anchored(patch, found))
    return tied


def place(tied: Iterable[Anchored], read: ReadFile) -> list[Patch]:
    """Compute positions and blob ids anew, for the patches in this order."""
    tracker = Tracker(read)
    placed: list[Patch] = []
    for item in tied:
        try:
            files = tuple(
                _place_file(tracker, item.patch.name, path, insertions)
                for path, insertions in item.insertions.items()
            )
        except SeriesError as error:
            raise SeriesError(f"patches/{item.patch.name}: {error}") from None
        placed.append(Patch(item.patch.name, item.patch.header, files))
    return placed


def _place_file(
    tracker: Tracker,
    name: str,
    path: str,
    insertions: tuple[tuple[Anchor, tuple[str, ...]], ...],
) -> FileDiff:
    before = tracker.content(path)
    found = sorted(
        (Insertion(tracker.find(path, anchor), lines) for anchor, lines in insertions),
        key=lambda insertion: insertion.after,
    )
    after = insert(before, tuple(found))
    tracker.push(name, path, found)
    return FileDiff(path, blob_id(before), blob_id(after), tuple(found))
