"""Make (or reuse) the one environment that the demo, the tests and the tools share.

Two layers, so that editing our sources never reinstalls gigabytes:

- the *base*, outside the clone under the cache folder, holds every third-party
  package; it is keyed by the upstream pin, ``requirements/`` and the Python version;
- ``.venv`` in the clone sees the base and holds our three packages (and what clashes
  with the base, in folders apart, see ``sglang_agent.side_packages``): the patched
  ``sglang`` wheel (rebuilt when a build input changes) and, in place, the gateway
  and the agent client. The programs of ``tools.txt`` are links into the cache.

Only the standard library is used. Exit codes: 0 ready, 2 the machine lacks something.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "makespan.stamp"
TOOLS = ROOT / "scripts" / "tools.txt"
SUPPORTED = ((3, 11), (3, 12), (3, 13))
EDITABLE = ("python", "sgl-router")
SIDE_PACKAGES = ROOT / "python/sglang_agent/side_packages.py"


class SetupError(Exception):
    """The environment cannot be made here; the message is for the user."""


def read_pin() -> dict[str, Any]:
    """``upstream.toml``, by a module that older interpreters lack.

    They only have to come as far as :func:`reexec_supported`.
    """
    import tomllib

    return tomllib.loads((ROOT / "upstream.toml").read_text("utf-8"))


def cache_root() -> Path:
    """Folder that outlives the clone: MAKESPAN_CACHE, else the XDG cache."""
    if explicit := os.environ.get("MAKESPAN_CACHE"):
        return Path(explicit)
    xdg = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(xdg) / "sglang-makespan"


def digest(files: Iterable[Path], *extra: str) -> str:
    """Short hash over the names and contents of files and a few strings."""
    h = hashlib.sha256()
    for text in extra:
        h.update(text.encode() + b"\0")
    for file in sorted(files):
        h.update(file.relative_to(ROOT).as_posix().encode() + b"\0")
        h.update(file.read_bytes() + b"\0")
    return h.hexdigest()[:16]


def base_key() -> str:
    """Names the base: the pinned wheel's hash, our requirements, the interpreter."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    files = (ROOT / "requirements").glob("*.txt")
    sha256 = read_pin()["wheels"][tag]["sha256"]
    return digest(files, tag, sha256, platform.machine())


def build_inputs() -> Iterator[Path]:
    """Every file that the patched wheel is made from."""
    yield ROOT / "upstream.toml"
    yield ROOT / "setup.py"
    for folder in ("patches", "python/sglang"):
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file


def installed_inputs() -> list[Path]:
    """Files that say what is installed into ``.venv`` beside the wheel."""
    return [SIDE_PACKAGES, *(ROOT / folder / "pyproject.toml" for folder in EDITABLE)]


def run(*command: str | Path, **env: str) -> None:
    """Run one step; a failing one ends the set-up with its command named."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **env}, check=False)
    if done.returncode:
        raise SetupError(f"exit status {done.returncode}: {' '.join(words)}")


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One set-up at a time on a machine; a second one waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def engine_requirements(wheel: Path) -> list[str]:
    """Upstream's own requirements, read from the pinned wheel, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    lines = headers.get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line]


def make_base(base: Path, upstream_wheel: Path) -> None:
    """Install every third-party package into a fresh environment at ``base``."""
    say(f"installing third-party packages into {base} (about 11 GB, several minutes)")
    shutil.rmtree(base, ignore_errors=True)
    run(sys.executable, "-m", "venv", base)
    engine = base / "engine.txt"
    engine.write_text("\n".join(engine_requirements(upstream_wheel)) + "\n")
    requirements = ROOT / "requirements"
    run(
        base / "bin/python", "-m", "pip", "install", "--quiet",
        "--disable-pip-version-check", "--constraint", requirements / "constraints.txt",
        "--requirement", engine, "--requirement", requirements / "dev.txt",
    )  # fmt: skip
    (base / "complete").touch()


