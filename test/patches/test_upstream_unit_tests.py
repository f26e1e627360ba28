"""The unit tests that go upstream with a feature pass on the patched distribution."""

from __future__ import annotations

import gc
import importlib.util
import unittest
from pathlib import Path

import pytest
from patches.tools.features import read_features

FOLDER = Path(__file__).parent / "upstream"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


def test_every_file_goes_upstream() -> None:
    sources = {path for feature in read_features() for path in feature.extra}

    assert {f"test/patches/upstream/{name}" for name in FILES} <= sources


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_upstream_unit_tests(name: str) -> None:
    spec = importlib.util.spec_from_file_location(
        name.removesuffix(".py"), FOLDER / name
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)

    result = unittest.TestResult()
    suite.run(result)
    gc.collect()  # what upstream's imports left is not a later test's warning

    problems = [trace for _, trace in result.failures + result.errors]
    assert result.wasSuccessful(), "\n".join(problems)
    assert result.testsRun > 0
