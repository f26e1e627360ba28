"""Writes BFCL multi-turn tasks as a tasks file.

``python -m sglang_agent.bfcl_tasks --category multi_turn_base -o tasks.jsonl``
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_agent.environments import bfcl_data
from sglang_agent.environments.bfcl import STEPS_PER_TURN


def task(entry: bfcl_data.Entry) -> dict[str, Any]:
    """One line of a tasks file; a request of the user may take 20 steps to answer."""
    return {
        "id": entry.id,
        "messages": entry.question[0],
        "environment": {"type": "bfcl", "entry": entry.id},
        "limits": {"max_turns": (STEPS_PER_TURN + 1) * len(entry.question)},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 2 when the tasks cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_agent.bfcl_tasks", description=__doc__
    )
    parser.add_argument(
        "--category",
        choices=bfcl_data.CATEGORIES,
        default=bfcl_data.CATEGORIES[0],
        help="data set (default: %(default)s)",
    )
    parser.add_argument("--limit", type=int, help="only the first so many tasks")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="file to write"
    )
    options = parser.parse_args(argv)
    if options.limit is not None and options.limit < 1:
        parser.error(f"--limit is {options.limit}; must be above 0")
    try:
        chosen = list(bfcl_data.entries(options.category).values())[: options.limit]
        lines = [json.dumps(task(entry)) + "\n" for entry in chosen]
        options.output.write_text("".join(lines))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{len(lines)} tasks in {options.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
