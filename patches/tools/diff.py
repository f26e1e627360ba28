"""The one patch format of the series, parsed strictly and applied in memory.

A patch is a header of ``Field: value`` lines, an empty line, and then a zero-context
unified diff that only inserts. Every file carries the full git blob ids of the file
before and after it. A zero-context hunk says nothing about its surroundings, so these
ids, and not the tool that applies the hunks, guarantee that lines land in their place.
"""

from __future__ import annotations

import hashlib
import io
import re
import textwrap
from dataclasses import dataclass

from patches.tools.errors import SeriesError

FIELDS = ("Subject", "Reason", "Forwarded", "Remove-When")
PREFIX = "python/sglang/"

_GIT_LINE = re.compile(r"diff --git a/(?P<path>\S+) b/(?P=path)")
_INDEX_LINE = re.compile(
    r"index (?P<before>[0-9a-f]{40})\.\.(?P<after>[0-9a-f]{40}) 100644"
)
_HUNK_LINE = re.compile(r"@@ -(?P<after>\d+),0 \+(?P<start>\d+)(?:,(?P<count>\d+))? @@")
_FIELD_LINE = re.compile(r"(?P<name>[A-Z][A-Za-z-]*): (?P<value>\S.*)")
_FORWARDED = re.compile(r"no|not-needed|https://\S+")


