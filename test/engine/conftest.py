"""Fixtures of the engine tests."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from .engine_server import EngineServer, running_engine

ROOT = Path(__file__).resolve().parents[2]
#: Upstream's own flags of the shared engine; small chunks, so that they are tested.
SHARED_FLAGS = (
    "--chunked-prefill-size",
    "256",
    "--tool-call-parser",
    "ling3",
    "--enable-cache-report",
    "--enable-metrics",
    "--random-seed",
    "0",
    # A few slots and an order that depends on the cache, to compare with upstream's.
    "--max-running-requests",
    "8",
    "--schedule-policy",
    "lpm",
)


def load_file(path: str) -> ModuleType:
    """Import one of our files, a path below ``python/sglang``, without SGLang."""
    full_name = f"under_test.{path.removesuffix('.py').replace('/', '.')}"
    if full_name not in sys.modules:
        source = ROOT / "python/sglang" / path
        spec = importlib.util.spec_from_file_location(full_name, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


@pytest.fixture(scope="session")
def cpu_module() -> Callable[[str], ModuleType]:
    """Loads one file of the CPU platform."""
    return lambda name: load_file(f"srt/hardware_backend/cpu_reference/{name}.py")


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


@pytest.fixture(scope="session")
def shared_engine(
    tiny_ling: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """One engine of the fork with none of its own flags, for all modules."""
    log = tmp_path_factory.mktemp("shared_engine") / "log"
    with running_engine(tiny_ling, log, SHARED_FLAGS) as engine:
        yield engine
