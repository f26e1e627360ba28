"""Builds, checks and changes the patched distribution."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from patches.tools.check import check_exact, check_form
from patches.tools.diff import FIELDS
from patches.tools.edit import drop_patch, edit_patch, new_patch, refresh_all
from patches.tools.errors import SeriesError
from patches.tools.move import move_series
from patches.tools.pin import read_pin
from patches.tools.render_pr import render_features
from patches.tools.series import load_series
from patches.tools.tree import apply_to, make_tree
from patches.tools.upstream import lines, report_upstream
from patches.tools.wheel import build_wheel, fetch

Command = Callable[[argparse.Namespace], None]


def _wheel(args: argparse.Namespace) -> None:
    print(build_wheel(args.output, args.python_tag))


def _tree(args: argparse.Namespace) -> None:
    make_tree(args.output, link=args.link, tag=args.python_tag, through=args.through)
    print(args.output)


def _apply(args: argparse.Namespace) -> None:
    for path in apply_to(args.tree):
        print(path)


def _fetch(args: argparse.Namespace) -> None:
    print(fetch(read_pin(), args.python_tag))


def _version(args: argparse.Namespace) -> None:
    print(read_pin().version)


def _check(args: argparse.Namespace) -> None:
    problems = check_form()
    if args.upstream and not problems:
        problems = check_exact(tag=args.python_tag)
    if problems:
        raise SeriesError("\nerror: ".join(problems))


def _new(args: argparse.Namespace) -> None:
    values = (args.subject, args.reason, args.forwarded, args.remove_when)
    new_patch(args.patch, args.tree, tuple(zip(FIELDS, values, strict=True)), args.file)


def _refresh(args: argparse.Namespace) -> None:
    if args.patch is None:
        refresh_all()
    elif args.tree is None:
        _parser().error("refresh PATCH needs --tree, the tree with the edit")
    else:
        edit_patch(args.patch, args.tree, args.file)


def _drop(args: argparse.Namespace) -> None:
    drop_patch(args.patch)


def _render(args: argparse.Namespace) -> None:
    for path in render_features(args.output, tag=args.python_tag, alone=args.alone):
        print(path)


def _upstream(args: argparse.Namespace) -> None:
    report = report_upstream(args.version, tag=args.python_tag)
    print(*lines(report), sep="\n")
    if not report.clean:
        raise SeriesError(f"the series needs work for {args.version}")


def _move(args: argparse.Namespace) -> None:
    reports = move_series(args.version, tag=args.python_tag)
    for report in reports:
        if report.state == "look":
            print(f"look at {report.name}")
    print(f"{len(reports)} patches and upstream.toml are written for {args.version}")


def _stats(args: argparse.Namespace) -> None:
    patches = load_series()
    lines: Counter[str] = Counter()
    for patch in patches:
        lines[patch.feature] += patch.inserted_lines
    files = {file.path for patch in patches for file in patch.files}
    for feature, count in lines.items():
        number = sum(patch.feature == feature for patch in patches)
        print(f"{feature}: {number} patches, {count} lines")
    print(f"all: {len(patches)} patches, {lines.total()} lines, {len(files)} files")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python setup.py", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    def folder(sub: argparse.ArgumentParser, name: str, default: str | None) -> None:
        value = Path(default) if default else None
        sub.add_argument(
            name, type=Path, metavar="DIR", default=value, required=value is None
        )

    def python_tag(sub: argparse.ArgumentParser) -> None:
        text = "cp311, cp312 or cp313 (default: the running interpreter's)"
        sub.add_argument("--python-tag", metavar="TAG", help=text)

    def files(sub: argparse.ArgumentParser) -> None:
        text = "only this path below sglang/; repeatable (default: all that differ)"
        sub.add_argument(
            "--file", action="append", default=[], metavar="PATH", help=text
        )

    sub = command("wheel", _wheel, "build the patched wheel")
    folder(sub, "--output", "dist")
    python_tag(sub)

    sub = command("tree", _tree, "make or update a patched, unpacked tree")
    folder(sub, "--output", None)
    sub.add_argument("--link", action="store_true", help="link our files, not copy")
    text = "stop after this patch; 'none' applies none"
    sub.add_argument("--through", metavar="PATCH", help=text)
    python_tag(sub)

    folder(command("apply", _apply, "patch an unpacked wheel in place"), "--tree", None)
    python_tag(command("fetch", _fetch, "download and verify the pinned wheel"))
    command("version", _version, "print the version of the patched wheel")

    sub = command("check", _check, "check list, order, headers and form of the series")
    text = "also check hashes, exact application and byte-identical export"
    sub.add_argument("--upstream", action="store_true", help=text)
    python_tag(sub)

    sub = command("new", _new, "export the edits of a tree as a new patch")
    sub.add_argument("patch", metavar="FEATURE/NAME.patch")
    folder(sub, "--tree", None)
    sub.add_argument("--subject", required=True, help="'FEATURE: what it does'")
    sub.add_argument("--reason", required=True, help="why it must be a patch")
    sub.add_argument("--forwarded", default="no", help="no, not-needed or a link")
    sub.add_argument("--remove-when", required=True, help="what would remove it")
    files(sub)

    sub = command("refresh", _refresh, "export one edited patch, or all, anew")
    sub.add_argument("patch", nargs="?", metavar="FEATURE/NAME.patch")
    sub.add_argument("--tree", type=Path, metavar="DIR", help="made --through PATCH")
    files(sub)

    sub = command("drop", _drop, "take a patch out and move the later ones up")
    sub.add_argument("patch", metavar="FEATURE/NAME.patch")

    sub = command("render", _render, "render one git-am patch per feature")
    folder(sub, "--output", "build/pr-patches")
    text = "make each patch apply without the others, not on top of them"
    sub.add_argument("--alone", action="store_true", help=text)
    python_tag(sub)

    for name, run, text in (
        (
            "upstream",
            _upstream,
            "report what another upstream version would do to the series",
        ),
        ("move", _move, "move series and pin to another upstream version"),
    ):
        sub = command(name, run, text)
        sub.add_argument("--version", required=True, help="such as 0.5.24")
        python_tag(sub)

    command("stats", _stats, "count patches and inserted lines")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 1 when a check fails, 2 when the command line is wrong."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except SeriesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