def blob_id(data: bytes) -> str:
    """Return git's object id of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class Insertion:
    """Lines to put after line ``after`` (counted from 1) of the file before the patch."""

    after: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class FileDiff:
    """What one patch inserts into one file, and the blob ids that frame it."""

    path: str
    before: str
    after: str
    insertions: tuple[Insertion, ...]

    def apply(self, data: bytes) -> bytes:
        """Return the file with the lines inserted, or raise SeriesError.

        Raises when ``data`` is not exactly the file the diff was made from, or when
        the result is not exactly the file it was made for.
        """
        found = blob_id(data)
        if found == self.after:
            raise SeriesError(f"{self.path}: this patch is applied already")
        if found != self.before:
            raise SeriesError(
                f"{self.path}: blob {found[:12]} found, the patch needs "
                f"{self.before[:12]} (another upstream, or patches out of order)"
            )
        result = insert(data, self.insertions)
        if blob_id(result) != self.after:
            raise SeriesError(
                f"{self.path}: the result is blob {blob_id(result)[:12]}, "
                f"the patch promises {self.after[:12]}"
            )
        return result


@dataclass(frozen=True)
class Patch:
    """One parsed patch file; ``name`` is its path below ``patches/``."""

    name: str
    header: tuple[tuple[str, str], ...]
    files: tuple[FileDiff, ...]

    @property
    def feature(self) -> str:
        return self.name.split("/", 1)[0]

    def field(self, name: str) -> str:
        return dict(self.header)[name]

    @property
    def inserted_lines(self) -> int:
        return sum(len(i.lines) for f in self.files for i in f.insertions)


def split_lines(data: bytes) -> list[str]:
    """Return the lines as git counts them: only a newline ends one, and is kept."""
    return list(io.StringIO(data.decode("utf-8"), newline="\n"))


def insert(data: bytes, insertions: tuple[Insertion, ...]) -> bytes:
    """Return ``data`` with every insertion made; positions are those of ``data``."""
    old = split_lines(data)
    new: list[str] = []
    done = 0
    for insertion in insertions:
        if insertion.after > len(old):
            raise SeriesError(
                f"position {insertion.after} is behind the end, line {len(old)}"
            )
        new += old[done : insertion.after]
        new += [f"{line}\n" for line in insertion.lines]
        done = insertion.after
    return "".join(new + old[done:]).encode("utf-8")


def parse(name: str, text: str, prefix: str = PREFIX) -> Patch:
    """Parse one patch file; raise SeriesError naming the first line that is wrong.

    Every path must be below ``prefix``.
    """
    return _Parser(name, text, prefix).parse()


def render(patch: Patch) -> str:
    """Return the text of a patch file, the exact inverse of :func:`parse`."""
    lines = [line for name, value in patch.header for line in _fold(name, value)]
    lines.append("")
    for file in patch.files:
        lines += _file_lines(file)
    return "\n".join(lines) + "\n"


def _fold(name: str, value: str) -> list[str]:
    return textwrap.wrap(
        f"{name}: {value}",
        width=88,
        subsequent_indent=" ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _file_lines(file: FileDiff) -> list[str]:
    lines = [
        f"diff --git a/{file.path} b/{file.path}",
        f"index {file.before}..{file.after} 100644",
        f"--- a/{file.path}",
        f"+++ b/{file.path}",
    ]
    shift = 0
    for insertion in file.insertions:
        count = len(insertion.lines)
        span = f",{count}" if count > 1 else ""
        start = insertion.after + shift + 1
        lines.append(f"@@ -{insertion.after},0 +{start}{span} @@")
        lines += [f"+{line}" for line in insertion.lines]
        shift += count
    return lines


class _Parser:
    """Reads a patch line by line and refuses everything the format does not have."""

    def __init__(self, name: str, text: str, prefix: str) -> None:
        self._name = name
        self._prefix = prefix
        self._complete = text.endswith("\n")
        self._lines = text.split("\n")[: -1 if self._complete else None]
        self._at = 0

    def parse(self) -> Patch:
        if not self._complete:
            raise SeriesError(f"{self._name}: the last line has no newline")
        header = self._header()
        files: list[FileDiff] = []
        while self._at < len(self._lines):
            files.append(self._file())
        if not files:
            raise self._error("no 'diff --git' line follows the header")
        return Patch(self._name, header, tuple(files))

    def _error(self, what: str) -> SeriesError:
        return SeriesError(f"{self._name}:{self._at + 1}: {what}")

    def _peek(self) -> str:
        return self._lines[self._at] if self._at < len(self._lines) else ""

    def _next(self) -> str:
        line = self._peek()
        self._at += 1
        return line

    def _header(self) -> tuple[tuple[str, str], ...]:
        fields: list[tuple[str, str]] = []
        while line := self._peek():
            if line.startswith(" ") and fields:
                name, value = fields[-1]
                fields[-1] = (name, f"{value} {line.strip()}")
            elif match := _FIELD_LINE.fullmatch(line):
                fields.append((match["name"], match["value"]))
            else:
                raise self._error(f"{line!r} is no 'Field: value' header line")
            self._at += 1
        names = tuple(name for name, _ in fields)
        if names != FIELDS:
            raise self._error(
                f"the header has fields {', '.join(names) or 'none'}; "
                f"it needs exactly {', '.join(FIELDS)}"
            )
        if not _FORWARDED.fullmatch(dict(fields)["Forwarded"]):
            raise self._error(
                f"Forwarded: {dict(fields)['Forwarded']!r} is not one of "
                "'no', 'not-needed' or an https link"
            )
        self._at += 1
        return tuple(fields)

    def _file(self) -> FileDiff:
        git = _GIT_LINE.fullmatch(self._peek())
        if git is None:
            raise self._error(
                f"{self._peek()!r} is neither an inserted line nor the start of "
                "a hunk or file (only insertions, without context, are allowed)"
            )
        path = git["path"]
        if not path.startswith(self._prefix) or ".." in path.split("/"):
            raise self._error(f"{path!r} is not below {self._prefix}")
        self._at += 1
        index = _INDEX_LINE.fullmatch(self._peek())
        if index is None:
            raise self._error("no 'index' line with two full blob ids and mode 100644")
        self._at += 1
        for expected in (f"--- a/{path}", f"+++ b/{path}"):
            if self._peek() != expected:
                raise self._error(f"{expected!r} expected, {self._peek()!r} found")
            self._at += 1
        return FileDiff(path, index["before"], index["after"], self._hunks())

    def _hunks(self) -> tuple[Insertion, ...]:
        found: list[Insertion] = []
        shift, last = 0, -1
        while self._peek().startswith("@@"):
            insertion = self._hunk(shift)
            if insertion.after <= last:
                raise self._error("hunks are not in ascending order")
            found.append(insertion)
            shift += len(insertion.lines)
            last = insertion.after
        if not found:
            raise self._error("the file has no hunk")
        return tuple(found)

    def _hunk(self, shift: int) -> Insertion:
        match = _HUNK_LINE.fullmatch(self._peek())
        if match is None:
            raise self._error(
                f"{self._peek()!r} is no '@@ -LINE,0 +LINE,COUNT @@' "
                "(no text may follow the second @@)"
            )
        after, start = int(match["after"]), int(match["start"])
        count = 1 if match["count"] is None else int(match["count"])
        if match["count"] in ("0", "1") or start != after + shift + 1:
            raise self._error(f"{self._peek()!r} does not count its lines right")
        self._at += 1
        lines = []
        for _ in range(count):
            if not self._peek().startswith("+"):
                raise self._error(
                    f"{self._peek()!r} is not an inserted line "
                    f"(the hunk promises {count})"
                )
            lines.append(self._next()[1:])
        return Insertion(after, tuple(lines))
