"""The whole product, once for all end-to-end tests: two workers and the gateway."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Product:
    """A running gateway with its workers, and how to ask them."""

    demo: ModuleType
    url: str
    recipe: object


def load_demo() -> ModuleType:
    """The demo script as a module."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    demo = load_demo()
    folder = tmp_path_factory.mktemp("product")
    recipe = demo.choose_model("tiny-ling", folder)
    with demo.serving(recipe, folder, workers=2) as url:
        yield Product(demo, url, recipe)
