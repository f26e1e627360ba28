"""``python -m sgl_router.launch_router``: run the gateway."""

from __future__ import annotations

import json
import logging
import resource
import sys
from collections.abc import Sequence

import uvloop

from sgl_router.config import Settings, SettingsError, parse_settings
from sgl_router.server import StartError, serve

_LEVELS = {"warn": "WARNING"}


class _JsonFormatter(logging.Formatter):
    """Log records as one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(
            {
                "time": round(record.created, 3),
                "level": record.levelname.lower(),
                "event": "log",
                "message": record.getMessage(),
            }
        )


def set_up_logging(settings: Settings) -> None:
    """Send log lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonFormatter() if settings.log_json else plain)
    level = _LEVELS.get(settings.log_level, settings.log_level.upper())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("uvicorn").setLevel("WARNING")


def allow_open_files() -> None:
    """Raise the limit of open files to what the system allows: a stream needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway until it is told to stop; the exit code."""
    settings = parse_settings(sys.argv[1:] if arguments is None else arguments)
    set_up_logging(settings)
    allow_open_files()
    try:
        uvloop.run(serve(settings))
    except (StartError, SettingsError) as error:
        sys.stderr.write(f"python -m sgl_router.launch_router: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
