"""Renders one ``git format-patch`` file per feature for an upstream checkout."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from patches.tools.anchors import place, tie
from patches.tools.diff import Patch
from patches.tools.errors import SeriesError
from patches.tools.export import git_environment
from patches.tools.features import Feature, read_features
from patches.tools.pin import ROOT, Pin, read_pin
from patches.tools.quote import quote_benchmark
from patches.tools.series import Applied, load_series, overlay_files, wheel_path
from patches.tools.wheel import EPOCH_1980, UpstreamWheel, fetch


def render_features(
    output: Path, root: Path = ROOT, tag: str | None = None, *, alone: bool = False
) -> list[Path]:
    """Write the patches into the folder ``output`` and return their paths.

    They hold normal context, our new files, tests and pages. ``git am`` takes them in
    order on a repository that has the pinned tree under ``python/``, or, when rendered
    ``alone``, each of them by itself. Only files the features touch are needed, so the
    repository they are made in holds nothing else.
    """
    pin = read_pin(root)
    upstream = UpstreamWheel(fetch(pin, tag))
    patches = load_series(root)
    with tempfile.TemporaryDirectory() as folder:
        repository = _Repository(Path(folder))
        touched = {file.path for patch in patches for file in patch.files}
        base = {path: upstream.read(wheel_path(path)) for path in sorted(touched)}
        repository.commit(base, f"{pin.name} {pin.upstream_version}")
        output.mkdir(parents=True, exist_ok=True)
        for old in output.glob("[0-9]*.patch"):
            old.unlink()
        rendered: list[Path] = []
        applied = Applied(upstream.read)
        for feature in read_features(root):
            mine = [patch for patch in patches if patch.feature == feature.name]
            if alone:
                applied = Applied(upstream.read)
                mine = _by_itself(patches, feature, upstream)
                repository.restart()
            files = _feature_files(feature, root) | _push(applied, mine)
            if feature.upstream and files:
                repository.commit(files, _message(feature, pin, root))
                rendered.append(repository.format_last(output, len(rendered) + 1))
        return rendered


def _by_itself(
    patches: Sequence[Patch], feature: Feature, upstream: UpstreamWheel
) -> list[Patch]:
    """Return the patches of one feature as if they were the whole series."""
    tied = tie(patches, upstream.read)
    mine = [item for item in tied if item.patch.feature == feature.name]
    return place(mine, upstream.read)


def _push(applied: Applied, patches: Sequence[Patch]) -> dict[str, bytes]:
    """Apply the patches; return the files they touch by their path in a checkout."""
    for patch in patches:
        applied.push(patch)
    paths = {file.path for patch in patches for file in patch.files}
    return {path: applied.content(wheel_path(path)) for path in paths}


def _feature_files(feature: Feature, root: Path) -> dict[str, bytes]:
    """Return the files a feature adds, by their path in an upstream checkout."""
    files = {
        f"python/{path}": source.read_bytes()
        for path, source in overlay_files(root).items()
        if feature.owns(path)
    }
    return files | {
        target: (root / source).read_bytes() for source, target in feature.extra.items()
    }


def _message(feature: Feature, pin: Pin, root: Path) -> str:
    parts = [feature.title, feature.message]
    if feature.benchmark is not None:
        parts.append(quote_benchmark(feature.benchmark, root))
    parts.append(f"Made for {pin.name} {pin.upstream_version}.")
    return "\n\n".join(parts) + "\n"


class _Repository:
    """A throw-away git repository with the caller's name and a fixed date."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._environment = git_environment() | _identity()
        self._git("init", "--quiet", "--initial-branch=main")
        self._base = ""

    def commit(self, files: dict[str, bytes], message: str) -> None:
        """Commit these files; the first commit is the base of all patches."""
        for path, data in files.items():
            (self._path / path).parent.mkdir(parents=True, exist_ok=True)
            (self._path / path).write_bytes(data)
        self._git("add", "--all")
        self._git("commit", "--quiet", "--allow-empty", "--signoff", "-m", message)
        self._base = self._base or self._git("rev-parse", "HEAD").strip()

    def restart(self) -> None:
        """Go back to the base, so that the next commit stands alone."""
        self._git("checkout", "--quiet", "--detach", self._base)

    def format_last(self, output: Path, number: int) -> Path:
        """Write the last commit as a patch with this number."""
        out = self._git(
            "format-patch",
            "--no-signature",
            "--full-index",
            "--no-renames",
            f"--start-number={number}",
            f"--output-directory={output.resolve()}",
            "-1",
        )
        return Path(out.strip())

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=self._path,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SeriesError(f"git {arguments[0]}: {done.stderr.strip()}")
        return done.stdout


def _identity() -> dict[str, str]:
    """Return who and when: the caller's git identity, SOURCE_DATE_EPOCH."""
    name = _setting("user.name") or "SGLang Makespan"
    email = _setting("user.email") or "makespan@example.invalid"
    date = f"{os.environ.get('SOURCE_DATE_EPOCH') or EPOCH_1980} +0000"
    return {
        f"GIT_{role}_{field}": value
        for role in ("AUTHOR", "COMMITTER")
        for field, value in (("NAME", name), ("EMAIL", email), ("DATE", date))
    }


def _setting(name: str) -> str:
    command: Sequence[str] = ["git", "config", "--get", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()
