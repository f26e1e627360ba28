"""The set-up script, as far as it can be tried without installing anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .deploy_files import ROOT, load_script

SCRIPT = ROOT / "scripts/setup_env.py"


def as_python(version: tuple[int, int], path: Path) -> subprocess.CompletedProcess[str]:
    """Run the script under an interpreter that says it is ``version``.

    Like those before 3.11 it has no ``tomllib``.
    """
    program = (
        "import runpy, sys, platform\n"
        "sys.modules['tomllib'] = None\n"
        f"sys.version_info = {(*version, 0, 'final', 0)}\n"
        f"platform.python_version = lambda: '{version[0]}.{version[1]}.0'\n"
        f"sys.argv = [{str(SCRIPT)!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"PATH": str(path)},
    )


@pytest.mark.parametrize("version", [(3, 8), (3, 10), (3, 14)])
def test_another_python_is_refused_in_one_line(
    version: tuple[int, int], tmp_path: Path
) -> None:
    done = as_python(version, tmp_path)
    assert done.returncode == 2
    expected = f"setup: Python {version[0]}.{version[1]}.0: need 3.11, 3.12 or 3.13"
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1


def test_a_supported_python_on_the_path_takes_over(tmp_path: Path) -> None:
    stand_in = tmp_path / "python3.12"
    stand_in.write_text('#!/bin/sh\necho "taken over: $1"\n')
    stand_in.chmod(0o755)
    done = as_python((3, 10), tmp_path)
    assert (done.returncode, done.stdout) == (0, f"taken over: {SCRIPT}\n")


def test_one_cache_for_environment_and_wheels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from patches.tools.wheel import cache_dir

    setup_env = load_script("setup_env")
    monkeypatch.delenv("MAKESPAN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == setup_env.cache_root() / "wheels"
    monkeypatch.setenv("MAKESPAN_CACHE", str(tmp_path / "mine"))
    assert cache_dir() == setup_env.cache_root() / "wheels" == tmp_path / "mine/wheels"


@pytest.mark.parametrize(
    "changed",
    [
        "upstream.toml",
        "patches/series",
        "python/sglang/plan_hybrid_cache.py",
        "sgl-router/pyproject.toml",
        "scripts/tools.txt",
        "python/sglang_agent/side_packages.py",
    ],
)
def test_an_environment_is_out_of_date_when_what_it_is_made_from_changes(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_env = load_script("setup_env")
    before = setup_env.wanted_stamp()
    assert setup_env.wanted_stamp() == before
    read = Path.read_bytes
    edited = setup_env.ROOT / changed
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + b"#" * (path == edited)
    )
    assert setup_env.wanted_stamp() != before


def test_tools_are_pinned_by_version_and_hash() -> None:
    lines = (ROOT / "scripts/tools.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) == 3
    for pin in pins:
        assert re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", pin), pin


def test_every_tool_runs_from_beside_the_interpreter() -> None:
    for name in ("hadolint", "shellcheck", "docker-compose"):
        program = Path(sys.executable).parent / name
        assert os.access(program, os.X_OK), f"{name}: run 'make setup'"
