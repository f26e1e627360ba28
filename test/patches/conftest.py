"""A small project with a made-up upstream wheel, laid out like this repository."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
WHEEL = f"sglang-0.5.23-{TAG}-{TAG}-manylinux_2_34_x86_64.whl"
HEADER = (
    ("Subject", "alpha: insert a line"),
    ("Reason", "the caller is upstream's"),
    ("Forwarded", "no"),
    ("Remove-When", "upstream has it"),
)
UPSTREAM = {
    "sglang/__init__.py": "from sglang.version import __version__\n",
    "sglang/_version.py": "__version__ = version = '0.5.23'\n",
    "sglang/srt/a.py": "".join(f"a{i} = {i}\n" for i in range(1, 21)),
    "sglang/srt/b.py": "def f():\n    x = 1\n\n    return x\n\n\ndef g():\n    pass\n",
    "sglang/srt/ext.so": "binary",
    "sglang/srt/tuned,E=8.json": "{}",
    "sglang-0.5.23.dist-info/METADATA": "Name: sglang\nVersion: 0.5.23\nLicense: x\n",
    "sglang-0.5.23.dist-info/WHEEL": f"Wheel-Version: 1.0\nTag: {TAG}-{TAG}-x\n",
    "sglang-0.5.23.dist-info/entry_points.txt": "[console_scripts]\nsglang = s:main\n",
    "sglang-0.5.23.dist-info/RECORD": "",
}
FEATURES = """
[[feature]]
name = "alpha"
title = "Add alpha"
upstream = true
files = ["sglang/srt/ours.py"]
message = "Alpha helps."
tests = {"test/test_ours.py" = "test/registered/test_ours.py"}

[[feature]]
name = "beta"
title = "Add beta"
upstream = true
files = []
message = "Beta helps."

[[feature]]
name = "local"
title = "Only here"
upstream = false
files = ["sglang/local/*"]
"""


@dataclass(frozen=True)
class Project:
    """A project root, its pin, and a way to edit a tree and export the edit."""

    root: Path

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    def write(self, path: str, text: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
        return target

    def tree(self, through: str | None = None, name: str = "tree") -> Path:
        from patches.tools.tree import make_tree

        output = self.root.parent / name
        make_tree(output, through=through, root=self.root)
        return output

    def add(self, name: str, path: str, after: str, text: str, tree: Path) -> None:
        """Insert ``text`` after the line ``after`` of a tree's file; export it."""
        from patches.tools.edit import new_patch

        insert_after(tree / path, after, text)
        feature = name.split("/")[0]
        header = (("Subject", f"{feature}: insert a line"), *HEADER[1:])
        new_patch(name, tree, header, root=self.root)

    def series(self) -> list[str]:
        from patches.tools.series import read_series

        return read_series(self.root)

    def state(self) -> dict[str, str]:
        """Return every patch and the series, to show that nothing was written."""
        files = [self.patches / "series", *self.patches.rglob("*.patch")]
        return {path.name: path.read_text("utf-8") for path in files}


def insert_after(path: Path, after: str, text: str) -> None:
    lines = path.read_text("utf-8").splitlines(keepends=True)
    at = lines.index(f"{after}\n") + 1
    path.write_text("".join([*lines[:at], f"{text}\n", *lines[at:]]), "utf-8")


def write_wheel(path: Path) -> str:
    """Write the made-up upstream wheel and return its sha256."""
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("sglang/srt/"), "")
        for name, text in UPSTREAM.items():
            info = zipfile.ZipInfo(name, (2026, 9, 1, 12, 0, 0))
            mode = 0o100755 if name.endswith(".so") else 0o100644
            info.external_attr = mode << 16
            archive.writestr(info, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_project(folder: Path) -> Project:
    """Make a project with an empty series, and its wheel in a download cache."""
    sha256 = write_wheel(folder / "cache" / "sglang-makespan" / "wheels" / WHEEL)
    made = Project(folder / "project")
    made.write(
        "upstream.toml",
        'name = "sglang"\nversion = "0.5.23"\nlocal = "makespan"\nrevision = 1\n'
        f'[wheels.{TAG}]\nfile = "{WHEEL}"\nsha256 = "{sha256}"\n'
        '[entry-points."sglang.srt.plugins"]\nours = "sglang.srt.ours:load"\n',
    )
    made.write("patches/series", "# The order.\n")
    made.write("patches/features.toml", FEATURES)
    made.write("python/sglang/srt/ours.py", "def load():\n    pass\n")
    made.write("python/sglang/local/page.txt", "text\n")
    made.write("test/test_ours.py", "def test():\n    pass\n")
    return made


@pytest.fixture(autouse=True)
def no_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer's shell says about the cache does not reach a test."""
    monkeypatch.delenv("MAKESPAN_CACHE", raising=False)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Return a project with an empty series."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_project(tmp_path)


@pytest.fixture(scope="session")
def patched_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a project of three patches, to be copied."""
    folder = tmp_path_factory.mktemp("patched")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("MAKESPAN_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        made = make_project(folder)
        tree = made.tree("none")
        a = "sglang/srt/a.py"
        made.add("alpha/low.patch", a, "a15 = 15", "low = 1", tree)
        made.add("alpha/high.patch", a, "a3 = 3", "high = 1", tree)
        made.add("beta/end.patch", a, "a20 = 20", "end = 1", tree)
    return folder


@pytest.fixture
def patched(
    patched_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Project:
    """Return a project with three patches, two of one feature, all in one file."""
    for name in ("project", "cache"):
        shutil.copytree(patched_template / name, tmp_path / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Project(tmp_path / "project")
