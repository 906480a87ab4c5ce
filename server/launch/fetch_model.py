"""The process that fetches a model from the hub: `python -m oarlock.server.launch.fetch_model --fd N`.

Started by `server/hub/model_path.py`. The first line on the socket is the request; lines with the progress and the
outcome go back. When the parent ends, the socket is closed, which ends this process.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from oarlock.base.errors import StartupError


def main(argv: Sequence[str]) -> NoReturn:
    """Fetch and exit, without waiting for threads that still wait for the network."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all its processes; the parent decides
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="oarlock.server.launch.fetch_model")
    parser.add_argument("--fd", type=int, required=True)
    sock = socket.socket(fileno=parser.parse_args(argv).fd)
    with sock.makefile("rb") as lines:
        request = lines.readline()
    threading.Thread(target=_leave_with_parent, args=(sock,), daemon=True).start()
    try:
        _send(sock, kind="done", directory=_fetch(sock, request))
    except StartupError as error:
        _send(sock, kind="failed", cause=error.cause, fix=error.fix, exit_code=error.exit_code)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _fetch(sock: socket.socket, request: bytes) -> str:
    # Slow to import: by now signals are ignored and the parent is watched.
    from oarlock.server.hub.fetch import fetch
    from oarlock.server.hub.model_path import HubModel
    from oarlock.server.llm.pooler_config import PoolerConfig
    from oarlock.server.llm.tokenizer import Tokenizer

    def report(phase: str, fraction: float, detail: str) -> None:
        _send(sock, kind="progress", phase=phase, fraction=fraction, detail=detail)

    wanted = HubModel.from_json(request)

    def check(directory: Path) -> None:
        Tokenizer.load(wanted.tokenizer or directory, wanted.chat_template).close()
        if not wanted.tokenizer_only:
            PoolerConfig.load(directory, wanted.runner)

    return fetch(wanted, report, check)


def _send(sock: socket.socket, **message: Any) -> None:
    try:
        sock.sendall(json.dumps(message).encode() + b"\n")
    except OSError:  # the parent has ended
        os._exit(0)


def _leave_with_parent(sock: socket.socket) -> None:
    try:
        sock.recv(1)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
