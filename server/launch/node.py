"""`oarlock serve` on a host that is not the head node: it serves no HTTP, but finds the model and runs its ranks.

The first SIGTERM or Ctrl-C ends the whole group in order, a second one ends this process at once with 128 + its number.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType

from oarlock.server.config.settings import Settings
from oarlock.server.launch.banner import Progress
from oarlock.server.launch.child_process import signals_handled
from oarlock.server.llm.tokenizer import find_files
from oarlock.server.observability import logs
from oarlock.workers.config import NodesConfig
from oarlock.workers.node import check_network, run_node

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logs.logger("node")


def serve_node(settings: Settings, nodes: NodesConfig) -> int:
    """Run this host's ranks. Returns the exit code. Raises `StartupError` if the start fails."""
    logs.configure(settings.log_level, settings.log_format)
    progress = Progress(as_events=settings.log_format == "json")
    try:
        check_network(nodes, progress)
        model = asyncio.run(find_files(settings, progress)).model
        with _stop_fd() as stop_fd:
            config = settings.engine_config(model, nodes).worker
            return run_node(config, nodes, progress, stop_fd=stop_fd)
    finally:
        progress.finish()
        _log.info(logs.event("stopped", node=nodes.node_rank))


def wait_for_first() -> int:
    """Wait for the first process that torchrun has started on this host, which runs all ranks there. torchrun ends when
    all processes have. Signals are left to that first process."""
    import psutil

    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for sibling in psutil.Process(os.getppid()).children():
        with suppress(psutil.Error):
            if sibling.environ().get("LOCAL_RANK") == "0":
                sibling.wait()
    return 0


@contextmanager
def _stop_fd() -> Generator[int]:
    """Yield a descriptor that becomes readable with the first signal. The second signal ends the process."""
    read_fd, write_fd = os.pipe()
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if stopped:
            sys.stderr.write("stopped immediately by a second signal\n")
            sys.stderr.flush()
            os._exit(128 + number)  # the ranks end with this process
        stopped.append(number)
        os.write(write_fd, b"s")

    try:
        with signals_handled(_SIGNALS, stop):
            yield read_fd
    finally:
        os.close(read_fd)
        os.close(write_fd)
