"""Packages whose requirements clash with ours, each in a folder of its own.

- ``mcp-server-sqlite`` calls interfaces that version 2 of the ``mcp`` package dropped,
  while the git and time servers and this client need version 2. A stdio server is a
  process, so it can have the older one: the folder is put on its ``PYTHONPATH``.
- ``bfcl-eval`` pins numpy and asks for a dozen model vendors' clients that its local
  tasks and checker never import; only the package itself is taken.
- ``mini-swe-agent`` asks for a client of every model vendor; its agents, shell and
  scripted models, which the adoption example uses, need none.
- ``inspect-ai`` pins packages of its own; a task with a mock model needs these.

``python -m sglang_agent.side_packages`` makes the folders once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SETS = {
    "mcp-server-sqlite": (
        "mcp-server-sqlite==2025.4.25",
        "mcp==1.30.0",
        "httpx-sse==0.4.3",
        "pydantic-settings==2.16.3",
        "python-dotenv==1.2.4",
    ),
    "bfcl-eval": ("bfcl-eval==2026.3.23",),
    "mini-swe-agent": (
        "mini-swe-agent==2.4.6",
        "platformdirs==4.14.5",
        "python-dotenv==1.2.4",
    ),
    "inspect-ai": (
        "inspect-ai==0.3.285",
        "agent-client-protocol==0.12.1",
        "botocore==1.43.117",
        "ijson==3.6.0",
        "jsonlines==4.0.0",
        "jsonpatch==1.48",
        "jsonpointer==3.12",
        "mmh3==5.3.1",
        "nest-asyncio2==1.7.4",
        "platformdirs==4.14.5",
        "python-dotenv==1.2.4",
        "semver==3.1.2",
        "shortuuid==1.0.13",
        "tenacity==9.2.1",
        "textual==8.2.8",
        "zipfile-zstd==0.0.4",
    ),
}


class PackagesMissing(Exception):
    """A folder could not be made; says what pip said."""


def folder(name: str) -> Path:
    """Where a set lives: inside the environment that runs this."""
    return Path(sys.prefix) / "share" / "sglang-agent" / name


def ensure(name: str) -> Path:
    """Install a set unless these very versions are there already.

    Returns its folder. Raises :class:`PackagesMissing`.
    """
    target = folder(name)
    stamp = target / "packages.txt"
    wanted = "\n".join(SETS[name])
    if stamp.exists() and stamp.read_text() == wanted:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / "packages"
        _install(fresh, SETS[name])
        (fresh / stamp.name).write_text(wanted)
        shutil.rmtree(target, ignore_errors=True)
        try:
            os.replace(fresh, target)
        except OSError:  # another process was faster
            if not stamp.exists():
                raise
    return target


def _install(target: Path, packages: Sequence[str]) -> None:
    # Without dependencies: all others are the environment's own versions.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(target), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise PackagesMissing(f"cannot install {packages[0]}: {last}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: make the folders, print where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_agent.side_packages", description=__doc__
    )
    parser.add_argument(
        "names", nargs="*", metavar="SET", help=f"{', '.join(SETS)} (default: all)"
    )
    names = parser.parse_args(argv).names or list(SETS)
    for name in names:
        if name not in SETS:
            parser.error(f"SET is {name!r}; must be one of {', '.join(SETS)}")
    try:
        for name in names:
            sys.stdout.write(f"{ensure(name)}\n")
    except PackagesMissing as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
