"""Reads what the deployment is made of, for the tests."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DASHBOARD = DOCKER / "grafana/dashboards/makespan.json"

_WORDS = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_KEYWORDS = {"by", "without", "on", "ignoring", "and", "or", "unless", "bool", "offset"}


def read_yaml(name: str) -> dict[str, Any]:
    """A YAML file below docker/."""
    found: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text("utf-8"))
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Panel title and query of every target of the dashboard."""
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def metric_names(query: str) -> set[str]:
    """The metrics that a PromQL query reads.

    Grouping lists, label matchers, ranges and functions are left out.
    """
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", query)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", bare)
    names = set()
    for match in _WORDS.finditer(bare):
        called = bare[match.end() :].lstrip().startswith("(")
        if not called and match.group() not in _KEYWORDS:
            names.add(match.group())
    return names


def exported_names(exposition: str) -> set[str]:
    """The sample names that a /metrics page can hold, those without samples too."""
    names = set()
    for line in exposition.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            names.add(name)
            if kind == "histogram":
                names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
        elif line and not line.startswith("#"):
            names.add(re.split(r"[{ ]", line, maxsplit=1)[0])
    return names


def load_script(name: str) -> ModuleType:
    """``scripts/NAME.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
