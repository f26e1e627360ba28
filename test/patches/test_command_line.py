"""The command line: one line for an error, and exit codes 0, 1 and 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patches.tools.__main__ import main
from patches.tools.pin import ROOT, read_pin

import setup


def test_setup_py_is_the_same_command_line() -> None:
    command = [sys.executable, "setup.py", "version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout == f"{read_pin().version}\n"


def test_a_clean_series_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert capsys.readouterr() == ("", "")


def test_the_series_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats"]) == 0
    assert "\nall: " in capsys.readouterr().out


def test_a_failed_check_exits_1_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["apply", "--tree", str(tmp_path)]) == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {tmp_path}: no folder 'sglang' in it\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["tree"], "the following arguments are required: --output"),
        (["refresh", "a/b.patch"], "refresh PATCH needs --tree"),
        (["new", "a/b.patch", "--tree", "x"], "required: --subject, --reason"),
    ],
)
def test_a_wrong_command_line_exits_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_build_backend_takes_a_python_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def build(folder: Path, tag: str | None) -> Path:
        asked.append((folder, tag))
        return folder / "sglang.whl"

    monkeypatch.setattr("patches.tools.wheel.build_wheel", build)

    assert setup.build_wheel(str(tmp_path)) == "sglang.whl"
    assert setup.build_wheel(str(tmp_path), {"python-tag": "cp312"}) == "sglang.whl"
    assert asked == [(tmp_path, None), (tmp_path, "cp312")]
