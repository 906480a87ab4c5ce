"""What a rank must know to form process groups with the other ranks, those of other hosts included. Torch-free."""

from dataclasses import dataclass, field

from workers.distributed.topology import Topology

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """How ranks find each other. Nothing listens but on the two addresses, and nothing has a name on disk.

    On one host both are the loopback address. On several, the head's process that starts rank 0 binds the listener to
    the address of its interface, makes the token, and tells the other nodes that address, the port and the token.
    """

    rank: int  # among all ranks of all hosts
    size: int  # all ranks
    port: int  # of rank 0's store
    listen_fd: int | None  # rank 0 only: the socket already bound to `address` and `port`
    memory_fd: int  # shared memory of all ranks of this node, those of several stages too: `shm_layout.total_bytes`
    buffer_bytes: int  # of each input buffer in that memory
    timeout_s: float  # of every wait for another rank
    shares_cores: bool  # there are fewer cores than ranks of this node
    pipeline_parallel_size: int = 1
    nnodes: int = 1
    address: str = LOOPBACK  # of rank 0's store, a number
    local_address: str = LOOPBACK  # of this node, a number: what this rank itself listens on
    token: str = field(
        default="", repr=False
    )  # known to these ranks alone, fresh at each start: they prove it to each other

    @property
    def topology(self) -> Topology:
        stages = self.pipeline_parallel_size
        return Topology(self.size // stages, stages, self.nnodes)
