"""Reads ``features.toml``: which patches, files, tests and pages make one feature."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from patches.tools.errors import SeriesError
from patches.tools.pin import ROOT
from patches.tools.series import overlay_files, patches_dir


@dataclass(frozen=True)
class Feature:
    """One feature; ``extra`` maps our tests and pages to their place upstream.

    A feature that is not offered ``upstream`` belongs to this distribution only and is
    not rendered. ``benchmark`` is the results file that its message quotes, if any.
    """

    name: str
    title: str
    upstream: bool
    message: str
    files: tuple[str, ...]
    extra: Mapping[str, str]
    benchmark: str | None

    def owns(self, path: str) -> bool:
        """Say whether the file at ``path`` in the wheel belongs to this feature."""
        return any(fnmatchcase(path, pattern) for pattern in self.files)


def read_features(root: Path = ROOT) -> list[Feature]:
    """Return the features in their order; raise SeriesError when a field is wrong."""
    path = patches_dir(root) / "features.toml"
    try:
        tables = tomllib.loads(path.read_text("utf-8"))["feature"]
        return [_feature(table) for table in tables]
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SeriesError(f"patches/features.toml: {error}") from None
    except KeyError as error:
        raise SeriesError(f"patches/features.toml: field {error} is missing") from None


def _feature(table: dict[str, Any]) -> Feature:
    return Feature(
        name=table["name"],
        title=table["title"],
        upstream=table["upstream"],
        message=table["message"].strip() if table["upstream"] else "",
        files=tuple(table["files"]),
        extra=table.get("tests", {}) | table.get("docs", {}),
        benchmark=table.get("benchmark"),
    )


def feature_problems(
    features: list[Feature], patches: Iterable[str], root: Path = ROOT
) -> list[str]:
    """Say, a line each, what the manifest lacks or names that does not exist."""
    names = {feature.name for feature in features}
    problems = [
        f"patches/{patch}: no feature {patch.split('/')[0]!r} in features.toml"
        for patch in patches
        if patch.split("/")[0] not in names
    ]
    overlay = list(overlay_files(root))
    for path in overlay:
        owners = [feature.name for feature in features if feature.owns(path)]
        if len(owners) != 1:
            problems.append(
                f"python/{path}: listed by {', '.join(owners) or 'no feature'} "
                "in features.toml, must be exactly one"
            )
    for feature in features:
        problems += _missing(feature, overlay, root)
    return problems


def _missing(feature: Feature, overlay: list[str], root: Path) -> list[str]:
    where = f"patches/features.toml: {feature.name}"
    ours = [e for e in feature.files if not any(fnmatchcase(p, e) for p in overlay)]
    return [f"{where}: files: {entry!r} matches no file" for entry in ours] + [
        f"{where}: {path!r} does not exist"
        for path in (*feature.extra, *filter(None, [feature.benchmark]))
        if not (root / path).is_file()
    ]
