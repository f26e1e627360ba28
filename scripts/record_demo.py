"""Record ``make demo`` on a terminal and draw it as a small animated SVG.

    make demo-picture                                      # runs the demo, then draws it
    python scripts/record_demo.py --cast build/demo.cast    # draws an older recording

Writes ``docs/pictures/demo.svg`` and, after a run, the run's completion curve beside it.
The recording is an asciicast (version 2) in ``build/``. Nothing in the picture is made
up: it shows the program's own output, with the checkout's folder written as ``.``. Where
the screen changes it shows one picture for every two seconds, for half a second each; a
wait is one picture.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import html
import importlib
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
EMULATOR = ("pyte==0.8.2", "wcwidth==0.9.4")
COLUMNS, ROWS = 110, 46
CELL_W, CELL_H, MARGIN = 8.4, 17, 12
STEP_S = 2.0
"""Seconds of the recording between two pictures, shown for a quarter of that."""
LAST_S = 10.0
"""How long the last picture stays, in seconds."""
COLOURS = {
    "red": "#f7768e",
    "green": "#9ece6a",
    "brown": "#e0af68",
    "blue": "#7aa2f7",
    "magenta": "#bb9af7",
    "cyan": "#7dcfff",
    "white": "#c0caf5",
    "brightblack": "#787c99",
}
NO_BREAK = "\u00a0"  # SVG would collapse several spaces
INK, PAPER = "#c0caf5", "#1a1b26"

Row = tuple[tuple[int, str, str], ...]
"""The runs of one line of the screen: column, text, attributes of the SVG element."""


@dataclass(frozen=True)
class Recording:
    """What a terminal was sent: seconds since the start, text."""

    events: tuple[tuple[float, str], ...]

    def write(self, path: Path) -> None:
        head = {"version": 2, "width": COLUMNS, "height": ROWS}
        lines = [json.dumps(head)]
        lines += [json.dumps([round(at, 3), "o", text]) for at, text in self.events]
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", "utf-8")

    @classmethod
    def read(cls, path: Path) -> Recording:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[1:]]
        return cls(tuple((at, text) for at, kind, text in rows if kind == "o"))


def record(command: Sequence[str]) -> Recording:
    """Run a command on a terminal of its own; raises SystemExit when it fails."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    started = time.monotonic()
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, cwd=ROOT)
    os.close(its)
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    events = []
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # how a terminal says that its last user has left
            break
        sys.stdout.write(text := decode(data))
        sys.stdout.flush()
        at = time.monotonic() - started
        events.append((at, text.replace(f"{ROOT}/", "./")))
    if process.wait():
        raise SystemExit(f"record_demo: exit status {process.returncode}")
    return Recording(tuple(events))


def emulator() -> Any:
    """The terminal emulator, installed into build/ the first time."""
    folder = ROOT / "build" / "record"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), *EMULATOR], check=True)
    sys.path.append(str(folder))
    return importlib.import_module("pyte")


def screens(recording: Recording) -> Iterator[list[Row]]:
    """The screen every ``STEP_S`` seconds in which it changed, and at the end."""
    pyte = emulator()
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    due, shown = 0.0, rows(screen)
    for at, text in recording.events:
        if at >= due and (now := rows(screen)) != shown:
            yield (shown := now)
            due = at + STEP_S
        stream.feed(text)
    yield rows(screen)


def rows(screen: Any) -> list[Row]:
    return [tuple(runs(screen.buffer[number])) for number in range(ROWS)]


def runs(line: Any) -> Iterator[tuple[int, str, str]]:
    """Neighbouring cells of one style, without the blanks around them."""
    start = 0
    styles = [style(line[column]) for column in range(COLUMNS)]
    for column in range(1, COLUMNS + 1):
        if column < COLUMNS and styles[column] == styles[start]:
            continue
        text = "".join(line[number].data for number in range(start, column))
        if text.strip():
            blank = len(text) - len(text.lstrip())
            yield start + blank, text.strip(), styles[start]
        start = column


def style(cell: Any) -> str:
    colour = COLOURS.get(cell.fg) or (f"#{cell.fg}" if len(cell.fg) == 6 else "")
    words = [f'fill="{colour}"'] if colour and colour != INK else []
    words += ['font-weight="bold"'] if cell.bold else []
    return " ".join(words)


def draw(pictures: Sequence[list[Row]]) -> str:
    """One SVG that shows the pictures in turn, for ever; equal lines are kept once."""
    known: dict[Row, int] = {}
    groups = []
    for number, picture in enumerate(pictures):
        uses = []
        for y, row in enumerate(picture):
            if row:
                key = known.setdefault(row, len(known))
                uses.append(f'<use href="#r{key}" y="{y * CELL_H}"/>')
        groups.append(f'<g class="p" id="p{number}">{"".join(uses)}</g>')
    lines = [f'<g id="r{key}">{_texts(row)}</g>' for row, key in known.items()]
    width, height = COLUMNS * CELL_W + 2 * MARGIN, ROWS * CELL_H + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {width:g} {height:g}">',
            "<title>make demo, recorded</title>",
            f"<style>{_timing(len(pictures))}</style>",
            f"<defs>{''.join(lines)}</defs>",
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
            f'<g transform="translate({MARGIN} {MARGIN})">',
            *groups,
            "</g></svg>",
        ]
    )


def _texts(row: Row) -> str:
    """Each run has its width given, so that columns align in any monospaced font."""
    return "".join(
        f'<text x="{column * CELL_W:g}" y="{CELL_H - 4}" '
        f'textLength="{len(text) * CELL_W:g}"{" " * bool(look)}{look}>'
        f"{html.escape(text, quote=False).replace(' ', NO_BREAK)}</text>"
        for column, text, look in row
    )


def _timing(count: int) -> str:
    """CSS that shows picture after picture; without animation the last one stays."""
    each = STEP_S / 4
    total = each * (count - 1) + LAST_S
    font = "14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    rules = [
        f"svg{{font:{font};fill:{INK}}}",
        f".p{{visibility:hidden}}#p{count - 1}{{visibility:visible}}",
        "@media (prefers-reduced-motion:no-preference){",
    ]
    for number in range(count):
        first, last = (100 * n * each / total for n in (number, number + 1))
        steps = "0%{visibility:hidden}" if number else ""
        steps += f"{first:.2f}%{{visibility:visible}}"
        if number < count - 1:
            steps += f"{last:.2f}%{{visibility:hidden}}"
        rules.append(
            f"@keyframes k{number}{{{steps}}}"
            f"#p{number}{{animation:k{number} {total:g}s step-end infinite}}"
        )
    return "".join([*rules, "}"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--cast", type=Path, metavar="FILE", help="draw this recording; run nothing"
    )
    cast = parser.parse_args(argv).cast
    if cast is None:
        cast = ROOT / "build" / "demo.cast"
        record(["make", "--no-print-directory", "demo"]).write(cast)
        newest = max((ROOT / "runs").glob("demo-*"), key=lambda p: p.stat().st_mtime)
        curve = newest / "plots" / "completion.png"
        shutil.copyfile(curve, PICTURES / "demo-completion.png")
    text = draw(list(screens(Recording.read(cast))))
    (PICTURES / "demo.svg").write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
