"""A shell for the model: a working folder of its own, limits, a time limit.

Without ``image`` commands run as processes of this machine: limits keep a mistake
from taking the machine down, but they are no wall against hostile code. With
``image`` they run in a Docker container without network.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sglang_agent.environments import leases
from sglang_agent.environments.base import EnvironmentFailure
from sglang_agent.environments.blocking import run_blocking
from sglang_agent.environments.config import parse
from sglang_agent.environments.docker import Container
from sglang_agent.environments.operations import refusal
from sglang_agent.environments.process import Finished, run_limited
from sglang_agent.records import Operation, OperationResult, ToolDefinition

TOOL = "run_command"
_KIB = 1024
# In the environment of every command, so that what it leaves behind can be found.
_MARK = "SGLANG_AGENT_SANDBOX"
_PREFIX = "sglang-agent-"


class ShellConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a ``shell`` environment.

    ``template`` is a folder copied for every sample, ``files`` are written into the
    copy. Each command is killed, with all it started, after ``timeout_s``; output
    beyond ``output_bytes`` is left out of its middle. ``env`` is the whole
    environment of a command beside PATH, HOME and LANG.
    """

    template: str | None = None
    files: dict[str, str] = {}
    env: dict[str, str] = {}
    timeout_s: float = 60.0
    cpu_s: int = 60
    memory_bytes: int = 2 << 30
    file_bytes: int = 256 << 20
    output_bytes: int = 16384
    processes: int = 256
    image: str | None = None
    network: bool = False

    def __post_init__(self) -> None:
        for name in (
            "timeout_s",
            "cpu_s",
            "memory_bytes",
            "file_bytes",
            "output_bytes",
            "processes",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)}; must be above 0")
        if self.template is not None and not Path(self.template).is_dir():
            raise ValueError(f"template: {self.template!r}; must be a folder")
        for name in self.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"files: {name!r}; must be inside the folder")
        if self.network and self.image is None:
            raise ValueError("network: true; processes of this machine always have it")


class Sandbox(Protocol):
    """Where a command runs."""

    async def start(self, folder: Path) -> None: ...

    async def run(self, command: str, folder: Path) -> Finished: ...

    async def stop(self) -> None: ...


class ShellEnvironment:
    """One trajectory's shell: a temporary folder and one tool."""

    def __init__(self, config: ShellConfig) -> None:
        self._config = config
        self._folder: Path | None = None
        self._sandbox: Sandbox = _make_sandbox(config)

    async def open(self) -> Sequence[ToolDefinition]:
        """Lay the folder and start the container, if there is one."""
        try:
            await run_blocking(_sweep_once)
            self._folder = await run_blocking(_lay, self._config)
            await self._sandbox.start(self._folder)
        except OSError as error:
            await self.close()
            raise EnvironmentFailure(f"shell: cannot be laid: {error}") from error
        except BaseException:
            await self.close()
            raise
        return [_DEFINITION]

    def server_of(self, operations: Sequence[Operation]) -> str | None:
        """``docker`` or ``shell``."""
        return "shell" if self._config.image is None else "docker"

    async def run(self, operations: Sequence[Operation]) -> Sequence[OperationResult]:
        """Run the commands one after the other in the sample's folder."""
        return [await self._one(operation) for operation in operations]

    async def close(self) -> None:
        """Stop the container and delete the folder."""
        folder, self._folder = self._folder, None
        await asyncio.shield(self._sandbox.stop())
        if folder is not None:
            await asyncio.shield(run_blocking(_delete, folder))

    async def _one(self, operation: Operation) -> OperationResult:
        refused = refusal(operation, [TOOL])
        if refused is not None:
            return refused
        command = operation.arguments.get("command")
        if not isinstance(command, str):
            text = f"command is {command!r}; must be a string"
            return OperationResult(operation.id, text, is_error=True)
        if self._folder is None:
            raise EnvironmentFailure("shell: is closed")
        done = await self._sandbox.run(command, self._folder)
        return OperationResult(operation.id, done.text(), is_error=done.status != 0)


class LocalSandbox:
    """Commands as processes of this machine under ``ulimit``."""

    def __init__(self, config: ShellConfig) -> None:
        self._config = config
        self._folder: Path | None = None

    async def start(self, folder: Path) -> None:
        if shutil.which("bash") is None:
            raise EnvironmentFailure("shell: bash is not on the PATH")

    async def run(self, command: str, folder: Path) -> Finished:
        # The limits are set by the shell itself: nothing runs between fork and exec.
        config = self._config
        limits = (
            f"ulimit -c 0 -t {config.cpu_s} -f {config.file_bytes // _KIB} "
            f"-v {config.memory_bytes // _KIB} -u {config.processes}"
        )
        script = f'{limits} && exec bash -c "$1"'
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            **config.env,
            _MARK: str(folder),
            leases.OWNER_VARIABLE: leases.owner(),
        }
        self._folder = folder
        return await run_limited(
            ["bash", "-c", script, "bash", command],
            cwd=folder,
            env=environment,
            timeout_s=config.timeout_s,
            output_bytes=config.output_bytes,
        )

    async def stop(self) -> None:
        """End what detached itself from its command; the rest is gone already."""
        if self._folder is not None:
            mine = str(self._folder)
            await run_blocking(leases.kill_processes, _MARK, mine.__eq__)


def _make_sandbox(config: ShellConfig) -> Sandbox:
    if config.image is None:
        return LocalSandbox(config)
    return Container(
        config.image,
        env=config.env,
        timeout_s=config.timeout_s,
        output_bytes=config.output_bytes,
        limits=[
            f"--memory={config.memory_bytes}",
            f"--pids-limit={config.processes}",
            f"--ulimit=cpu={config.cpu_s}",
            f"--ulimit=fsize={config.file_bytes}",
            f"--network={'bridge' if config.network else 'none'}",
        ],
    )


class ShellFactory:
    """Makes shell environments."""

    def create(self, config: Mapping[str, Any], sample_id: str) -> ShellEnvironment:
        """Check the settings; nothing is started before ``open``."""
        return ShellEnvironment(parse(config, ShellConfig))


FACTORY = ShellFactory()

_DEFINITION: ToolDefinition = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Run a shell command in the working folder; shows its output "
        "and, if it is not 0, its exit status.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def sweep() -> list[Path]:
    """End and delete the sandboxes whose owner is gone; returns their folders."""
    leases.end_orphans()
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*_*"):
        owner, _, _ = folder.name.removeprefix(_PREFIX).partition("_")
        if leases.is_gone(owner):
            _delete(folder)
            found.append(folder)
    return found


_sweep_once = functools.cache(sweep)


def _lay(config: ShellConfig) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{leases.owner()}_"))
    if config.template is not None:
        shutil.copytree(config.template, folder, dirs_exist_ok=True, symlinks=True)
    for name, content in config.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
