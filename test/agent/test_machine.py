"""What results files say of the machine."""

import os
import platform

import pytest

from sglang_agent import machine


def test_the_processor_has_its_name(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A Box: 9\nmodel name\t: other\n")
    monkeypatch.setattr(machine, "CPUINFO", file)
    assert machine.in_words() == f"A Box: 9, {os.cpu_count()} cores"
    assert machine.machine()["cpu"] == "A Box: 9"


def test_the_architecture_stands_in_for_a_name(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "none")
    assert machine.processor() == platform.machine()