def fetch_upstream() -> Path:
    """The pinned upstream wheel, downloaded once and checked against its hash."""
    out = subprocess.run(
        [sys.executable, "-m", "patches.tools", "fetch"],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    if out.returncode:
        raise SetupError("the pinned upstream wheel could not be fetched")
    return Path(out.stdout.strip().splitlines()[-1])


def make_venv(base: Path) -> None:
    """A fresh ``.venv`` that sees the packages of the base."""
    shutil.rmtree(VENV, ignore_errors=True)
    run(base / "bin/python", "-m", "venv", "--without-pip", VENV)
    tail = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    line = f"import site; site.addsitedir({str(base / tail)!r})\n"
    (VENV / tail / "makespan_base.pth").write_text(line)


def install_wheel(base: Path, wheel_key: str) -> None:
    """Build the patched wheel for these inputs once, then install it."""
    store = cache_root() / "built" / f"{wheel_key}-{sys.implementation.cache_tag}"
    wheels = list(store.glob("*.whl"))
    if not wheels:
        say("building the patched sglang wheel")
        shutil.rmtree(store, ignore_errors=True)
        run(base / "bin/python", "-m", "patches.tools", "wheel", "--output", store)
        wheels = list(store.glob("*.whl"))
    say(f"installing {wheels[0].name}")
    pip(base, "--force-reinstall", wheels[0])


def pip(base: Path, *arguments: str | Path) -> None:
    """Install into ``.venv`` with the base's pip, never touching dependencies."""
    run(
        base / "bin/python", "-m", "pip", "--python", VENV / "bin/python", "install",
        "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation",
        *arguments,
        PYTHONPATH=str(next((base / "lib").glob("python*/site-packages"))),
    )  # fmt: skip


def install_tools(base: Path) -> None:
    """Put the pinned programs of ``tools.txt`` beside the interpreter of ``.venv``."""
    store = cache_root() / "tools" / digest([TOOLS])
    if not store.exists():
        say("installing the programs that check docker/")
        store.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=store.parent) as scratch:
            fresh = Path(scratch) / "tools"
            run(
                base / "bin/python", "-m", "pip", "install", "--quiet",
                "--disable-pip-version-check", "--no-deps", "--require-hashes",
                "--target", fresh, "--requirement", TOOLS,
            )  # fmt: skip
            fresh.rename(store)
    for program in (store / "bin").iterdir():
        link = VENV / "bin" / program.name
        link.unlink(missing_ok=True)
        link.symlink_to(program)


def wanted_stamp() -> str:
    keys = [digest(files) for files in (build_inputs(), installed_inputs(), [TOOLS])]
    return "\n".join([str(ROOT), base_key(), *keys])


def setup() -> None:
    """Bring base and ``.venv`` up to date; does nothing when they are."""
    if STAMP.exists() and STAMP.read_text() == wanted_stamp():
        return
    base = cache_root() / "env" / base_key()
    with locked(cache_root() / "lock"):
        if not (base / "complete").exists():
            make_base(base, fetch_upstream())
        old = STAMP.read_text().splitlines() if STAMP.exists() else []
        if old[:2] != [str(ROOT), base_key()]:
            make_venv(base)
        STAMP.unlink(missing_ok=True)
        install_wheel(base, digest(build_inputs()))
        for folder in EDITABLE:
            pip(base, "--editable", ROOT / folder)
        install_tools(base)
        run(VENV / "bin/python", "-m", "sglang_agent.side_packages")
        STAMP.write_text(wanted_stamp())
    say(f"ready: {VENV / 'bin/python'}")


def reexec_supported() -> None:
    """Continue under a supported interpreter when started with another one."""
    if sys.version_info[:2] in SUPPORTED:
        return
    for major, minor in SUPPORTED:
        if found := shutil.which(f"python{major}.{minor}"):
            os.execv(found, [found, *sys.argv])
    raise SetupError(
        f"Python {platform.python_version()}: need 3.11, 3.12 or 3.13 on PATH"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clean", action="store_true", help="remove .venv and build/ of this clone"
    )
    arguments = parser.parse_args()
    try:
        reexec_supported()
        if arguments.clean:
            shutil.rmtree(VENV, ignore_errors=True)
            shutil.rmtree(ROOT / "build", ignore_errors=True)
            return 0
        if platform.machine() != "x86_64":
            raise SetupError(
                f"machine {platform.machine()}: upstream {read_pin()['version']} is "
                "pinned for x86_64 only"
            )
        setup()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
