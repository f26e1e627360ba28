"""Patches are added, edited and dropped; the others move with them, or nothing does."""

from __future__ import annotations

import pytest
from patches.tools.check import check_exact, check_form
from patches.tools.edit import drop_patch, edit_patch, refresh_all
from patches.tools.errors import SeriesError
from patches.tools.pin import read_pin
from patches.tools.series import apply_series, load_series
from patches.tools.wheel import UpstreamWheel, fetch

from .conftest import Project, insert_after

A = "sglang/srt/a.py"
B = "sglang/srt/b.py"


def lines_of(project: Project) -> list[str]:
    """Return the lines that the series inserts, with the line before each."""
    upstream = UpstreamWheel(fetch(read_pin(project.root)))
    applied = apply_series(load_series(project.root), upstream.read)
    lines = applied.content(A).decode().splitlines()
    return [
        f"{lines[i - 1]} | {line}"
        for i, line in enumerate(lines)
        if not line.startswith("a")
    ]


def test_patches_take_their_place_in_the_order(patched: Project) -> None:
    assert patched.series() == ["alpha/high.patch", "alpha/low.patch", "beta/end.patch"]
    assert lines_of(patched) == [
        "a3 = 3 | high = 1",
        "a15 = 15 | low = 1",
        "a20 = 20 | end = 1",
    ]
    assert check_form(patched.root) == check_exact(patched.root) == []


def test_a_refresh_of_a_clean_series_changes_nothing(patched: Project) -> None:
    before = patched.state()

    refresh_all(patched.root)

    assert patched.state() == before


def test_an_edit_moves_the_later_patches(patched: Project) -> None:
    tree = patched.tree("alpha/high.patch")
    insert_after(tree / A, "a2 = 2", "more = 1")

    edit_patch("alpha/high.patch", tree, root=patched.root)

    assert lines_of(patched) == [
        "a2 = 2 | more = 1",
        "a3 = 3 | high = 1",
        "a15 = 15 | low = 1",
        "a20 = 20 | end = 1",
    ]
    assert check_form(patched.root) == check_exact(patched.root) == []


def test_an_insertion_after_another_patchs_last_line_stays_there(
    patched: Project,
) -> None:
    project = patched
    project.add("beta/tail.patch", A, "low = 1", "tail = 1", project.tree())
    tree = project.tree("alpha/low.patch", "edited")
    text = (tree / A).read_text()
    (tree / A).write_text(text.replace("low = 1", "low = 2\nlow = 3"))

    edit_patch("alpha/low.patch", tree, root=project.root)

    assert lines_of(project)[1:4] == [
        "a15 = 15 | low = 2",
        "low = 2 | low = 3",
        "low = 3 | tail = 1",
    ]
    assert check_exact(project.root) == []


def test_an_edit_that_takes_a_later_patchs_anchor_is_refused(patched: Project) -> None:
    project = patched
    tree = project.tree("alpha/low.patch", "first")
    insert_after(tree / A, "low = 1", "low = 2")
    edit_patch("alpha/low.patch", tree, root=project.root)
    project.add("beta/mid.patch", A, "low = 1", "mid = 1", project.tree())
    tree = project.tree("alpha/low.patch", "second")
    (tree / A).write_text((tree / A).read_text().replace("low = 1\n", ""))
    before = project.state()

    with pytest.raises(SeriesError, match=r"beta/mid.*follows the line 'low = 1'"):
        edit_patch("alpha/low.patch", tree, root=project.root)

    assert project.state() == before


def test_a_dropped_patch_takes_nothing_with_it(patched: Project) -> None:
    drop_patch("alpha/high.patch", patched.root)

    assert lines_of(patched) == ["a15 = 15 | low = 1", "a20 = 20 | end = 1"]
    assert not (patched.patches / "alpha/high.patch").exists()
    assert check_form(patched.root) == check_exact(patched.root) == []


def test_a_line_may_go_between_an_anchor_and_another_patch(patched: Project) -> None:
    tree = patched.tree("alpha/low.patch")

    patched.add("alpha/second.patch", A, "a3 = 3", "first = 1", tree)

    assert lines_of(patched)[:2] == ["a3 = 3 | first = 1", "first = 1 | high = 1"]
    assert check_form(patched.root) == check_exact(patched.root) == []


def test_a_patch_may_follow_a_line_that_a_later_one_inserts(patched: Project) -> None:
    tree = patched.tree("alpha/low.patch")
    patched.add("alpha/inner.patch", B, "    x = 1", "    y = 1", tree)
    insert_after(tree / A, "a1 = 1", "both = 1")

    patched.add("alpha/both.patch", B, "    y = 1", "    z = 1", tree)

    assert patched.series().index("alpha/both.patch") == 0
    assert "    x = 1\n    y = 1\n    z = 1\n" in (patched.tree() / B).read_text()
    assert check_form(patched.root) == check_exact(patched.root) == []


def test_an_edit_that_the_order_would_change_is_refused(patched: Project) -> None:
    tree = patched.tree("alpha/low.patch")
    patched.add("alpha/inner.patch", B, "    x = 1", "    y = 1", tree)
    insert_after(tree / A, "a1 = 1", "both = 1")
    before = patched.state()

    with pytest.raises(SeriesError, match="lines at one place into one patch"):
        patched.add("alpha/both.patch", B, "    x = 1", "    z = 1", tree)

    assert patched.state() == before


def test_a_patch_stays_where_a_dropped_one_was(patched: Project) -> None:
    patched.add("beta/tail.patch", A, "low = 1", "tail = 1", patched.tree())

    drop_patch("alpha/low.patch", patched.root)

    assert lines_of(patched)[1] == "a15 = 15 | tail = 1"


def test_an_edit_needs_a_tree_of_the_right_patches(patched: Project) -> None:
    with pytest.raises(SeriesError, match=r"with --through alpha/low.patch"):
        patched.add("alpha/x.patch", A, "a9 = 9", "x = 1", patched.tree())
    with pytest.raises(SeriesError, match=r"holds the series through beta/end.patch"):
        edit_patch("alpha/low.patch", patched.root.parent / "tree", root=patched.root)


def test_names_are_checked(patched: Project) -> None:
    tree = patched.tree()

    with pytest.raises(SeriesError, match="'refresh' changes it"):
        patched.add("beta/end.patch", A, "a9 = 9", "x = 1", tree)
    with pytest.raises(SeriesError, match=r"feature 'gamma' is not in features.toml"):
        patched.add("gamma/x.patch", A, "a8 = 8", "x = 1", tree)
    with pytest.raises(SeriesError, match=r"'alpha/no.patch' is not listed"):
        drop_patch("alpha/no.patch", patched.root)


def test_a_tree_without_an_edit_is_refused(patched: Project) -> None:
    tree = patched.tree("alpha/high.patch")
    insert_after(tree / A, "a5 = 5", "x = 1")
    (tree / A).write_text((tree / A).read_text().replace("x = 1\nhigh", "high"))
    (tree / A).write_text("".join(f"a{i} = {i}\n" for i in range(1, 21)))

    with pytest.raises(SeriesError, match="nothing in it differs"):
        edit_patch("alpha/high.patch", tree, root=patched.root)
