"""The shell sandbox: folder, limits, deadlines, and no process left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_agent.environments import docker, leases, registry
from sglang_agent.environments.base import Environment, EnvironmentFailure
from sglang_agent.environments.process import BoundedOutput
from sglang_agent.environments.shell import sweep
from sglang_agent.records import Operation, OperationResult


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


@contextlib.asynccontextmanager
async def shell(**config: Any) -> AsyncIterator[Callable[[str], Any]]:
    environment: Environment = registry.create("shell", config, "s1")

    async def run(command: str) -> OperationResult:
        [result] = await environment.run(
            [Operation("c", "run_command", {"command": command})]
        )
        return result

    await environment.open()
    try:
        yield run
    finally:
        await environment.close()
        await environment.close()


async def test_a_folder_of_its_own_that_is_gone_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("from the template")
    async with shell(template=str(tmp_path), files={"src/a.py": "print(6 * 7)"}) as run:
        assert (await run("cat notes.txt")).content == "from the template"
        assert (await run("python3 src/a.py")).content == "42\n"
        await run("echo kept > out.txt; cd /; export LOST=1")
        assert (await run("cat out.txt; echo $LOST; echo ${HOME##*/}")).content.split()[
            0
        ] == "kept"
        folder = Path((await run("pwd")).content.strip())
        assert "out.txt" in names(folder)
    assert names(folder) == []
    assert names(tmp_path) == ["notes.txt"]


async def test_exit_status_and_missing_command_are_the_tools_errors() -> None:
    async with shell() as run:
        failed = await run("echo out; echo err >&2; exit 3")
        assert failed.is_error
        assert failed.content == "out\nerr\n\n[exit status 3]"
        assert not (await run("true")).is_error
    environment: Environment = registry.create("shell", {}, "s1")
    await environment.open()
    wrong = [Operation("c", "run_command", {"cmd": "x"}), Operation("c", "sh", {})]
    results = await environment.run(wrong)
    assert "command is None; must be a string" in results[0].content
    assert "unknown tool 'sh'" in results[1].content
    await environment.close()


async def test_secrets_of_this_process_are_not_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("API_KEY", "s3cret")
    async with shell(env={"COLOR": "blue"}) as run:
        assert (await run('echo "$COLOR$API_KEY"')).content == "blue\n"


async def test_a_slow_command_is_killed_with_all_it_started(tmp_path: Path) -> None:
    started = time.monotonic()
    async with shell(timeout_s=0.3) as run:
        result = await run(f"sleep 60 & echo $! > {tmp_path}/pid; echo begun; sleep 60")
        assert result.is_error
        assert result.content == "begun\n\n[killed after 0.3 s]"
    assert time.monotonic() - started < 5
    assert ends(int((tmp_path / "pid").read_text()))


async def test_background_processes_end_with_the_command_or_the_shell(
    tmp_path: Path,
) -> None:
    started = time.monotonic()
    async with shell() as run:
        await run(f"sleep 60 & echo $! > {tmp_path}/plain")
        assert ends(int((tmp_path / "plain").read_text()))
        # One that detaches itself, and keeps the output pipe, lives on until the end.
        await run(f"setsid sh -c 'echo $$ > {tmp_path}/detached; sleep 60' & sleep 0.3")
        detached = int((tmp_path / "detached").read_text())
        assert alive(detached)
    assert time.monotonic() - started < 10
    assert ends(detached)


async def test_cancelling_kills_the_command(tmp_path: Path) -> None:
    async with shell() as run:
        task = asyncio.create_task(run(f"echo $$ > {tmp_path}/pid; sleep 60"))
        while not (tmp_path / "pid").exists():  # noqa: ASYNC110  (another process)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends(int((tmp_path / "pid").read_text()))


KILLED_CLIENT = """
import asyncio, os, signal, sys
from sglang_agent.environments import registry
from sglang_agent.records import Operation

async def main():
    environment = registry.create("shell", {}, "s1")
    await environment.open()
    command = "sleep 60 & echo $! > pid; pwd > " + sys.argv[1] + "; sleep 60"
    job = [Operation("c", "run_command", {"command": command})]
    asyncio.create_task(environment.run(job))
    while not os.path.exists(sys.argv[1]):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_what_a_killed_client_left_is_found_and_ended(tmp_path: Path) -> None:
    where = tmp_path / "where"
    command = [sys.executable, "-c", KILLED_CLIENT, str(where)]
    assert subprocess.run(command, check=False).returncode == -9
    folder = Path(where.read_text().strip())
    left = int((folder / "pid").read_text())
    assert alive(left)
    assert folder in sweep()
    assert ends(left)
    assert not folder.exists()


async def test_a_sweep_leaves_the_living_alone() -> None:
    async with shell() as run:
        folder = Path((await run("pwd")).content.strip())
        assert folder not in sweep()
        assert names(folder) == []
        assert not (await run("true")).is_error


@pytest.mark.parametrize(
    ("limits", "command", "shown"),
    [
        (
            {"memory_bytes": 300 << 20},
            f"{sys.executable} -c 'b\"x\" * (1 << 30)'",
            "Memory",
        ),
        (
            {"file_bytes": 10240},
            "head -c 1000000 /dev/zero > big; ls -s big",
            "File size",
        ),
        ({"cpu_s": 1}, "while :; do :; done", "signal 9"),
    ],
)
async def test_limits(limits: dict[str, int], command: str, shown: str) -> None:
    async with shell(**limits, timeout_s=20) as run:
        result = await run(command)
        assert shown in result.content


