"""Rendered features are what the series makes, and ``git am`` takes them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from patches.tools.errors import SeriesError
from patches.tools.render_pr import render_features

from .conftest import UPSTREAM, Project


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=T", "-c", "user.email=t@t", *arguments]
    done = subprocess.run(
        command, cwd=repository, check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """Return a repository that holds the upstream tree under ``python/``."""
    repository = tmp_path / "upstream"
    for name, text in UPSTREAM.items():
        if name.startswith("sglang/"):
            target = repository / "python" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    git(repository, "init", "--quiet")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "-m", "upstream")
    return repository


def test_git_am_gives_the_tree_of_the_series(patched: Project, upstream: Path) -> None:
    patches = render_features(patched.root / "out", patched.root)

    git(upstream, "am", "--quiet", *map(str, patches))

    tree = patched.tree()
    for path in ("sglang/srt/a.py", "sglang/srt/b.py", "sglang/srt/ours.py"):
        assert (upstream / "python" / path).read_bytes() == (tree / path).read_bytes()
    assert (upstream / "test/registered/test_ours.py").exists()
    assert not (upstream / "python/sglang/local").exists()
    assert git(upstream, "status", "--porcelain") == ""


def test_one_patch_per_feature_with_context_and_message(patched: Project) -> None:
    first, second = render_features(patched.root / "out", patched.root)

    text = first.read_text()
    assert (first.name, second.name) == ("0001-Add-alpha.patch", "0002-Add-beta.patch")
    assert "\n\nAlpha helps.\n\nMade for sglang 0.5.23.\n\nSigned-off-by: " in text
    assert "\n a3 = 3\n+high = 1\n a4 = 4\n" in text


def test_rendering_again_replaces_the_patches(patched: Project) -> None:
    output = patched.root / "out"
    patched.write("out/0009-old.patch", "old")
    first = {p.name: p.read_bytes() for p in render_features(output, patched.root)}

    again = {p.name: p.read_bytes() for p in render_features(output, patched.root)}

    assert first == again
    assert {p.name for p in output.iterdir()} == set(again)


def test_the_first_feature_stands_alone(patched: Project, upstream: Path) -> None:
    first, _ = render_features(patched.root / "out", patched.root)

    git(upstream, "am", "--quiet", str(first))

    text = (upstream / "python/sglang/srt/a.py").read_text()
    assert "high = 1" in text
    assert "end = 1" not in text


def test_every_feature_can_be_rendered_alone(patched: Project, upstream: Path) -> None:
    patched.add(
        "beta/near.patch", "sglang/srt/a.py", "low = 1", "near = 1", patched.tree()
    )
    first, second = render_features(patched.root / "out", patched.root, alone=True)

    git(upstream, "am", "--quiet", str(second))

    text = (upstream / "python/sglang/srt/a.py").read_text()
    assert "a15 = 15\nnear = 1\n" in text
    assert "a20 = 20\nend = 1\n" in text
    assert "low = 1" not in text
    assert "high = 1" in first.read_text()


RUN = {
    "workload": "swe",
    "trajectories": 289,
    "requests": 1000,
    "refresh": True,
    "date": "2026-11-30",
    "machine": "a box, 2 cores",
}


def with_benchmark(project: Project, runs: list[dict[str, object]]) -> None:
    features = (project.patches / "features.toml").read_text()
    quoted = 'message = "Alpha helps."\nbenchmark = "results.json"'
    project.write(
        "patches/features.toml", features.replace('message = "Alpha helps."', quoted)
    )
    project.write("results.json", json.dumps({"runs": runs}))


def test_a_message_quotes_the_benchmark_of_its_feature(patched: Project) -> None:
    seconds = [("lpm", 9.0), ("routing-prefix", 1.0), ("routing-prefix", 3.0)]
    with_benchmark(
        patched, [RUN | {"policy": p, "priority_cpu_s": s} for p, s in seconds]
    )

    first, second = render_features(patched.root / "out", patched.root)

    message = " ".join(first.read_text().split("\n---\n")[0].split())
    assert "swe, 289 trajectories, 1000 requests, refresh on" in message
    assert "(a box, 2 cores, 2026-11-30): lpm 9.00, routing-prefix 2.00" in message
    assert "CPU seconds" not in second.read_text()


def test_a_benchmark_that_lacks_a_field_is_named(patched: Project) -> None:
    with_benchmark(patched, [RUN | {"policy": "lpm"}])

    with pytest.raises(SeriesError, match=r"results.json: .*'priority_cpu_s'"):
        render_features(patched.root / "out", patched.root)
