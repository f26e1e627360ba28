"""Refuses a port that is taken before a model is loaded; light to import."""

from __future__ import annotations

import argparse
import errno
import socket


def find_problem(host: str, port: int) -> str | None:
    """Return what is wrong with listening on ``host`` and ``port``, else None.

    Only a taken port is a problem here; anything else is left to the server.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the server does: connections that are closing do not block a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"--port: {port} is in use on {host}; stop its owner or choose another"
            )
    return None


def exit_on_problem(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command line with one line and status 2 when the port is taken.

    Without this the server loads the model first, then logs the error and stays.
    Only the first node listens.
    """
    problem = find_problem(args.host, args.port) if args.node_rank == 0 else None
    if problem is not None:
        parser.exit(2, f"{parser.prog}: error: {problem}\n")
