"""The series of this repository: clean, exact, and rendered as applied."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest
from patches.tools.check import check_exact, check_form
from patches.tools.pin import ROOT, read_pin
from patches.tools.render_pr import render_features
from patches.tools.series import load_series
from patches.tools.tree import make_tree
from patches.tools.wheel import cache_dir


def test_the_series_is_in_form() -> None:
    assert check_form() == []


def test_the_series_only_inserts() -> None:
    for path in (ROOT / "patches").rglob("*.patch"):
        header, _, body = path.read_text("utf-8").partition("\n\n")
        assert header
        for line in body.splitlines():
            assert line.startswith(("+", "diff --git ", "index ", "--- a/", "@@ "))


def test_patches_stay_hook_points() -> None:
    """Behaviour belongs into our own files: a patch is a few lines."""
    assert all(patch.inserted_lines <= 30 for patch in load_series())


@pytest.fixture(scope="module")
def _upstream_wheel() -> None:
    wheel = cache_dir() / read_pin().wheel().file
    assert wheel.exists(), f"{wheel}: run 'python setup.py fetch' first"


@pytest.mark.slow
@pytest.mark.usefixtures("_upstream_wheel")
def test_the_series_is_exact() -> None:
    assert check_exact() == []


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    make_tree(folder)
    return folder


@pytest.fixture(scope="module")
def upstream(_upstream_wheel: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository that holds the pinned tree under ``python/``."""
    repository = tmp_path_factory.mktemp("upstream")
    with zipfile.ZipFile(cache_dir() / read_pin().wheel().file) as archive:
        archive.extractall(repository / "python")
    _git(repository, "init", "--quiet", "--initial-branch=pinned")
    _git(repository, "add", "--all")
    _git(repository, "commit", "--quiet", "-m", "upstream")
    return repository


@pytest.mark.slow
def test_git_am_of_the_features_gives_the_tree(
    tree: Path, upstream: Path, tmp_path: Path
) -> None:
    patches = render_features(tmp_path / "patches")
    _git(upstream, "checkout", "--quiet", "--detach", "pinned")
    _git(upstream, "am", "--quiet", *map(str, patches))

    changed = _git(upstream, "diff", "--name-only", "pinned").splitlines()
    for path in changed:
        if path.startswith("python/"):
            ours = (tree / path.removeprefix("python/")).read_bytes()
            assert (upstream / path).read_bytes() == ours, path
    assert {file.path for patch in load_series() for file in patch.files} <= {*changed}


@pytest.mark.slow
def test_every_feature_applies_alone(upstream: Path, tmp_path: Path) -> None:
    for patch in render_features(tmp_path / "patches", alone=True):
        _git(upstream, "checkout", "--quiet", "--detach", "pinned")
        _git(upstream, "am", "--quiet", str(patch))


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=T", "-c", "user.email=t@t", *arguments]
    done = subprocess.run(
        command, cwd=repository, check=True, capture_output=True, text=True
    )
    return done.stdout
