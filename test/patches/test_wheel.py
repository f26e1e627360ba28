"""The wheel: verified input, reproducible output, one version everywhere."""

from __future__ import annotations

import base64
import csv
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from patches.tools.errors import SeriesError
from patches.tools.pin import read_pin
from patches.tools.wheel import build_wheel, fetch, version_module

from .conftest import TAG, WHEEL, Project

INFO = "sglang-0.5.23+makespan.1.dist-info"


def build(project: Project, folder: str = "dist") -> Path:
    return build_wheel(project.root / folder, root=project.root)


def test_the_version_is_everywhere(patched: Project) -> None:
    path = build(patched)

    assert path.name == WHEEL.replace("0.5.23", "0.5.23+makespan.1")
    with zipfile.ZipFile(path) as archive:
        assert b"\nVersion: 0.5.23+makespan.1\n" in archive.read(f"{INFO}/METADATA")
        assert not [n for n in archive.namelist() if "sglang-0.5.23.dist-info" in n]
        module: dict[str, object] = {}
        exec(archive.read("sglang/_version.py"), module)
    assert module["__version__"] == "0.5.23+makespan.1"
    assert module["__version_tuple__"] == (0, 5, 23, "makespan.1")


def test_record_is_right_and_modes_are_kept(patched: Project) -> None:
    with zipfile.ZipFile(build(patched)) as archive:
        rows = list(csv.reader(archive.read(f"{INFO}/RECORD").decode().splitlines()))
        assert [row[0] for row in rows] == archive.namelist()
        for name, digest, size in rows[:-1]:
            data = archive.read(name)
            raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
            assert (digest, size) == (
                f"sha256={raw.rstrip(b'=').decode()}",
                str(len(data)),
            )
        assert rows[-1] == [f"{INFO}/RECORD", "", ""]
        mode = archive.getinfo("sglang/srt/ext.so").external_attr >> 16
        assert mode & 0o777 == 0o755


def test_our_files_and_entry_points_are_in(patched: Project) -> None:
    with zipfile.ZipFile(build(patched)) as archive:
        entry_points = archive.read(f"{INFO}/entry_points.txt").decode()
        assert archive.read("sglang/local/page.txt") == b"text\n"
    assert "[console_scripts]\nsglang = s:main\n" in entry_points
    assert "[sglang.srt.plugins]\nours = sglang.srt.ours:load\n" in entry_points


def test_byte_code_and_hidden_files_stay_out(patched: Project) -> None:
    patched.write("python/sglang/local/__pycache__/x.pyc", "x")
    patched.write("python/sglang/local/.hidden", "x")

    with zipfile.ZipFile(build(patched)) as archive:
        names = [n for n in archive.namelist() if n.startswith("sglang/local/")]
    assert names == ["sglang/local/page.txt"]


@pytest.mark.parametrize("epoch", [None, "1767225600", "0"])
def test_two_builds_are_identical(
    patched: Project, epoch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if epoch is not None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)

    first, second = build(patched, "one"), build(patched, "two")

    assert first.read_bytes() == second.read_bytes()


def test_pip_can_install_it(patched: Project, tmp_path: Path) -> None:
    wheel = build(patched)
    renamed = tmp_path / wheel.name.replace("manylinux_2_34_x86_64", "linux_x86_64")
    renamed.write_bytes(wheel.read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-index", "--target", str(tmp_path / "site"), str(renamed)]
    subprocess.run(command, check=True)

    assert (tmp_path / "site" / INFO / "METADATA").exists()


def test_a_wrong_hash_stops_the_build(patched: Project) -> None:
    pinned = read_pin(patched.root).wheel()
    patched.write(
        "upstream.toml",
        (patched.root / "upstream.toml").read_text().replace(pinned.sha256, "0" * 64),
    )

    with pytest.raises(SeriesError, match=r"sha256 .*, upstream.toml pins 0000"):
        build(patched)

    assert not (patched.root / "dist").exists()


def test_a_broken_series_leaves_no_wheel(patched: Project) -> None:
    patched.write("patches/series", "beta/end.patch\n")

    with pytest.raises(SeriesError, match=r"beta/end.patch"):
        build(patched)

    assert not (patched.root / "dist").exists()


def test_an_entry_point_is_not_taken_twice(patched: Project) -> None:
    with (patched.root / "upstream.toml").open("a") as file:
        file.write('[entry-points.console_scripts]\nsglang = "ours:main"\n')

    with pytest.raises(SeriesError, match="console_scripts:sglang exists upstream"):
        build(patched)


def test_an_unpinned_python_is_named(patched: Project) -> None:
    with pytest.raises(SeriesError, match=f"'cp310': no pinned wheel, only {TAG}"):
        fetch(read_pin(patched.root), "cp310")


def test_a_failed_download_is_one_line(
    patched: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")

    with pytest.raises(SeriesError, match=r"pip download of sglang-0.5.23-") as caught:
        fetch(read_pin(patched.root))

    assert "\n" not in str(caught.value)


def test_a_missing_field_is_named(patched: Project) -> None:
    patched.write("upstream.toml", 'name = "sglang"\n')

    with pytest.raises(SeriesError, match=r"upstream.toml: field 'wheels' is missing"):
        read_pin(patched.root)


def test_a_version_without_a_local_part() -> None:
    assert "version_tuple = (1, 2)\n" in version_module("1.2")
