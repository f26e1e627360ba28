"""Writes patches byte-stable: the same two files always give the same hunks."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from patches.tools.diff import PREFIX, FileDiff, Patch, blob_id, parse
from patches.tools.errors import SeriesError
from patches.tools.series import Applied, wheel_path

_DIFF = ["git", "diff", "--no-index", "--no-ext-diff", "--no-color", "--no-prefix"]
_DIFF += ["-U0", "--no-indent-heuristic", "--diff-algorithm=minimal"]


def git_environment() -> dict[str, str]:
    """Return an environment in which git reads nobody's settings or repository."""
    return os.environ | {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": tempfile.gettempdir(),
        "LC_ALL": "C",
    }


def export_file(
    path: str, before: bytes, after: bytes, prefix: str = PREFIX
) -> FileDiff:
    """Return the diff of one file, or raise SeriesError if it does not only insert."""
    body = [f"diff --git a/{path} b/{path}"]
    body += [f"index {blob_id(before)}..{blob_id(after)} 100644"]
    body += [f"--- a/{path}", f"+++ b/{path}", *_hunks(before, after)]
    header = "Subject: x\nReason: x\nForwarded: no\nRemove-When: x\n\n"
    try:
        return parse(path, header + "\n".join(body) + "\n", prefix).files[0]
    except SeriesError as error:
        raise SeriesError(
            f"{path}: the edit must only insert whole lines ({error})"
        ) from None


def _hunks(before: bytes, after: bytes) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in (("before", before), ("after", after)):
            (Path(folder) / name).write_bytes(data)
        done = subprocess.run(
            [*_DIFF, "before", "after"],
            cwd=folder,
            env=git_environment(),
            capture_output=True,
            check=False,
        )
    if done.returncode > 1:
        raise SeriesError(f"git diff failed: {done.stderr.decode().strip()}")
    lines = done.stdout.decode("utf-8").split("\n")[:-1]
    start = next((i for i, line in enumerate(lines) if line.startswith("@@")), None)
    if start is None:
        raise SeriesError("nothing changed")
    return [_strip(line) for line in lines[start:]]


def _strip(line: str) -> str:
    """Drop the upstream text that git prints after the second ``@@``."""
    return line[: line.index("@@", 2) + 2] if line.startswith("@@") else line


def export_patch(patch: Patch, before: Applied) -> Patch:
    """Export a patch anew from what it makes of the files in ``before``."""
    files = []
    for file in patch.files:
        old = before.content(wheel_path(file.path))
        files.append(export_file(file.path, old, file.apply(old)))
    return Patch(patch.name, patch.header, tuple(files))
