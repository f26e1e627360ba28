"""``python -m sglang.virtual_worker``: one real scheduler on virtual time.

Reads commands from standard input and writes replies to standard output, one JSON
object a line (:mod:`sglang.virtual.protocol`); logs go to standard error. With
``--fork``, standard input is instead a Unix socket: every descriptor received over
it becomes the stream of a worker in a forked child, so that the slow import happens
once for many workers. The process exits when its input ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import traceback
from contextlib import ExitStack
from typing import BinaryIO

from sglang.virtual import protocol
from sglang.virtual.protocol import Advance, Failed, Reply, Start, Stop


class _Session:
    """The commands of one worker, in order."""

    def __init__(self, cleanup: ExitStack) -> None:
        self._cleanup = cleanup
        self._engine = None

    def handle(self, command: protocol.Command) -> Reply:
        """Do one command."""
        if isinstance(command, Start):
            return self._start(command)
        engine = self._engine
        if engine is None:
            raise ValueError(f"{type(command).__name__.lower()}: start must come first")
        if isinstance(command, Advance):
            return engine.advance(command.until_ns, command.requests, command.forget)
        if isinstance(command, Stop):
            engine.check_idle()
        return engine.statistics()

    def _start(self, command: Start) -> Reply:
        if command.version != protocol.PROTOCOL_VERSION:
            raise ValueError(
                f"version: {command.version}; allowed: {protocol.PROTOCOL_VERSION}"
            )
        if self._engine is not None:
            raise ValueError("start: the worker has been started already")
        from sglang.virtual.engine import VirtualEngine

        self._engine = VirtualEngine(command.config, self._cleanup)
        return self._engine.ready()


def serve(reader: BinaryIO, writer: BinaryIO) -> int:
    """Answer commands until ``stop``, the end of the input, or an error."""
    with ExitStack() as cleanup:
        session = _Session(cleanup)
        for line in reader:
            try:
                command = protocol.decode_command(line)
                reply = session.handle(command)
            except Exception as error:
                reply = Failed(
                    error=f"{type(error).__name__}: {error}",
                    traceback=traceback.format_exc(),
                )
            writer.write(protocol.encode(reply) + b"\n")
            writer.flush()
            if isinstance(reply, Failed):
                return 1
            if isinstance(command, Stop):
                return 0
    return 0


def serve_forks(control: socket.socket) -> int:
    """Fork a worker for every descriptor that arrives on ``control``."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return 0
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with socket.socket(fileno=descriptors[0]) as stream:
                status = serve(stream.makefile("rb"), stream.makefile("wb"))
            # The parent's exit handlers are not the child's to run.
            sys.stderr.flush()
            os._exit(status)
        os.close(descriptors[0])


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.virtual_worker",
        description="One real SGLang scheduler on virtual time, over a null model.",
    )
    parser.add_argument(
        "--fork",
        action="store_true",
        help="standard input is a Unix socket that hands over one descriptor per worker",
    )
    options = parser.parse_args(arguments)
    # Whatever prints must not end up between two replies.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from sglang.virtual.boot import prepare_process

    prepare_process()
    if options.fork:
        return serve_forks(socket.socket(fileno=os.dup(0)))
    return serve(sys.stdin.buffer, output)


if __name__ == "__main__":
    sys.exit(main())
