"""Which engine runs the cells: the one that the paper's cliffs tell of, or the present one.

README.md, where it differs, says what speaks for the older one.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sglang_agent.simulate.workers import WorkerPool


class Engine(NamedTuple):
    """A virtual worker's program and its settings.

    ``program`` is what the Python interpreter runs, ``max_states_per_path`` is -1 for no
    limit.
    """

    name: str
    program: tuple[str, ...]
    environment: dict[str, str]
    max_states_per_path: int

    def pool(self) -> WorkerPool:
        """Workers of this engine."""
        return WorkerPool(program=self.program, environment=self.environment)


OLDER = Engine(
    "older_engine",
    (str(Path(__file__).resolve().parent / "older_engine.py"),),
    {"SGLANG_ENABLE_WAITING_PREFIX_REFRESH": "0"},
    -1,
)
PRESENT = Engine("present_engine", ("-m", "sglang.virtual_worker"), {}, 1)
"""SGLang 0.5.23 as it is, with one state a path, which section 3.4 asks for."""

ENGINES = {"older": OLDER, "present": PRESENT}
