"""Puts the SQLite MCP server, which needs the first-generation SDK, apart from ours.

``mcp-server-sqlite`` calls interfaces that version 2 of the ``mcp`` package dropped,
while the git and time servers and this client need version 2. A stdio server is a
process of its own, so it may have packages of its own: a folder put first on its
``PYTHONPATH``. ``python -m sglang_agent.demo_servers`` makes that folder once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SQLITE_PACKAGES = (
    "mcp-server-sqlite==2025.4.25",
    "mcp==1.30.0",
    "httpx-sse==0.4.3",
    "pydantic-settings==2.16.3",
    "python-dotenv==1.2.4",
)
_START = "from mcp_server_sqlite import main; main()"


class ServersMissing(Exception):
    """The folder of the SQLite server could not be made; says what failed."""


def sqlite_folder() -> Path:
    """Where the server's packages live: inside the environment that runs this."""
    return Path(sys.prefix) / "share" / "sglang-agent" / "mcp-server-sqlite"


def sqlite_server(database: Path) -> dict[str, object]:
    """The ``servers`` entry of an MCP environment that serves one database file."""
    return {
        "command": "python",
        "args": ["-c", _START, "--db-path", str(database)],
        "env": {"PYTHONPATH": str(sqlite_folder())},
    }


def ensure() -> Path:
    """Install the SQLite server unless these very versions are there already.

    Raises :class:`ServersMissing` with pip's last line.
    """
    folder = sqlite_folder()
    stamp = folder / "packages.txt"
    wanted = "\n".join(SQLITE_PACKAGES)
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fresh = Path(scratch) / "packages"
        _install(fresh)
        (fresh / stamp.name).write_text(wanted)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.replace(fresh, folder)
        except OSError:  # another process was faster
            if not stamp.exists():
                raise
    return folder


def _install(target: Path) -> None:
    # Without dependencies: all but the five are the environment's own versions.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(target), *SQLITE_PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise ServersMissing(f"cannot install {SQLITE_PACKAGES[0]}: {last}")


def main() -> int:
    """Command line: make the folder, print where it is."""
    try:
        folder = ensure()
    except ServersMissing as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
