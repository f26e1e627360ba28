"""The multi-turn tasks of the Berkeley Function Calling Leaderboard, version 4.

Tasks, documentation of the tools, the stateful classes behind them and the answers
are data of the ``bfcl-eval`` package; this module finds and reads them.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from types import ModuleType
from typing import Any

import msgspec

from sglang_agent import side_packages
from sglang_agent.records import Message, ToolDefinition

CATEGORIES = (
    "multi_turn_base",
    "multi_turn_long_context",
    "multi_turn_miss_func",
    "multi_turn_miss_param",
)
_PACKAGE = "bfcl_eval"
_VERSION = "BFCL_v4"


class Entry(msgspec.Struct, frozen=True):
    """One task: what the user says turn by turn, and the state it starts from.

    ``missed_function`` names tools that are offered only from a later turn on.
    """

    id: str
    question: list[list[Message]]
    initial_config: dict[str, Any]
    involved_classes: list[str]
    missed_function: dict[str, list[str]] = {}

    @property
    def category(self) -> str:
        """Name of the data set that the entry is from."""
        return self.id.rpartition("_")[0]

    @property
    def long_context(self) -> bool:
        """Whether the classes fill their state with much more text."""
        return "long_context" in self.category


def package(module: str = "") -> ModuleType:
    """Import ``bfcl_eval`` or a module of it.

    It is found where it is installed or in its folder of side packages. Raises
    ValueError saying how to get it.
    """
    path = str(side_packages.folder("bfcl-eval"))
    if path not in sys.path:
        sys.path.append(path)  # last, so that it can hide nothing
    try:
        return importlib.import_module(f"{_PACKAGE}.{module}" if module else _PACKAGE)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"environment.type: 'bfcl' needs the package {error.name!r}: run "
            "'python -m sglang_agent.side_packages bfcl-eval' and install "
            "sglang-agent[bfcl]"
        ) from error


@functools.cache
def entries(category: str) -> Mapping[str, Entry]:
    """All tasks of a category by id. Raises ValueError for an unknown category."""
    if category not in CATEGORIES:
        raise ValueError(f"category is {category!r}; allowed: {', '.join(CATEGORIES)}")
    rows = _rows(f"{_VERSION}_{category}.json")
    found = (msgspec.convert(row, Entry, strict=False) for row in rows)
    return {entry.id: entry for entry in found}


def entry(id: str) -> Entry:
    """The task with this id. Raises ValueError when there is none."""
    category = id.rpartition("_")[0]
    if category not in CATEGORIES or id not in entries(category):
        raise ValueError(
            f"environment.entry is {id!r}; must be an id from {', '.join(CATEGORIES)}"
        )
    return entries(category)[id]


@functools.cache
def ground_truth(category: str) -> Mapping[str, list[list[str]]]:
    """Right calls of each task as Python text, by user turn."""
    rows = _rows("possible_answer", f"{_VERSION}_{category}.json")
    return {row["id"]: row["ground_truth"] for row in rows}


@functools.cache
def documentation(class_name: str) -> tuple[ToolDefinition, ...]:
    """The tools of a class in the OpenAI shape."""
    names = package("constants.executable_backend_config")
    file = names.MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]
    return tuple(_definition(row) for row in _rows("multi_turn_func_doc", file))


def make_class(class_name: str) -> Any:
    """A fresh object of one of the stateful classes, without a state yet."""
    names = package("constants.executable_backend_config")
    path = names.CLASS_FILE_PATH_MAPPING[class_name].removeprefix(f"{_PACKAGE}.")
    return getattr(package(path), class_name)()


def parse_call(text: str, methods: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Turn ``name(x, key='y')`` into a name and keyword arguments.

    ``methods`` gives positional arguments their names. Raises ValueError for text
    that is no plain call with literal arguments.
    """
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text!r} is no call of a function")
    positional = [ast.literal_eval(value) for value in call.args]
    named = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    bound = inspect.signature(methods[call.func.id]).bind(*positional, **named)
    return call.func.id, bound.arguments


def _rows(*path: str) -> Iterator[dict[str, Any]]:
    package()
    content = files(_PACKAGE).joinpath("data", *path).read_bytes()
    for line in content.splitlines():
        if line.strip():
            row: dict[str, Any] = msgspec.json.decode(line)
            yield row


def _definition(row: Mapping[str, Any]) -> ToolDefinition:
    types = package("constants.type_mappings").GORILLA_TO_OPENAPI
    function = {
        "name": row["name"],
        "description": row["description"],
        "parameters": _schema(row["parameters"], types),
    }
    return {"type": "function", "function": function}


def _schema(node: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """The data's own type names as those of JSON Schema, all the way down."""
    schema = dict(node)
    schema["type"] = types.get(str(node.get("type")), "string")
    if "properties" in node:
        schema["properties"] = {
            name: _schema(value, types) for name, value in node["properties"].items()
        }
    if isinstance(node.get("items"), Mapping):
        schema["items"] = _schema(node["items"], types)
    return schema
