"""Writes a batch of agent tasks over three real MCP servers, all of them local.

The tools take few arguments, with the values listed in their schema, so that even a
model with random weights makes calls that parse; a call that makes no sense is
answered with the tool's own error, as in real life. Lengths have a heavy tail: most
trajectories are short and a few take all the turns there are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_agent import side_packages

SHORTEST, LONGEST = 2, 8
TAIL_EXPONENT = 1.2
TOOL_TURN_TOKENS = 160
REPOSITORIES = 4

_START_SQLITE = "from mcp_server_sqlite import main; main()"
_SYSTEM = "You use the tools, one call a turn, then answer in one sentence."
_CITIES = ("UTC", "Europe/London", "Asia/Tokyo", "America/New_York")
_GOODS = ("apples", "bolts", "chairs", "drums", "eggs", "forks", "globes", "hats")
_TOPICS = ("stock", "prices", "returns", "suppliers")
_QUERIES = (
    "SELECT COUNT(*) FROM goods",
    "SELECT name, stock FROM goods ORDER BY stock LIMIT 3",
    "SELECT SUM(stock * price) FROM goods",
    "SELECT name FROM goods WHERE price > 5",
    "SELECT g.name, SUM(s.amount) FROM sales s JOIN goods g ON g.id = s.good GROUP BY 1",
    "SELECT * FROM nowhere",
)


class DemoError(Exception):
    """The tasks cannot be written; the message is for the user."""


def write_tasks(count: int, seed: int, folder: Path) -> Path:
    """Create databases, repositories and ``tasks.jsonl`` in ``folder``.

    The same ``count`` and ``seed`` give the same tasks. Raises :class:`DemoError`.
    """
    if shutil.which("git") is None:
        raise DemoError("git is not on the PATH; the demo's repositories need it")
    side_packages.ensure("mcp-server-sqlite")
    rng = random.Random(seed)
    folder = folder.resolve()
    repositories = _make_repositories(folder / "repositories", rng)
    kinds: list[Callable[[int, int, random.Random], dict[str, Any]]] = [
        _SqliteKind(folder / "databases").task,
        _GitKind(repositories).task,
        _TimeKind().task,
    ]
    lengths = draw_lengths(count, rng)
    tasks = [kinds[i % 3](i, turns, rng) for i, turns in enumerate(lengths)]
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def sqlite_server(database: Path) -> dict[str, Any]:
    """The ``servers`` entry of an MCP environment that serves one database file."""
    return {
        "command": "python",
        "args": ["-c", _START_SQLITE, "--db-path", str(database)],
        "env": {"PYTHONPATH": str(side_packages.folder("mcp-server-sqlite"))},
    }


def draw_lengths(count: int, rng: random.Random) -> list[int]:
    """Turns of each task, 2 to 8 with a power-law tail.

    The last one is of the greatest length: what is submitted late and runs long is
    what makes a batch's tail.
    """
    sizes = range(SHORTEST, LONGEST + 1)
    weights = [(size - SHORTEST + 1) ** -TAIL_EXPONENT for size in sizes]
    lengths = rng.choices(sizes, weights, k=count)
    lengths[-1] = LONGEST
    return lengths


class _SqliteKind:
    """Questions about a shop's database; every task has a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def task(self, index: int, turns: int, rng: random.Random) -> dict[str, Any]:
        database = self._folder / f"shop-{index:04d}.db"
        _make_database(database, rng)
        environment = {
            "type": "mcp",
            "servers": {"sqlite": sqlite_server(database)},
            "tools": [
                "list_tables",
                {
                    "name": "describe_table",
                    "choices": {"table_name": ["goods", "sales"]},
                },
                {"name": "read_query", "choices": {"query": list(_QUERIES)}},
            ],
        }
        question = f"Report on the {rng.choice(_TOPICS)} of {rng.choice(_GOODS)}."
        return _task(f"sqlite-{index:04d}", question, environment, turns)


