"""Drawing a recorded terminal, from screens made by hand."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from .deploy_files import load_script

demo = load_script("record_demo")


@dataclass(frozen=True)
class Cell:
    """What the terminal emulator keeps of one place on the screen."""

    data: str = " "
    fg: str = "default"
    bold: bool = False


def line(*cells: Cell) -> list[Cell]:
    return [*cells, *[Cell()] * (demo.COLUMNS - len(cells))]


def test_neighbours_of_one_style_are_one_run_without_blanks_around() -> None:
    words = [Cell(c) for c in "  a b "] + [Cell(c, "red", bold=True) for c in "cd"]
    assert list(demo.runs(line(*words))) == [
        (2, "a b", ""),
        (6, "cd", f'fill="{demo.COLOURS["red"]}" font-weight="bold"'),
    ]
    assert list(demo.runs(line())) == []
    full = [Cell("x", "ff0000")] * demo.COLUMNS
    assert list(demo.runs(full)) == [(0, "x" * demo.COLUMNS, 'fill="#ff0000"')]


def test_equal_lines_are_kept_once_and_text_is_escaped() -> None:
    one, two = ((0, "<a> & b", ""),), ((3, "two", ""),)
    text = demo.draw([[one, ()], [one, two]])
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert [t.text for t in root.iter(f"{space}text")] == ["<a>\xa0&\xa0b", "two"]
    pictures = root.findall(".//*[@class='p']")
    assert [[use.get("href") for use in p] for p in pictures] == [
        ["#r0"],
        ["#r0", "#r1"],
    ]
    assert pictures[1][1].get("y") == str(demo.CELL_H)


def test_pictures_follow_each_other_and_the_last_one_stays_longest() -> None:
    css = re.search("<style>(.*)</style>", demo.draw([[], [], []]))
    assert css is not None
    starts = re.findall(r"([\d.]+)%\{visibility:visible\}", css.group(1))
    total = 2 * demo.STEP_S / 4 + demo.LAST_S
    wanted = [100 * n * demo.STEP_S / 4 / total for n in range(3)]
    assert [float(s) for s in starts] == [round(w, 2) for w in wanted]
    assert "#p2{visibility:visible}" in css.group(1)  # where nothing moves


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = demo.Recording(((0.5, "a\r\n"), (1.25, "\x1b[1mä")))
    made.write(tmp_path / "new/demo.cast")
    assert demo.Recording.read(tmp_path / "new/demo.cast") == made


def test_a_command_is_recorded_on_a_terminal_of_the_given_size() -> None:
    program = "import os; print(os.isatty(1), *os.get_terminal_size(), 'ü')"
    made = demo.record([sys.executable, "-c", program])
    text = "".join(part for _, part in made.events)
    assert text == f"True {demo.COLUMNS} {demo.ROWS} ü\r\n"
