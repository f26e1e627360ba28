"""Fixtures of the engine tests."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_REFERENCE = ROOT / "python/sglang/srt/hardware_backend/cpu_reference"


@pytest.fixture(scope="session")
def cpu_module() -> Callable[[str], ModuleType]:
    """Loads one file of the CPU platform without importing SGLang."""

    def load(name: str) -> ModuleType:
        full_name = f"cpu_reference_under_test.{name}"
        if full_name not in sys.modules:
            path = CPU_REFERENCE / f"{name}.py"
            spec = importlib.util.spec_from_file_location(full_name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[full_name] = module
            spec.loader.exec_module(module)
        return sys.modules[full_name]

    return load


@pytest.fixture(scope="session")
def tiny_ling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the random hybrid model."""
    folder = tmp_path_factory.mktemp("model") / "tiny-ling"
    command = [sys.executable, "-m", "sglang.demo_model", "tiny-ling"]
    subprocess.run(
        [*command, "--output", str(folder)],
        check=True,
        cwd=folder.parent,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
    )
    return folder
