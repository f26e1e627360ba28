"""Every page: links lead somewhere, and what is named in them exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "python",
    "sgl-router",
    "patches",
    "scripts",
    "docker",
    "gateway-patch",
    "benchmark",
)
#: Flags of SGLang, Docker, pip and pytest that pages name.
FOREIGN_FLAGS = {
    "--api-key",
    "--attention-backend",
    "--base-gpu-id",
    "--build",
    "--chunked-prefill-size",
    "--device",
    "--disable-overlap-schedule",
    "--disable-radix-cache",
    "--dtype",
    "--enable-cache-report",
    "--enable-metrics",
    "--enable-unified-memory",
    "--help",
    "--host",
    "--index",
    "--mamba-full-memory-ratio",
    "--mamba-max-states-per-path",
    "--mamba-radix-cache-strategy",
    "--mamba-ssm-dtype",
    "--max-mamba-cache-size",
    "--max-running-requests",
    "--max-total-tokens",
    "--model-path",
    "--nnodes",
    "--port",
    "--profile",
    "--rm",
    "--sampling-backend",
    "--schedule-policy",
    "--tool-call-parser",
    "--tp-size",
    "--unidiff-zero",
    "--use-aliases",
    "--version",
    "--wait",
}

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```.*?^```|(?: {4}[^\n]*\n)+)", re.M | re.S)
_CODE = re.compile(r"`([^`\n]+)`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])")


def pages() -> list[Path]:
    """Every Markdown file of the repository."""
    skipped = {".venv", "build", "dist", "runs", "node_modules", ".pytest_cache"}
    return sorted(
        path
        for path in ROOT.rglob("*.md")
        if not skipped & set(path.relative_to(ROOT).parts)
    )


PAGES = pages()
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]


def anchors(page: Path) -> set[str]:
    """The ids that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def code(page: Path) -> Iterator[str]:
    """Fenced and indented blocks and code spans of a page."""
    text = page.read_text("utf-8")
    yield from _FENCE.findall(text)
    yield from _CODE.findall(_FENCE.sub("", text))


@cache
def own_text() -> str:
    """All our sources in one string."""
    kinds = {".py", ".sh", ".yaml", ".toml", ".patch", ".rs", ".json"}
    files = [p for s in SOURCES for p in (ROOT / s).rglob("*") if p.suffix in kinds]
    files.append(ROOT / "Makefile")
    return "\n".join(path.read_text("utf-8", errors="replace") for path in files)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    text = _CODE.sub("", _FENCE.sub("", page.read_text("utf-8")))
    for link in _LINK.findall(text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_flags_exist(page: Path) -> None:
    named = {flag for text in code(page) for flag in _FLAG.findall(text)}
    unknown = {
        flag
        for flag in named - FOREIGN_FLAGS
        if f'"{flag}"' not in own_text()
        and f" {flag}" not in own_text()
        and flag.removeprefix("--").replace("-", "_") not in own_text()
    }
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_modules_and_files_named_in_commands_exist(page: Path) -> None:
    for text in code(page):
        for module in re.findall(r"python -m ([\w.]+)", text):
            if module.split(".")[0] in (
                "sglang",
                "sglang_agent",
                "sgl_router",
                "patches",
            ):
                assert module == "sglang.launch_server" or module_exists(module), module
        for path in re.findall(
            r"(?:python |^|\s)((?:docker|scripts|benchmark)/[\w./-]+\.\w+)", text
        ):
            assert (ROOT / path).exists(), path


def module_exists(module: str) -> bool:
    parts = Path(*module.split("."))
    return any(
        (base / parts).with_suffix(".py").exists()
        or (base / parts / "__main__.py").exists()
        for base in (ROOT, ROOT / "python", ROOT / "sgl-router")
    )


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    for text in code(page):
        named = set(re.findall(r"^(?: {4})?make ([a-z][a-z-]*)", text, re.M))
        assert named - {"bench-"} <= targets


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_own_metrics_exist(page: Path) -> None:
    """Runner and gateway metrics are named as their sources name them."""
    sources = own_text()
    for text in code(page):
        for name in re.findall(r"\b(?:sglang_agent|smg)_[a-z_]+", text):
            bare = name.removesuffix("_total").removesuffix("_bucket")
            short = bare.removeprefix("sglang_agent_")
            if name.startswith("smg_rs") or f"{name}/" in text:
                continue
            known = (
                bare in sources
                or f'"{short}"' in sources
                or "consistent_hashing" in name
            )
            known = known or Path(ROOT / "python" / bare).exists()
            assert known, name


def test_every_page_can_be_reached() -> None:
    """From the README or the list of pages, by links."""
    seen: set[Path] = set()
    waiting = [ROOT / "README.md", ROOT / "docs/README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        for link in _LINK.findall(page.read_text("utf-8")):
            if not link.startswith("https://"):
                waiting.append((page.parent / link.partition("#")[0]).resolve())
    lost = [
        page
        for page in PAGES
        if page.is_relative_to(ROOT / "docs") and page not in seen
    ]
    assert not lost, [page.relative_to(ROOT).as_posix() for page in lost]


def test_pictures_show_what_the_pages_say() -> None:
    """The pages quote 5 and 9 trajectories, 13 and 7 requests."""
    import sys

    sys.path.insert(0, str(ROOT / "docs/concepts"))
    try:
        import pictures
    finally:
        sys.path.pop(0)
    (default,) = pictures.capacities([0.9])
    balanced = pictures.capacities([200 / (60_000 * 70 / 1024)])[0]
    assert int(min(default)) == 5
    assert [int(c) for c in balanced] == [9, 9]
    assert sorted(pictures.placements("lbch", 2, 20, "sample-7")[-1]) == [7, 13]
    assert sorted(pictures.placements("consistent_hashing", 4, 20, "sample-7")[-1]) == [
        0,
        0,
        0,
        20,
    ]


def test_the_recording_is_small_and_stands_alone() -> None:
    """A browser shows it without fetching anything; it ends with the report."""
    path = ROOT / "docs/pictures/demo.svg"
    assert path.stat().st_size < 150_000
    text = path.read_text("utf-8")
    assert re.findall(r"\w+://[^\s\"'<)]+", text)[0] == "http://www.w3.org/2000/svg"
    assert set(re.findall(r"(?:href=|url\()[\"']?([^\"')>]*)", text)) <= {
        f"#{name}" for name in re.findall(r'id="(\w+)"', text)
    }
    assert "<script" not in text
    pictures = ElementTree.fromstring(text).findall(".//*[@class='p']")
    last = {use.get("href", "") for use in pictures[-1]}
    rows = dict(re.findall(r'<g id="(r\d+)">(.*?)</g>', text))
    shown = re.sub("<[^>]*>", "", "".join(rows[href[1:]] for href in last))
    shown = shown.replace("\u00a0", " ")
    assert "32 completed, 0 failed" in shown
    assert not re.search(r"/(?:home|root|tmp|work)/", text)
