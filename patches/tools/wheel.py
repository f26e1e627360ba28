"""Fetches the pinned wheel, patches it in memory and packs the patched one."""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from patches.tools.errors import SeriesError
from patches.tools.pin import ROOT, Pin, PinnedWheel, read_pin
from patches.tools.series import (
    apply_series,
    load_series,
    overlay_files,
    refuse_overwrites,
)

EPOCH_1980 = 315532800
"""The earliest time a zip archive can hold; used when SOURCE_DATE_EPOCH is unset."""


@dataclass(frozen=True)
class Entry:
    """One file of the patched wheel; ``source`` is set for our own files."""

    path: str
    data: bytes
    mode: int
    source: Path | None = None


def cache_dir() -> Path:
    """Return the folder that keeps downloaded wheels, outside any checkout.

    It is the one of ``make setup``: MAKESPAN_CACHE, else the XDG cache.
    """
    if explicit := os.environ.get("MAKESPAN_CACHE"):
        return Path(explicit) / "wheels"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sglang-makespan" / "wheels"


def fetch(pin: Pin, tag: str | None = None) -> Path:
    """Return the verified upstream wheel of ``tag``, downloading it when needed.

    Raises SeriesError when pip fails or the file's sha256 is not the pinned one.
    """
    wheel = pin.wheel(tag)
    path = cache_dir() / wheel.file
    if not path.exists():
        _download(pin, wheel, path)
    verify(path, wheel)
    return path


def verify(path: Path, wheel: PinnedWheel) -> None:
    """Raise SeriesError unless the file has the pinned sha256."""
    found = sha256_of(path)
    if found != wheel.sha256:
        raise SeriesError(
            f"{path}: sha256 {found}, upstream.toml pins {wheel.sha256}; "
            "remove the file to download it again"
        )


def sha256_of(path: Path) -> str:
    """Return the hash of a file, as ``upstream.toml`` writes it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(pin: Pin, wheel: PinnedWheel, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", folder]
        command += ["--python-version", wheel.tag.removeprefix("cp")]
        command += ["--implementation", "cp", "--abi", wheel.tag]
        command += ["--platform", wheel.platform]
        command += [f"{pin.name}=={pin.upstream_version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise SeriesError(f"pip download of {wheel.file} failed: {reason}")
        got = Path(folder) / wheel.file
        if not got.exists():
            raise SeriesError(f"pip did not download {wheel.file}")
        verify(got, wheel)
        got.replace(path)


class UpstreamWheel:
    """Random access to the files of the upstream wheel."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self.modes = {
            info.filename: info.external_attr >> 16
            for info in self._zip.infolist()
            if not info.is_dir()
        }

    def read(self, path: str) -> bytes:
        """Return one file; raises KeyError when the wheel has none at ``path``."""
        return self._zip.read(path)


def patched_entries(
    pin: Pin, upstream: UpstreamWheel, root: Path = ROOT, through: str | None = None
) -> list[Entry]:
    """Return every file of the patched wheel but RECORD, checked, in a fixed order.

    With ``through`` only the beginning of the series, up to that patch, is applied.
    """
    overlay = overlay_files(root)
    refuse_overwrites(overlay, upstream.modes)
    changed = apply_series(load_series(root, through), upstream.read).files
    changed |= _generated(pin, upstream)
    entries = [
        Entry(
            path.replace(pin.upstream_dist_info, pin.dist_info, 1),
            changed[path] if path in changed else upstream.read(path),
            mode,
        )
        for path, mode in upstream.modes.items()
        if not path.endswith(".dist-info/RECORD")
    ]
    entries += [
        Entry(path, source.read_bytes(), 0o100644, source)
        for path, source in overlay.items()
    ]
    return sorted(entries, key=lambda entry: (".dist-info/" in entry.path, entry.path))


def _generated(pin: Pin, upstream: UpstreamWheel) -> dict[str, bytes]:
    """Return the files that carry the version or the entry points, rewritten."""
    info = pin.upstream_dist_info
    return {
        "sglang/_version.py": version_module(pin.version).encode(),
        f"{info}/METADATA": _metadata(upstream.read(f"{info}/METADATA"), pin),
        f"{info}/entry_points.txt": _entry_points(
            upstream.read(f"{info}/entry_points.txt"), pin.entry_points
        ),
    }


def version_module(version: str) -> str:
    """Return the generated module that ``sglang.__version__`` is read from."""
    public, _, local = version.partition("+")
    parts = [*map(int, public.split(".")), *([local] if local else [])]
    return (
        "# Generated when the wheel was built.\n"
        f"__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = {tuple(parts)!r}\n"
        "__commit_id__ = commit_id = None\n"
    )


def _metadata(data: bytes, pin: Pin) -> bytes:
    old = f"\nVersion: {pin.upstream_version}\n"
    text = data.decode("utf-8")
    if text.count(old) != 1:
        raise SeriesError(f"METADATA does not say {old.strip()!r} exactly once")
    return text.replace(old, f"\nVersion: {pin.version}\n").encode("utf-8")


def _entry_points(data: bytes, ours: Mapping[str, Mapping[str, str]]) -> bytes:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(data.decode("utf-8"))
    for group, entries in ours.items():
        if not parser.has_section(group):
            parser.add_section(group)
        for name, target in entries.items():
            if parser.has_option(group, name):
                raise SeriesError(f"entry point {group}:{name} exists upstream")
            parser.set(group, name, target)
    out = io.StringIO()
    parser.write(out)
    return out.getvalue().encode("utf-8")


def record(pin: Pin, entries: list[Entry]) -> Entry:
    """Return the RECORD of a wheel made of ``entries``."""
    path = f"{pin.dist_info}/RECORD"
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")  # some upstream paths hold commas
    rows.writerows([e.path, f"sha256={_digest(e.data)}", len(e.data)] for e in entries)
    rows.writerow([path, "", ""])
    return Entry(path, out.getvalue().encode("utf-8"), 0o100644)


def _digest(data: bytes) -> str:
    digest = hashlib.sha256(data).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def build_wheel(output: Path, tag: str | None = None, root: Path = ROOT) -> Path:
    """Build the patched wheel into the folder ``output`` and return its path.

    The same sources give the same bytes. Nothing is written unless every check passes.
    """
    pin = read_pin(root)
    upstream = UpstreamWheel(fetch(pin, tag))
    entries = patched_entries(pin, upstream, root)
    output.mkdir(parents=True, exist_ok=True)
    path = output / pin.wheel_file(tag)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        _pack(partial, [*entries, record(pin, entries)])
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _pack(path: Path, entries: list[Entry]) -> None:
    stamp = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or EPOCH_1980))[:6]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, data in _zip_infos(entries, stamp):
            archive.writestr(info, data)


def _zip_infos(
    entries: list[Entry], stamp: tuple[int, ...]
) -> Iterator[tuple[zipfile.ZipInfo, bytes]]:
    year, month, day, hour, minute, second = stamp
    date = (max(year, 1980), month, day, hour, minute, second)
    for entry in entries:
        info = zipfile.ZipInfo(entry.path, date)
        info.create_system = 3
        info.external_attr = entry.mode << 16
        info.compress_type = zipfile.ZIP_DEFLATED
        yield info, entry.data
