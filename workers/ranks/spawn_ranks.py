"""Spawning of rank processes with their arguments, collective memory and rendezvous, for serving and `verify`.

Torch-free. Does not know the purpose of the processes.
"""

import contextlib
import importlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from oarlock.base.python_child import die_with_parent, leave_signals_to_parent
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.shm_layout import Flags, total_bytes
from oarlock.workers.distributed.shm_ring import ChannelClosedError, RingLayout, anonymous_memory
from oarlock.workers.distributed.topology import STATUS_BYTES, RendezvousInfo, StageRing, StoreAddress
from oarlock.workers.rank_processes import RankProcess, end_ranks, start_ranks
from oarlock.workers.ranks.cpu_affinity import ranks_share_cores

_IMPORT = "import"  # message with the name of a module
_COLLECTIVE_BUFFER_BYTES = 4 << 20  # longer tensors are reduced in pieces
_COLLECTIVE_TIMEOUT_S = 3600.0  # minimum; the parent ends a waiting rank long before


@dataclass(frozen=True, slots=True)
class RankArguments:
    """The first message to a rank process. The descriptors that it names come with it."""

    rendezvous: RendezvousInfo
    config: WorkerConfig
    extra: dict[str, Any] = field(default_factory=dict)  # further arguments of this kind of rank process

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    @property
    def local_rank(self) -> int:
        """Index of this rank among the ranks of its host."""
        return self.rendezvous.topology.local_rank(self.rank)

    @staticmethod
    def receive(control: Control) -> "RankArguments":
        """Wait for the arguments. Raises `ChannelClosedError` if the parent has ended.

        Before them, the parent may name a module to import while it prepares them.
        """
        while (fields := control.recv())["kind"] == _IMPORT:
            with contextlib.suppress(Exception):  # who needs the module imports it as well, and reports the failure
                importlib.import_module(fields["module"])
        return RankArguments(
            RendezvousInfo.from_fields(fields["rendezvous"]), WorkerConfig(**fields["config"]), fields["extra"]
        )


def import_early(ranks: Iterable[RankProcess], module: str) -> None:
    """Let `ranks`, which have no arguments yet, import `module` in parallel with this process."""
    for rank in ranks:
        with contextlib.suppress(ChannelClosedError):  # whoever sends it the arguments reports that it has ended
            rank.control.send(_IMPORT, module=module)


@dataclass(frozen=True, slots=True)
class RankRings:
    """One rank's ends of both rings: steps to read and, for the answering rank, outputs to write."""

    step_memory_fd: int
    step_wake_fd: int
    step_layout: dict[str, int]
    output_memory_fd: int
    output_wake_fd: int | None  # None except for the answering rank
    output_layout: dict[str, int]
    kv_report_fd: int | None = None  # pipe of all ranks to the engine; None: no KV blocks outside the pool


@dataclass(frozen=True, slots=True)
class NodePosition:
    """This host's position among the nodes, and the store in which its ranks meet the ranks of other hosts."""

    node: int = 0
    interface: str | None = None  # this host's interface for traffic between hosts; None if there is one host
    store: StoreAddress | None = None


THE_ONLY_NODE = NodePosition()


class SpawnedRanks(NamedTuple):
    """Processes and channels in rank order. The caller must end and close them, for example with `end`."""

    processes: list[subprocess.Popen[bytes]]
    controls: list[Control]
    collectives: Flags

    def end(self) -> None:
        """Kill the processes, and close everything."""
        end_ranks(map(RankProcess, self.processes, self.controls))
        self.collectives.close()


def begin(argv: list[str]) -> Control:
    """Begin any kind of rank process. It ends with its parent and leaves signals to it. `argv`: command line
    arguments."""
    parent_pid, control_fd = map(int, argv)
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    return Control.from_fd(control_fd)


def spawn_ranks(
    module: str,
    config: WorkerConfig,
    extras: Sequence[dict[str, Any]],
    ahead: Sequence[RankProcess] = (),
    position: NodePosition = THE_ONLY_NODE,
) -> SpawnedRanks:
    """Start one process for each rank of `config` on this host, with its arguments. `extras`: `RankArguments.extra` of
    each rank.

    `ahead`: processes that already run `module`; only the others are started. If anything fails, all of them are ended.
    """
    size = config.ranks_per_node
    assert len(ahead) <= size == len(extras)
    ranks = list(ahead)
    with contextlib.ExitStack() as given:  # the ranks get their own descriptors
        memory_fd = anonymous_memory(total_bytes(size, _COLLECTIVE_BUFFER_BYTES))
        given.callback(os.close, memory_fd)
        store_fd = anonymous_memory(0)
        given.callback(os.close, store_fd)
        rings = _stage_rings(config, given)
        try:
            ranks += start_ranks(size - len(ahead), module)
            for number, extra in enumerate(extras):
                before, after = rings.get(number - config.tensor_parallel_size), rings.get(number)
                rendezvous = RendezvousInfo(
                    rank=position.node * size + number,
                    size=size * config.nnodes,
                    memory_fd=memory_fd,
                    buffer_bytes=_COLLECTIVE_BUFFER_BYTES,
                    # Longer than the parent's timeout: it sees all ranks and can report which one hangs.
                    timeout_s=max(config.step_timeout_s, _COLLECTIVE_TIMEOUT_S),
                    shares_cores=ranks_share_cores(config),
                    pipeline_parallel_size=config.pipeline_parallel_size,
                    nnodes=config.nnodes,
                    row_bytes=_row_bytes(config),
                    store_fd=store_fd,
                    store=position.store,
                    interface=position.interface,
                    from_stage=before and before[0],
                    to_stage=after and after[1],
                )
                with contextlib.suppress(ChannelClosedError):  # it has ended, which reading its messages shows
                    ranks[number].control.send("arguments", **asdict(RankArguments(rendezvous, config, extra)))
            collectives = Flags(memory_fd, size)
        except BaseException:
            end_ranks(ranks)
            raise
    return SpawnedRanks([rank.process for rank in ranks], [rank.control for rank in ranks], collectives)


def _stage_rings(config: WorkerConfig, given: contextlib.ExitStack) -> dict[int, tuple[dict, dict]]:
    """Return rank of this host -> (reading end, writing end) of its ring to its peer in the next stage, if that is on
    this host too."""
    rings = {}
    tokens = -(-config.max_num_batched_tokens // config.tensor_parallel_size)
    num_bytes = STATUS_BYTES + _row_bytes(config) * tokens
    for number in range(config.ranks_per_node - config.tensor_parallel_size):
        layout = RingLayout.holding(num_bytes, 1, config.pipeline_parallel_size)
        memory_fd, (read_fd, write_fd) = anonymous_memory(layout.total_bytes), os.pipe()
        for fd in (memory_fd, read_fd, write_fd):
            given.callback(os.close, fd)
        reading, writing = (asdict(StageRing(memory_fd, fd, layout.to_fields())) for fd in (read_fd, write_fd))
        rings[number] = reading, writing
    return rings


def _row_bytes(config: WorkerConfig) -> int:
    """Return the bytes of a token's hidden state."""
    return config.hidden_size * (4 if config.dtype == "float32" else 2)


def describe_exit(status: int) -> str:
    """Describe the end of a process with this `returncode`."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
