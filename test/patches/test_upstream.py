"""The report on another upstream version."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping

import pytest
from patches.tools.__main__ import main
from patches.tools.errors import SeriesError
from patches.tools.upstream import fetch_version, lines, report_upstream, symbol_at
from patches.tools.wheel import cache_dir

from .conftest import TAG, UPSTREAM, Project

A, B = "sglang/srt/a.py", "sglang/srt/b.py"


def publish(version: str, changes: Mapping[str, str | None]) -> None:
    """Put a wheel of another version where a download would leave it."""
    folder = cache_dir() / "unpinned"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"sglang-{version}-{TAG}-{TAG}-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in {**UPSTREAM, **changes}.items():
            if text is not None:
                renamed = path.replace("-0.5.23.", f"-{version}.")
                archive.writestr(renamed, text.replace("0.5.23", version))


@pytest.fixture
def patched(project: Project) -> Project:
    """One patch in a.py behind line 10, one in f() of b.py."""
    tree = project.tree()
    project.add("alpha/one.patch", A, "a10 = 10", "one = 1", tree)
    project.add("beta/two.patch", B, "    x = 1", "    two = 2", tree)
    return project


def states(project: Project, version: str) -> list[str]:
    report = report_upstream(version, project.root)
    return [patch.state for patch in report.patches]


def test_an_equal_version_takes_the_series(patched: Project) -> None:
    publish("0.5.24", {})
    assert states(patched, "0.5.24") == ["applies", "applies"]
    assert report_upstream("0.5.24", patched.root).clean


def test_lines_above_move_an_anchor(patched: Project) -> None:
    publish("0.5.24", {A: "new = 0\nnew = 1\n" + UPSTREAM[A]})
    report = report_upstream("0.5.24", patched.root)
    spot = report.patches[0].spots[0]
    assert (spot.here, spot.there, spot.changed) == (10, 12, ())
    assert report.patches[0].state == "moved"
    assert report.clean
    assert f"    python/{A}:10 in module: line 12 (+2)" in list(lines(report))


def test_a_changed_neighbour_is_shown(patched: Project) -> None:
    publish("0.5.24", {A: UPSTREAM[A].replace("a11 = 11", "a11 = changed")})
    report = report_upstream("0.5.24", patched.root)
    assert report.patches[0].state == "look"
    assert report.patches[0].spots[0].changed == ("-a11 = 11", "+a11 = changed")
    assert not report.clean


def test_far_changes_are_not_shown(patched: Project) -> None:
    publish("0.5.24", {A: UPSTREAM[A].replace("a18 = 18", "a18 = changed")})
    assert states(patched, "0.5.24") == ["applies", "applies"]


def test_a_line_that_went_breaks_the_patch(patched: Project) -> None:
    publish("0.5.24", {A: UPSTREAM[A].replace("a10 = 10\n", "")})
    report = report_upstream("0.5.24", patched.root)
    assert report.patches[0].state == "broken"
    assert report.patches[0].spots[0].there is None
    assert "-a10 = 10" in report.patches[0].spots[0].changed


def test_a_file_that_went_breaks_the_patch(patched: Project) -> None:
    publish("0.5.24", {A: None})
    report = report_upstream("0.5.24", patched.root)
    assert report.patches[0].missing == (f"python/{A}",)
    assert [patch.state for patch in report.patches] == ["broken", "applies"]


def test_the_same_lines_in_another_function_need_a_look(patched: Project) -> None:
    publish("0.5.24", {B: UPSTREAM[B].replace("def f():", "def other():")})
    report = report_upstream("0.5.24", patched.root)
    assert report.patches[1].state == "look"
    assert report.patches[1].spots[0].changed[:2] == ("-f", "+other")


def test_an_insertion_behind_ours_follows_its_line(patched: Project) -> None:
    """What is tied to a line of another patch adds no upstream line to look at."""
    tree = patched.tree(name="second")
    patched.add("beta/three.patch", A, "one = 1", "three = 3", tree)
    publish("0.5.24", {A: UPSTREAM[A].replace("a10 = 10\n", "")})
    report = report_upstream("0.5.24", patched.root)
    by_name = {patch.name: patch for patch in report.patches}
    assert by_name["beta/three.patch"].spots == ()
    assert by_name["alpha/one.patch"].state == "broken"


def test_a_path_that_upstream_took_is_told(patched: Project) -> None:
    publish("0.5.24", {"sglang/srt/ours.py": "pass\n"})
    report = report_upstream("0.5.24", patched.root)
    assert report.taken == ("sglang/srt/ours.py",)
    assert not report.clean


@pytest.mark.parametrize("version", ["", "latest", "0.5.24; rm", "../0.5"])
def test_only_versions_are_fetched(version: str) -> None:
    with pytest.raises(SeriesError, match=r"--version: .* is not a version"):
        fetch_version("sglang", version, TAG)


def test_symbol_names_the_innermost_scope() -> None:
    source = "x = 1\nclass C:\n    def f(self):\n        if x:\n            def g():\n                pass\n"
    assert [symbol_at(source, n) for n in (1, 2, 4, 6)] == [
        "module",
        "C",
        "C.f",
        "C.f.g",
    ]
    assert symbol_at("def broken(", 1) == "module"


@pytest.mark.slow
def test_the_real_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    """0.5.22: every patch is reported, most only move. Skips without an index."""
    try:
        fetch_version("sglang", "0.5.22", TAG)
    except SeriesError as error:
        pytest.skip(str(error))
    assert main(["upstream", "--version", "0.5.22"]) == 1
    out = capsys.readouterr().out
    assert "0.5.23 -> 0.5.22" in out
    assert "moved    routing-prefix/note-admissions.patch" in out
    assert "note_admitted" not in out  # upstream's lines are shown, ours are not
