"""The peers of the comparison: what each is, where it lives, how it gets there."""

from __future__ import annotations

import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Peer:
    """A harness: the pinned wheel and the script that does our work in it."""

    name: str
    version: str
    script: str

    @property
    def folder(self) -> Path:
        """Where it is installed; never our own environment."""
        return ROOT / f"build/bench-agent/venv-{self.name}"

    def install(self) -> None:
        """Make its environment, unless this very version is there."""
        stamp = self.folder / "version.txt"
        if stamp.exists() and stamp.read_text() == self.version:
            return
        venv.create(self.folder, clear=True, with_pip=True)
        wheel = f"{self.name}=={self.version}"
        subprocess.run(
            [
                self.folder / "bin/python",
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                wheel,
            ],
            check=True,
        )
        stamp.write_text(self.version)


PEERS = (
    Peer("inspect-ai", "0.3.285", "peer_inspect.py"),
    # Since 0.2 every rollout of verifiers is a process of its own: other work.
    Peer("verifiers", "0.1.14", "peer_verifiers.py"),
)
