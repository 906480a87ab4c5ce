"""How the ranks of several hosts come together: the head admits the other nodes, and each of those joins it."""

import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workers.config import NodesConfig, OnProgress, WorkerConfig
from workers.distributed.nodes import admission, interface, joining
from workers.errors import EXIT_OK, StartupError
from workers.protocol import max_output_bytes, max_step_bytes
from workers.rank_processes import RankProcess, end_ranks
from workers.worker.nodes.ending import Ending
from workers.worker.nodes.group_ranks import GroupRanks
from workers.worker.nodes.node_process import NodeProcess

_LEAST_BYTES = 1 << 20  # of the largest message between nodes, which may say where ranks are

Facts = Mapping[str, Mapping[str, Any]]


def gather(
    config: WorkerConfig,
    nodes: NodesConfig,
    facts: Facts,
    on_progress: OnProgress,
    ahead: Sequence[RankProcess],
    on_leave: Callable[[], None],
) -> GroupRanks:
    """On the head: the ranks of all nodes, once these have joined. Takes over `ahead`, rank processes that run already.

    `config` is resolved, `facts` are those of `workers.fingerprint.node_facts`. Raises `StartupError`.
    """
    try:
        listener = interface.listen(nodes)
        address = str(listener.getsockname()[0])
        where = f" at {address}, port {nodes.port}"
        links = admission.admit(listener, nodes, facts, _waiting(on_progress, nodes, where), max_message_bytes(config))
    except BaseException:
        end_ranks(ahead)
        raise
    return GroupRanks(config, links.values(), address, ahead, on_leave)


def take_part(
    config: WorkerConfig,
    nodes: NodesConfig,
    facts: Facts,
    on_phase: OnProgress,
    ahead: Sequence[RankProcess],
    stop_fd: int,
) -> int:
    """On another node: join the head, run this node's ranks until it ends them, and return the exit code.

    Arguments as of `gather`; `stop_fd` as of `NodeProcess`. Raises `StartupError` when the group does not start.
    """
    try:
        waiting = _waiting(on_phase, nodes, stop_fd=stop_fd)
        link = joining.join(nodes, facts, waiting, max_message_bytes(config))
    except _StoppedError:
        end_ranks(ahead)
        return EXIT_OK
    except BaseException:
        end_ranks(ahead)
        raise
    ending: Ending = NodeProcess(config, nodes.node_rank, link, ahead, on_phase, stop_fd).run()
    if ending.fix:
        raise StartupError(ending.cause, ending.fix, ending.exit_code)
    return ending.exit_code


def max_message_bytes(config: WorkerConfig) -> int:
    """Of one message on a link."""
    return max(max_step_bytes(config), max_output_bytes(config), _LEAST_BYTES)


class _StoppedError(Exception):
    """The operator wants this node to stop while it waits for the others."""


def _waiting(
    on_progress: OnProgress, nodes: NodesConfig, where: str = "", stop_fd: int | None = None
) -> Callable[[str], None]:
    """What is called once a second, with whom this node waits for."""
    deadline = time.monotonic() + nodes.timeout_s

    def on_waiting(text: str) -> None:
        if stop_fd is not None and select.select([stop_fd], [], [], 0)[0]:
            raise _StoppedError
        left = max(0.0, deadline - time.monotonic())
        on_progress("waiting for nodes", 0.0, f"{text}{where}, {left:.0f} s left")

    return on_waiting
