"""The validators fail on each planted violation and pass a clean series."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from patches.tools.check import check_exact, check_form

from .conftest import Project

Plant = Callable[[Project], None]


def test_a_clean_series_passes(patched: Project) -> None:
    assert check_form(patched.root) == []
    assert check_exact(patched.root) == []


def _replace(path: str, old: str, new: str) -> Plant:
    def plant(project: Project) -> None:
        text = (project.root / path).read_text("utf-8")
        assert old in text
        project.write(path, text.replace(old, new, 1))

    return plant


def _unlisted(project: Project) -> None:
    text = (project.patches / "alpha/low.patch").read_text("utf-8")
    project.write("patches/alpha/extra.patch", text)


def _unclaimed(project: Project) -> None:
    project.write("python/sglang/srt/stray.py", "")


HUNK, FIRST = "@@ -3,0 +4 @@", "+high = 1"
HIGH = "patches/alpha/high.patch"


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_replace(HIGH, FIRST, " high = 1"), "not an inserted line"),
        (_replace(HIGH, FIRST, "+high = 1\n a4 = 4"), "only insertions"),
        (_replace(HIGH, FIRST, "-a3 = 3\n+high = 1"), "not an inserted line"),
        (_replace(HIGH, HUNK, f"{HUNK} def f():"), "no text may follow"),
        (_replace(HIGH, "Reason: the", "Because: the"), "it needs exactly Subject"),
        (_replace(HIGH, "Subject: alpha", "Subject: beta"), "Subject must start"),
        (_replace(HIGH, FIRST, "+high = 1 "), "trailing blanks"),
        (_unlisted, "alpha/extra.patch: not listed in series"),
        (_unclaimed, "stray.py: listed by no feature"),
        (
            _replace("patches/series", "beta/end.patch", "alpha/low.patch"),
            "listed twice",
        ),
        (
            _replace("patches/series", "beta/end.patch", "beta/gone.patch"),
            "beta/gone.patch: No such file",
        ),
        (
            _replace(
                "patches/series",
                "alpha/high.patch\nalpha/low.patch",
                "alpha/low.patch\nalpha/high.patch",
            ),
            "alpha/high.patch must stand before alpha/low.patch",
        ),
        (_replace("patches/features.toml", 'name = "beta"', 'name = "b"'), "'beta'"),
        (
            _replace("patches/features.toml", "srt/ours.py", "srt/o.py"),
            "'sglang/srt/o.py' matches no file",
        ),
        (
            _replace("patches/features.toml", '"test/test_ours', '"test/test_gone'),
            "'test/test_gone.py' does not exist",
        ),
        (_replace("patches/features.toml", "upstream = true", ""), "'upstream'"),
        (
            _replace("upstream.toml", "revision = 1", "revision = 0"),
            "revision: 0 is not a positive integer",
        ),
        (_replace("upstream.toml", 'sha256 = "', 'sha256 = "z'), "64 hex digits"),
    ],
)
def test_a_planted_violation_is_found_without_upstream(
    patched: Project, plant: Plant, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    plant(patched)

    problems = check_form(patched.root)

    assert any(message in problem for problem in problems), problems


def test_a_broken_chain_of_blob_ids_is_found_without_upstream(
    patched: Project,
) -> None:
    low = (patched.patches / "alpha/low.patch").read_text("utf-8")
    before = low.split("index ")[1][:40]
    patched.write("patches/alpha/low.patch", low.replace(before, "0" * 40))

    (problem, *_) = check_form(patched.root)

    assert "made for blob 000000000000, but alpha/high.patch leaves" in problem


def test_a_patch_for_another_upstream_is_found(patched: Project) -> None:
    text = (patched.patches / "alpha/high.patch").read_text("utf-8")
    before = text.split("index ")[1][:40]
    patched.write("patches/alpha/high.patch", text.replace(before, "0" * 40))

    assert "another upstream" in check_exact(patched.root)[0]


def test_a_patch_for_a_missing_file_is_found(patched: Project) -> None:
    text = (patched.patches / "alpha/high.patch").read_text("utf-8")
    patched.write("patches/alpha/high.patch", text.replace("srt/a.py", "srt/no.py"))

    assert "is not in the upstream wheel" in check_exact(patched.root)[0]


def test_a_patch_the_exporter_would_write_differently_is_found(
    patched: Project,
) -> None:
    path = "patches/alpha/high.patch"
    folded = "Reason: the caller\n is upstream's"
    _replace(path, "Reason: the caller is upstream's", folded)(patched)

    assert check_form(patched.root) == []
    assert check_exact(patched.root) == [
        "patches/alpha/high.patch: 'refresh' would write it differently"
    ]


def test_a_file_that_no_longer_compiles_is_found(project: Project) -> None:
    tree = project.tree("none")
    project.add("alpha/x.patch", "sglang/srt/a.py", "a1 = 1", "def (", tree)

    assert "sglang/srt/a.py:2: invalid syntax" in check_exact(project.root)[0]


def test_an_overlay_file_in_upstreams_place_is_found(patched: Project) -> None:
    patched.write("python/sglang/srt/b.py", "")

    assert "upstream has a file there" in check_exact(patched.root)[0]
