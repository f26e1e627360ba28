"""Moving the series and the pin to another upstream version."""

from __future__ import annotations

import re

import pytest
from patches.tools.check import check_exact, check_form
from patches.tools.edit import drop_patch
from patches.tools.errors import SeriesError
from patches.tools.move import move_series
from patches.tools.pin import read_pin
from patches.tools.upstream import fetch_version
from patches.tools.wheel import sha256_of

from .conftest import TAG, UPSTREAM, Project
from .test_upstream import A, B, publish


def inserted(project: Project) -> dict[str, list[str]]:
    """The files of a tree of the series, as lists of lines."""
    tree = project.tree(name=f"tree-{read_pin(project.root).upstream_version}")
    return {path: (tree / path).read_text("utf-8").splitlines() for path in (A, B)}


@pytest.fixture
def chained(project: Project) -> Project:
    """Two patches of upstream's lines, one behind a line of another patch."""
    tree = project.tree()
    project.add("alpha/one.patch", A, "a10 = 10", "one = 1", tree)
    project.add("beta/two.patch", B, "    x = 1", "    two = 2", tree)
    project.add("beta/three.patch", A, "one = 1", "three = 3", tree)
    return project


def test_insertions_follow_their_lines(chained: Project) -> None:
    publish("0.5.24", {A: "new = 0\nnew = 1\n" + UPSTREAM[A]})
    reports = move_series("0.5.24", chained.root)
    assert [r.state for r in reports] == ["moved", "applies", "applies"]
    lines = inserted(chained)
    at = lines[A].index("a10 = 10")
    assert at == 11
    assert lines[A][at : at + 4] == ["a10 = 10", "one = 1", "three = 3", "a11 = 11"]
    assert lines[B][:3] == ["def f():", "    x = 1", "    two = 2"]
    assert check_form(chained.root) == []
    assert check_exact(chained.root) == []


def test_the_pin_names_the_new_wheel_and_keeps_the_rest(chained: Project) -> None:
    path = chained.root / "upstream.toml"
    path.write_text("# Why.\n" + path.read_text().replace("sion = 1", "sion = 7"))
    publish("0.5.24", {})
    move_series("0.5.24", chained.root)
    pin = read_pin(chained.root)
    wheel = fetch_version("sglang", "0.5.24", TAG)
    assert pin.version == "0.5.24+makespan.1"
    assert (pin.wheel().file, pin.wheel().sha256) == (wheel.name, sha256_of(wheel))
    assert pin.entry_points == {"sglang.srt.plugins": {"ours": "sglang.srt.ours:load"}}
    assert path.read_text().startswith("# Why.\n")


def test_a_move_and_back_is_no_change(chained: Project) -> None:
    before = chained.state() | {"pin": (chained.root / "upstream.toml").read_text()}
    publish("0.5.24", {A: "new = 0\n" + UPSTREAM[A], B: "import os\n\n" + UPSTREAM[B]})
    publish("0.5.23", {})
    move_series("0.5.24", chained.root)
    assert chained.state() != before
    move_series("0.5.23", chained.root)
    after = chained.state() | {"pin": (chained.root / "upstream.toml").read_text()}
    sha256 = re.compile("[0-9a-f]{64}")  # of a wheel that the test has packed anew
    assert {k: sha256.sub("", v) for k, v in after.items()} == {
        k: sha256.sub("", v) for k, v in before.items()
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({A: UPSTREAM[A].replace("a10 = 10\n", "")}, "patches/alpha/one.patch: has no"),
        ({A: None}, "patches/alpha/one.patch: has no place in 0.5.24"),
        ({"sglang/srt/ours.py": "pass\n"}, "sglang/srt/ours.py: upstream has a file"),
    ],
)
def test_what_has_no_place_stops_the_move(
    chained: Project, changes: dict[str, str | None], reason: str
) -> None:
    publish("0.5.24", changes)
    before = chained.state() | {"pin": (chained.root / "upstream.toml").read_text()}
    with pytest.raises(SeriesError, match=reason):
        move_series("0.5.24", chained.root)
    after = chained.state() | {"pin": (chained.root / "upstream.toml").read_text()}
    assert after == before


def test_a_patch_without_a_place_is_dropped_and_made_anew(chained: Project) -> None:
    publish("0.5.24", {B: UPSTREAM[B].replace("    x = 1\n", "    y = 1\n")})
    drop_patch("beta/two.patch", chained.root)
    move_series("0.5.24", chained.root)
    tree = chained.tree(name="again")
    chained.add("beta/two.patch", B, "    y = 1", "    two = 2", tree)
    assert inserted(chained)[B][:3] == ["def f():", "    y = 1", "    two = 2"]
    assert check_exact(chained.root) == []


def test_the_pinned_version_is_no_move(chained: Project) -> None:
    with pytest.raises(SeriesError, match=r"--version: 0\.5\.23 is the pinned version"):
        move_series("0.5.23", chained.root)
