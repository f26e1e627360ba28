"""Command line of the patch tools; ``python -m patches.tools --help`` lists it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from patches.tools.errors import SeriesError
from patches.tools.pin import read_pin
from patches.tools.tree import apply_to, make_tree
from patches.tools.wheel import build_wheel, fetch


def _wheel(args: argparse.Namespace) -> None:
    print(build_wheel(args.output, args.python_tag))


def _tree(args: argparse.Namespace) -> None:
    make_tree(args.output, link=args.link, tag=args.python_tag, through=args.through)
    print(args.output)


def _fetch(args: argparse.Namespace) -> None:
    print(fetch(read_pin(), args.python_tag))


def _version(args: argparse.Namespace) -> None:
    print(read_pin().version)


def _apply(args: argparse.Namespace) -> None:
    for path in apply_to(args.tree):
        print(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python setup.py", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    def python_tag(sub: argparse.ArgumentParser) -> None:
        text = "cp311, cp312 or cp313 (default: the running interpreter's)"
        sub.add_argument("--python-tag", metavar="TAG", help=text)

    wheel = command("wheel", _wheel, "build the patched wheel")
    wheel.add_argument("--output", type=Path, default=Path("dist"), metavar="DIR")
    python_tag(wheel)

    tree = command("tree", _tree, "make or update a patched, unpacked tree")
    tree.add_argument("--output", type=Path, required=True, metavar="DIR")
    tree.add_argument("--link", action="store_true", help="link our files, not copy")
    tree.add_argument("--through", metavar="PATCH", help="stop after this patch")
    python_tag(tree)

    apply = command("apply", _apply, "patch an unpacked upstream wheel in place")
    apply.add_argument("--tree", type=Path, required=True, metavar="DIR")

    python_tag(command("fetch", _fetch, "download and verify the pinned wheel"))
    command("version", _version, "print the version of the patched wheel")
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
