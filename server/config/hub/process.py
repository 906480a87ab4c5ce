"""The process that fetches a model: `python -m server.config.hub.process --fd N`, started by `download.py`.

The first line on the socket says what is wanted; back come lines of progress, and how it ended. The end of the socket,
which comes whatever becomes of the parent, ends the process at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.errors import StartupError


def main(argv: Sequence[str]) -> NoReturn:
    """Threads that still wait for the network must not hold the process up: it leaves without them."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to everybody; the parent decides
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="server.config.hub.process")
    parser.add_argument("--fd", type=int, required=True)
    sock = socket.socket(fileno=parser.parse_args(argv).fd)
    with sock.makefile("rb") as lines:
        asked = lines.readline()
    threading.Thread(target=_leave_with_parent, args=(sock,), daemon=True).start()
    try:
        _say(sock, kind="done", directory=_fetch(sock, asked))
    except StartupError as error:
        _say(sock, kind="failed", cause=error.cause, fix=error.fix, exit_code=error.exit_code)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _fetch(sock: socket.socket, asked: bytes) -> str:
    from server.config.hub.download import (
        HubModel,  # slow to import: by now signals are ignored and the parent is watched
    )
    from server.config.hub.fetch import fetch

    def report(phase: str, fraction: float, detail: str) -> None:
        _say(sock, kind="progress", phase=phase, fraction=fraction, detail=detail)

    return fetch(HubModel.from_json(asked), report)


def _say(sock: socket.socket, **message: Any) -> None:
    try:
        sock.sendall(json.dumps(message).encode() + b"\n")
    except OSError:  # nobody listens any more
        os._exit(0)


def _leave_with_parent(sock: socket.socket) -> None:
    try:
        sock.recv(1)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
