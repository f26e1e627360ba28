"""A Docker container for one trajectory, driven by the ``docker`` program.

Containers carry a label that names the process that owns them. Whoever opens the
first container of a process removes those whose owner is gone, so that a killed run
leaves nothing behind for longer than until the next one.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sglang_agent.environments import leases
from sglang_agent.environments.base import EnvironmentFailure
from sglang_agent.environments.process import Finished, run_limited
from sglang_agent.environments.starting import start_turn

OWNER_LABEL = "sglang-agent.owner"
_WORKDIR = "/work"
_CONTROL_S = 120.0
_EXEC_GRACE_S = 5.0
_NO_CONTAINER = 125
_KILLED = 137
_CONTROL_BYTES = 65536
_swept = False


class Container:
    """A container that waits for commands; started and stopped once.

    ``limits`` are flags of ``docker run``.
    """

    def __init__(
        self,
        image: str,
        *,
        env: Mapping[str, str],
        timeout_s: float,
        output_bytes: int,
        limits: Sequence[str],
    ) -> None:
        self._image = image
        self._env = dict(env)
        self._timeout_s = timeout_s
        self._output_bytes = output_bytes
        self._limits = list(limits)
        self._id: str | None = None

    async def start(self, folder: Path) -> None:
        """Start it with ``folder`` as its working folder."""
        await sweep()
        variables = [f"--env={name}={value}" for name, value in self._env.items()]
        # Asked for by name as well, so that a start that is cancelled halfway can
        # still be undone.
        self._id = folder.name
        async with start_turn():
            await _docker(
                "run", "--detach", "--rm", "--init", f"--name={self._id}",
                f"--label={OWNER_LABEL}={leases.owner()}", *self._limits, *variables,
                f"--volume={folder}:{_WORKDIR}", f"--workdir={_WORKDIR}",
                self._image, "sleep", "infinity",
            )  # fmt: skip

    async def run(self, command: str, folder: Path) -> Finished:
        """Run one command in it; ``timeout`` inside ends what docker exec cannot."""
        if self._id is None:
            raise EnvironmentFailure("docker: container is not running")
        started = time.monotonic()
        done = await run_limited(
            self._exec(command),
            timeout_s=self._timeout_s + _EXEC_GRACE_S,
            output_bytes=self._output_bytes,
        )
        # 125 is docker's own, when the container cannot be reached.
        if done.status == _NO_CONTAINER or b"No such container" in done.output:
            raise EnvironmentFailure(f"docker: {done.text().strip()}")
        if done.status == _KILLED:
            # By its time limit, or earlier by another, which is that of memory.
            late = time.monotonic() - started >= self._timeout_s
            return msgspec.structs.replace(
                done,
                status=None if late else -signal.SIGKILL,
                timeout_s=self._timeout_s,
            )
        return done

    def _exec(self, command: str) -> list[str]:
        assert self._id is not None
        limit = ["timeout", "-s", "KILL", f"{self._timeout_s:g}"]
        return ["docker", "exec", self._id, *limit, "sh", "-c", command]

    async def stop(self) -> None:
        """Remove the container, whatever state it is in."""
        name, self._id = self._id, None
        if name is not None:
            await run_limited(
                ["docker", "rm", "--force", name],
                timeout_s=_CONTROL_S,
                output_bytes=_CONTROL_BYTES,
            )


async def sweep() -> list[str]:
    """Remove containers whose owner is gone, once per process; returns their ids."""
    global _swept
    if _swept:
        return []
    _swept = True
    listing = await _docker(
        "ps", "--all", f"--filter=label={OWNER_LABEL}",
        f'--format={{{{.ID}}}} {{{{.Label "{OWNER_LABEL}"}}}}',
    )  # fmt: skip
    rows = [line.split(maxsplit=1) for line in listing.splitlines() if line.strip()]
    orphans = [row[0] for row in rows if len(row) == 2 and leases.is_gone(row[1])]
    if orphans:
        await _docker("rm", "--force", *orphans)
    return orphans


async def _docker(*arguments: str) -> str:
    if shutil.which("docker") is None:
        raise EnvironmentFailure("docker: the program is not on the PATH")
    done = await run_limited(
        ["docker", *arguments], timeout_s=_CONTROL_S, output_bytes=_CONTROL_BYTES
    )
    if done.status != 0:
        raise EnvironmentFailure(f"docker {arguments[0]}: {done.text().strip()}")
    return done.output.decode(errors="replace")