class _GitKind:
    """Questions about a repository's history; one shared server reads them all."""

    def __init__(self, repositories: Sequence[Path]) -> None:
        self._repositories = repositories

    def task(self, index: int, turns: int, rng: random.Random) -> dict[str, Any]:
        where = {"repo_path": str(rng.choice(self._repositories))}
        stamps = ["start_timestamp", "end_timestamp"]
        commits = ["HEAD", "HEAD~1", "HEAD~2", "HEAD~9"]
        environment = {
            "type": "mcp",
            "share": True,
            "servers": {"git": {"command": ["python", "-m", "mcp_server_git"]}},
            "tools": [
                {"name": "git_status", "fixed": where},
                {
                    "name": "git_log",
                    "fixed": where,
                    "choices": {"max_count": [1, 2, 3]},
                    "hide": stamps,
                },
                {"name": "git_show", "fixed": where, "choices": {"revision": commits}},
            ],
        }
        question = f"Who changed {rng.choice(_GOODS)}.txt last, and how?"
        return _task(f"git-{index:04d}", question, environment, turns)


class _TimeKind:
    """Questions about clocks; one shared server."""

    def task(self, index: int, turns: int, rng: random.Random) -> dict[str, Any]:
        cities = list(_CITIES)
        hours = [f"{hour:02d}:{rng.choice(('00', '15', '30'))}" for hour in (7, 12, 22)]
        zones = {"source_timezone": cities, "target_timezone": cities}
        environment = {
            "type": "mcp",
            "share": True,
            "servers": {
                "time": {
                    "command": ["python", "-m", "mcp_server_time"],
                    "args": ["--local-timezone", "UTC"],
                }
            },
            "tools": [
                {"name": "get_current_time", "choices": {"timezone": cities}},
                {"name": "convert_time", "choices": {**zones, "time": hours}},
            ],
        }
        question = f"When it is {rng.choice(hours)} in {rng.choice(cities)}, where is it night?"
        return _task(f"time-{index:04d}", question, environment, turns)


def _task(
    id: str, question: str, environment: dict[str, Any], turns: int
) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": question},
    ]
    limits = {
        "max_turns": turns,
        "max_output_tokens": TOOL_TURN_TOKENS,
        "final_answer_turn": True,
    }
    return {
        "id": id,
        "messages": messages,
        "environment": environment,
        # A model with random weights would otherwise go on adding calls.
        "sampling": {"parallel_tool_calls": False},
        "limits": limits,
    }


def _make_database(path: Path, rng: random.Random) -> None:
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    try:
        with connection:
            connection.execute(
                "CREATE TABLE goods (id INTEGER PRIMARY KEY, name TEXT, stock INTEGER, price REAL)"
            )
            connection.execute("CREATE TABLE sales (good INTEGER, amount INTEGER)")
            goods = [(n, rng.randrange(100), rng.randrange(1, 20) / 2) for n in _GOODS]
            connection.executemany(
                "INSERT INTO goods (name, stock, price) VALUES (?, ?, ?)", goods
            )
            sales = [
                (rng.randint(1, len(_GOODS)), rng.randint(1, 9)) for _ in range(20)
            ]
            connection.executemany("INSERT INTO sales VALUES (?, ?)", sales)
    finally:
        connection.close()


def _make_repositories(folder: Path, rng: random.Random) -> list[Path]:
    paths = [folder / f"repository-{number}" for number in range(REPOSITORIES)]
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        _git(path, "init", "--quiet", "--initial-branch", "main")
        for step in range(4):
            name = rng.choice(_GOODS)
            with (path / f"{name}.txt").open("a") as file:
                file.write(f"{rng.randrange(1000)}\n")
            _git(path, "add", "--all")
            _git(path, "commit", "--quiet", "--message", f"Step {step}: {name}")
    return paths


def _git(repository: Path, *arguments: str) -> None:
    """Run git without the user's settings, at a fixed date, so runs are alike."""
    day = "2026-01-01T00:00:00Z"
    names = {"NAME": "Demo", "EMAIL": "demo@example.invalid", "DATE": day}
    who = {f"GIT_{r}_{k}": v for r in ("AUTHOR", "COMMITTER") for k, v in names.items()}
    nothing = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments],
        env={"PATH": os.environ.get("PATH", ""), **who, **nothing},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DemoError(f"git {arguments[0]} in {repository}: {done.stderr.strip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 2 when the tasks cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_agent.demo_tasks", description=__doc__
    )
    parser.add_argument("--count", type=_at_least_one, default=32, help="tasks (32)")
    parser.add_argument("--seed", type=int, default=0, help="one seed, one batch (0)")
    parser.add_argument("--output", type=Path, required=True, help="folder to fill")
    options = parser.parse_args(argv)
    try:
        path = write_tasks(options.count, options.seed, options.output)
    except (DemoError, side_packages.PackagesMissing, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{options.count} tasks in {path}\n")
    return 0


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; must be a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
