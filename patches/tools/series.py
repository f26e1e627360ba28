"""The ordered list of patches, and their application to files held in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from patches.tools.diff import PREFIX, Patch, parse
from patches.tools.errors import SeriesError
from patches.tools.pin import ROOT

ReadFile = Callable[[str], bytes]
"""Returns the upstream file at a path below the wheel's root, ``sglang/...``."""


def patches_dir(root: Path = ROOT) -> Path:
    return root / "patches"


def read_series(root: Path = ROOT) -> list[str]:
    """Return the listed patch names in order; comments and empty lines are left out."""
    path = patches_dir(root) / "series"
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise SeriesError(f"patches/series: {error.strerror}") from None
    return [line for line in lines if line and not line.startswith("#")]


def load_patch(name: str, root: Path = ROOT) -> Patch:
    """Read and parse one patch of the series."""
    try:
        text = (patches_dir(root) / name).read_text("utf-8")
    except OSError as error:
        raise SeriesError(f"patches/{name}: {error.strerror}") from None
    return parse(name, text)


def load_series(root: Path = ROOT, through: str | None = None) -> list[Patch]:
    """Load the series, or its beginning up to and including the patch ``through``."""
    names = read_series(root)
    if through == "none":
        return []
    if through is not None:
        if through not in names:
            raise SeriesError(f"patch {through!r} is not listed in patches/series")
        names = names[: names.index(through) + 1]
    return [load_patch(name, root) for name in names]


def wheel_path(path: str) -> str:
    """Return the place in the wheel of a path in a patch (``python/`` dropped)."""
    return path.removeprefix("python/")


@dataclass
class Applied:
    """The patched files, by path in the wheel, and the patches that made them."""

    read: ReadFile
    files: dict[str, bytes] = field(default_factory=dict)
    patches: list[Patch] = field(default_factory=list)

    def content(self, path: str) -> bytes:
        """Return the file at ``path`` in the wheel as patched so far."""
        return self.files[path] if path in self.files else self.read(path)

    def push(self, patch: Patch) -> None:
        """Apply one patch to all of its files, or to none and raise SeriesError."""
        changed: dict[str, bytes] = {}
        for diff in patch.files:
            path = wheel_path(diff.path)
            try:
                changed[path] = diff.apply(self.content(path))
            except KeyError:
                raise SeriesError(
                    f"patches/{patch.name}: {diff.path} is not in the upstream wheel"
                ) from None
            except SeriesError as error:
                raise SeriesError(f"patches/{patch.name}: {error}") from None
        self.files.update(changed)
        self.patches.append(patch)


def apply_series(patches: Iterable[Patch], read: ReadFile) -> Applied:
    """Apply ``patches`` in order to the files that ``read`` returns."""
    applied = Applied(read)
    for patch in patches:
        applied.push(patch)
    return applied


def overlay_files(root: Path = ROOT) -> dict[str, Path]:
    """Return our own files by path in the wheel (``sglang/...``)."""
    base = root / PREFIX
    return {
        f"sglang/{path.relative_to(base).as_posix()}": path
        for path in sorted(base.rglob("*"))
        if path.is_file() and _ships(path.relative_to(base))
    }


def _ships(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and "__pycache__" not in path.parts and path.suffix != ".pyc"


def refuse_overwrites(overlay: Iterable[str], upstream: Iterable[str]) -> None:
    """Raise SeriesError when one of our files has the path of an upstream file."""
    taken = sorted(set(overlay) & set(upstream))
    if taken:
        raise SeriesError(
            f"python/{taken[0]}: upstream has a file there; change it with a patch"
        )
