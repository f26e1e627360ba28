"""The patch format: what parses, what is refused, what applying guarantees."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patches.tools.diff import (
    FileDiff,
    Insertion,
    Patch,
    blob_id,
    insert,
    parse,
    render,
)
from patches.tools.errors import SeriesError
from patches.tools.export import export_file

PATH = "python/sglang/srt/a.py"
OLD = b"one\ntwo\nthree\n"
GOOD = """\
Subject: alpha: insert a line
Reason: a reason that is so long that the field goes on in a second line of the header
 and ends there
Forwarded: not-needed
Remove-When: upstream has it

diff --git a/python/sglang/srt/a.py b/python/sglang/srt/a.py
index {before}..{after} 100644
--- a/python/sglang/srt/a.py
+++ b/python/sglang/srt/a.py
@@ -0,0 +1 @@
+zero
@@ -2,0 +4,2 @@
+
+two and a half
""".format(
    before=blob_id(OLD), after=blob_id(b"zero\none\ntwo\n\ntwo and a half\nthree\n")
)


def test_a_patch_inserts_its_lines() -> None:
    patch = parse("alpha/a.patch", GOOD)

    assert patch.files[0].apply(OLD) == b"zero\none\ntwo\n\ntwo and a half\nthree\n"
    assert patch.feature == "alpha"
    assert patch.inserted_lines == 3
    assert patch.field("Reason").endswith("header and ends there")


def test_rendering_is_the_inverse_of_parsing() -> None:
    assert render(parse("alpha/a.patch", GOOD)) == GOOD


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("+zero", " zero", r"a\.patch:12: ' zero' is not an inserted line"),
        ("+two and", "-two and", "'-two and a half' is not an inserted line"),
        ("@@ -0,0 +1 @@", "@@ -0,0 +1 @@ def f():", "no text may follow"),
        ("@@ -0,0 +1 @@", "@@ -1 +1 @@", "is no '@@ -LINE,0"),
        ("@@ -2,0 +4,2 @@", "@@ -2,0 +5,2 @@", "does not count its lines right"),
        ("@@ -2,0 +4,2 @@", "@@ -2,0 +4,3 @@", "the hunk promises 3"),
        ("@@ -2,0 +4,2 @@", "@@ -0,0 +2,2 @@", "not in ascending order"),
        ("+two and a half", "+two and a half\n+more", "neither an inserted line"),
        ("+two and a half", "+x\n three", "neither an inserted line"),
        ("Reason: a", "Cause: a", "it needs exactly Subject, Reason"),
        ("Forwarded: not-needed\n", "", "it needs exactly Subject, Reason"),
        ("not-needed", "perhaps", "'perhaps' is not one of"),
        ("Subject: alpha", "Subject alpha", "is no 'Field: value' header line"),
        ("a/python/sglang/srt/a.py b", "a/other.py b", "neither an inserted line"),
        ("python/sglang", "docs/sglang", "is not below python/sglang/"),
        ("python/sglang/srt", "python/sglang/../srt", "is not below python/sglang/"),
        (" 100644", " 100755", "mode 100644"),
        (blob_id(OLD), blob_id(OLD)[:12], "two full blob ids"),
        ("--- a/python", "--- c/python", "expected"),
        ("\n+two and a half\n", "\n+two and a half", "the last line has no newline"),
    ],
)
def test_anything_else_is_refused(old: str, new: str, message: str) -> None:
    assert old in GOOD

    with pytest.raises(SeriesError, match=message):
        parse("alpha/a.patch", GOOD.replace(old, new))


def test_a_header_alone_is_refused() -> None:
    with pytest.raises(SeriesError, match="no 'diff --git' line"):
        parse("alpha/a.patch", GOOD.split("diff --git")[0])


def test_another_file_is_refused() -> None:
    diff = parse("alpha/a.patch", GOOD).files[0]

    with pytest.raises(SeriesError, match="another upstream, or patches out of order"):
        diff.apply(b"shifted\n" + OLD)


def test_a_second_application_is_refused() -> None:
    diff = parse("alpha/a.patch", GOOD).files[0]

    with pytest.raises(SeriesError, match="applied already"):
        diff.apply(diff.apply(OLD))


def test_a_wrong_promise_is_refused() -> None:
    diff = FileDiff(PATH, blob_id(OLD), "0" * 40, (Insertion(1, ("x",)),))

    with pytest.raises(SeriesError, match="the patch promises 000000000000"):
        diff.apply(OLD)


def test_a_position_behind_the_end_is_refused() -> None:
    with pytest.raises(SeriesError, match="position 4 is behind the end, line 3"):
        insert(OLD, (Insertion(4, ("x",)),))


LINES = st.lists(st.sampled_from(["x = 1", "", "    y", "\x0cz", "}"]), max_size=12)


@st.composite
def edits(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Draw a file and the same file with lines inserted anywhere."""
    old = draw(LINES)
    new = list(old)
    for line in draw(LINES.filter(len)):
        new.insert(draw(st.integers(0, len(new))), line)
    return tuple("".join(f"{line}\n" for line in ls).encode() for ls in (old, new))  # type: ignore[return-value]


@settings(deadline=None, max_examples=50)
@given(edits())
def test_exported_edits_apply_and_parse_back(edit: tuple[bytes, bytes]) -> None:
    old, new = edit
    diff = export_file(PATH, old, new)
    header = tuple((f, "x") for f in ("Subject", "Reason"))
    header += (("Forwarded", "no"), ("Remove-When", "x"))
    patch = Patch("alpha/a.patch", header, (diff,))

    assert diff.apply(old) == new
    assert parse(patch.name, render(patch)) == patch


def test_git_applies_a_patch_to_the_same_effect(tmp_path: Path) -> None:
    (tmp_path / PATH).parent.mkdir(parents=True)
    (tmp_path / PATH).write_bytes(OLD)
    (tmp_path / "a.patch").write_text(GOOD)

    command = ["git", "apply", "--unidiff-zero", "a.patch"]
    environment = {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent), "PATH": "/usr/bin"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)

    diff = parse("alpha/a.patch", GOOD).files[0]
    assert (tmp_path / PATH).read_bytes() == diff.apply(OLD)


@pytest.mark.parametrize("new", [b"one\ntwo\n", b"one\n2\nthree\n", b"one\ntwo\nthree"])
def test_an_edit_that_removes_is_refused(new: bytes) -> None:
    with pytest.raises(SeriesError, match="must only insert whole lines"):
        export_file(PATH, OLD, new)