async def test_long_output_loses_its_middle() -> None:
    async with shell(output_bytes=100) as run:
        text = (await run("seq 100000")).content
    assert text.startswith("1\n2\n")
    assert text.endswith("99999\n100000\n")
    assert "bytes left out]" in text
    assert len(text) < 150


@pytest.mark.parametrize("size", [1, 7, 100])
def test_bounded_output_keeps_all_that_fits(size: int) -> None:
    output = BoundedOutput(100)
    for start in range(0, 100, size):
        output.add(bytes(range(start, min(start + size, 100))))
    assert output.content() == bytes(range(100))
    output.add(b"!")
    assert output.left_out_bytes == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"timeout_s": 0}, "timeout_s: 0"),
        ({"template": "/no/such"}, "template: '/no/such'; must be a folder"),
        ({"files": {"../x": ""}}, r"files: '\.\./x'; must be inside"),
        ({"network": True}, "network: true"),
        ({"imag": "debian"}, "imag"),
    ],
)
def test_wrong_settings_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.create("shell", config, "s1")


def alive(pid: int) -> bool:
    """Running and not just waiting to be collected."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


def ends(pid: int, limit_s: float = 5.0) -> bool:
    """Whether a process that was killed is gone soon; a kill takes effect a bit later."""
    deadline = time.monotonic() + limit_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


# A stand-in for the docker program: containers are files in a folder, and exec runs
# the command on this machine.
FAKE_DOCKER = """#!{python}
import json, os, pathlib, subprocess, sys
state = pathlib.Path({state!r})
verb, *rest = sys.argv[1:]
with (state / "log").open("a") as log:
    log.write(json.dumps([verb, *rest]) + "\\n")
flags = dict(a[2:].split("=", 1) for a in rest if a.startswith("--") and "=" in a)
if verb == "run":
    (state / flags["name"]).write_text(flags["label"].split("=", 1)[1])
elif verb == "exec":
    if not (state / rest[0]).exists():
        sys.exit("Error response from daemon: No such container: " + rest[0])
    sys.exit(subprocess.run(rest[1:]).returncode % 256)
elif verb == "rm":
    for name in rest[1:]:
        (state / name).unlink(missing_ok=True)
elif verb == "ps":
    for path in state.iterdir():
        if path.name != "log":
            print(path.name, path.read_text())
"""


@pytest.fixture
def fake_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    state, programs = tmp_path / "containers", tmp_path / "bin"
    state.mkdir()
    programs.mkdir()
    program = programs / "docker"
    program.write_text(FAKE_DOCKER.format(python=sys.executable, state=str(state)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(docker, "_swept", False)
    return state


def containers(state: Path) -> list[str]:
    return sorted(path.name for path in state.iterdir() if path.name != "log")


async def test_docker_command_lines_and_orphans(fake_docker: Path) -> None:
    place, number, started = leases.owner().split("-")
    (fake_docker / "orphan").write_text(f"{place}-999999-123")
    (fake_docker / "reused").write_text(f"{place}-{number}-1")
    (fake_docker / "elsewhere").write_text(f"0badb007.1-{number}-{started}")
    (fake_docker / "mine").write_text(leases.owner())
    async with shell(image="debian:13", timeout_s=5, processes=7) as run:
        assert (await run("echo hello")).content == "hello\n"
        assert (await run("exit 4")).content == "\n[exit status 4]"
        assert len(containers(fake_docker)) == 3
    assert containers(fake_docker) == ["elsewhere", "mine"]
    log = [json.loads(line) for line in (fake_docker / "log").read_text().splitlines()]
    [started] = [line for line in log if line[0] == "run"]
    assert {"--network=none", "--pids-limit=7", "debian:13"} <= set(started)


async def test_a_container_that_vanished_is_an_environment_failure(
    fake_docker: Path,
) -> None:
    async with shell(image="debian:13") as run:
        for name in containers(fake_docker):
            (fake_docker / name).unlink()
        with pytest.raises(EnvironmentFailure, match="No such container"):
            await run("true")


async def test_without_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(docker, "_swept", False)
    environment: Environment = registry.create("shell", {"image": "debian"}, "s1")
    with pytest.raises(
        EnvironmentFailure, match="docker: the program is not on the PATH"
    ):
        await environment.open()
    assert names(tmp_path) == []


IMAGE = os.environ.get("SGLANG_AGENT_TEST_IMAGE", "debian:13")


def daemon_runs() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = ["docker", "image", "inspect", IMAGE]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def listing(*flags: str) -> str:
    command = ["docker", "ps", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(not daemon_runs(), reason=f"needs a Docker daemon with {IMAGE}")
async def test_a_real_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "_swept", False)
    limits = {"timeout_s": 3, "memory_bytes": 64 << 20}
    async with shell(
        image=IMAGE, files={"a": "in"}, env={"C": "blue"}, **limits
    ) as run:
        assert (await run("cat a; echo out > b; echo $C")).content == "inblue\n"
        assert (await run("cat b; exit 3")).content == "out\n\n[exit status 3]"
        assert "killed after 3 s" in (await run("sleep 60")).content
        assert "killed by signal 9" in (await run("exec tail /dev/zero")).content
        interfaces = (await run("tail -n +3 /proc/net/dev")).content
        assert [line.split(":")[0].strip() for line in interfaces.splitlines()] == [
            "lo"
        ]
        assert "sglang-agent-" in listing()
    assert "sglang-agent-" not in listing("--all")
