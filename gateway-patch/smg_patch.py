"""Applies, checks and renews the patch that gives smg the policy lbch.

    python gateway-patch/smg_patch.py check
    python gateway-patch/smg_patch.py apply --output DIR
    python gateway-patch/smg_patch.py refresh --tree DIR

``check`` needs the package index once, to fetch the source archive that ``smg.toml``
pins. ``apply`` unpacks that archive into DIR and patches it: what smg's own build then
takes. ``refresh`` writes the patch and our files anew from an edited DIR. The format of
the patch is that of ``patches/``: insertions without context, framed by blob ids.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from patches.tools.diff import Patch, parse, render  # noqa: E402
from patches.tools.errors import SeriesError  # noqa: E402
from patches.tools.export import export_file  # noqa: E402
from patches.tools.series import refuse_overwrites  # noqa: E402
from patches.tools.wheel import cache_dir  # noqa: E402

PATCH = HERE / "bounded_consistent_hashing.patch"
FILES = HERE / "files"

_BACKEND = """\
# pip asks a source archive's build backend for metadata before it keeps the file; this
# stands in for maturin, which would need a crate registry to answer.
from pathlib import Path


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = Path(metadata_directory) / "{name}-{version}.dist-info"
    folder.mkdir()
    text = "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
    (folder / "METADATA").write_text(text)
    return folder.name
"""


@dataclass(frozen=True)
class Archive:
    """The pinned source archive."""

    name: str
    version: str
    file: str
    sha256: str


def read_archive() -> Archive:
    """The pin in ``smg.toml``."""
    return Archive(**tomllib.loads((HERE / "smg.toml").read_text("utf-8")))


def fetch(pin: Archive) -> Path:
    """The verified source archive, downloaded when needed; raises SeriesError."""
    path = cache_dir() / pin.file
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(pin, path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != pin.sha256:
        raise SeriesError(f"{path}: sha256 {found}, smg.toml pins {pin.sha256}")
    return path


def _download(pin: Archive, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        backend = _BACKEND.format(name=pin.name, version=pin.version)
        (Path(folder) / "maturin.py").write_text(backend)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--no-binary", pin.name]
        command += ["--dest", folder, f"{pin.name}=={pin.version}"]
        environment = os.environ | {"PYTHONPATH": folder}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
        got = Path(folder) / pin.file
        if done.returncode or not got.exists():
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise SeriesError(f"pip download of {pin.file} failed: {reason}")
        got.replace(path)


def unpack(archive: Path, output: Path) -> None:
    """Unpack the archive's one folder as ``output``, which must not exist."""
    if output.exists():
        raise SeriesError(f"{output}: exists; name a new folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (inner,) = Path(folder).iterdir()
        inner.replace(output)


def our_files() -> dict[str, Path]:
    """The new files by their place in smg's source tree."""
    found = sorted(path for path in FILES.rglob("*") if path.is_file())
    return {path.relative_to(FILES).as_posix(): path for path in found}


def load() -> Patch:
    """The patch, parsed strictly."""
    return parse(PATCH.name, PATCH.read_text("utf-8"), prefix="")


def apply(tree: Path) -> list[str]:
    """Patch an unpacked archive and add our files; all or nothing.

    Raises SeriesError when a file is not the one that the patch was made for.
    """
    ours = our_files()
    refuse_overwrites(ours, [path for path in ours if (tree / path).exists()])
    changed = {
        file.path: file.apply((tree / file.path).read_bytes()) for file in load().files
    }
    for path, data in changed.items():
        (tree / path).write_bytes(data)
    for path, source in ours.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, tree / path)
    return sorted([*changed, *ours])


def refresh(tree: Path) -> None:
    """Write patch and files anew from an edited tree that ``apply`` made."""
    pin, patch = read_archive(), load()
    with tempfile.TemporaryDirectory() as folder:
        pristine = Path(folder) / "smg"
        unpack(fetch(pin), pristine)
        paths = [path.relative_to(pristine) for path in pristine.rglob("*")]
        files = []
        for path in sorted(p.as_posix() for p in paths if (pristine / p).is_file()):
            before, after = (pristine / path).read_bytes(), (tree / path).read_bytes()
            if before != after:
                files.append(export_file(path, before, after, prefix=""))
    text = render(Patch(patch.name, patch.header, tuple(files)))
    for path, source in our_files().items():
        shutil.copyfile(tree / path, source)
    PATCH.write_text(text, "utf-8")


def check() -> list[str]:
    """What is wrong with the patch, a line each; empty when it applies exactly."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "smg"
        try:
            unpack(fetch(read_archive()), tree)
            apply(tree)
        except SeriesError as error:
            return [str(error)]
    if render(load()) != PATCH.read_text("utf-8"):
        return [f"{PATCH.name}: 'refresh' would write it differently"]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 1 when it fails, 2 when the command line is wrong."""
    parser = argparse.ArgumentParser(prog="smg_patch.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("check")
    for name, option in (("apply", "--output"), ("refresh", "--tree")):
        sub = commands.add_parser(name)
        sub.add_argument(option, type=Path, required=True, metavar="DIR", dest="folder")
    args = parser.parse_args(argv)
    try:
        if args.command == "check":
            if problems := check():
                raise SeriesError("\nerror: ".join(problems))
        elif args.command == "apply":
            unpack(fetch(read_archive()), args.folder)
            print(*apply(args.folder), sep="\n")  # noqa: T201
        else:
            refresh(args.folder)
    except (SeriesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
