"""What a rank must know to form a process group with the other ranks of its host. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """How the ranks of one host find each other. Nothing listens beyond loopback and nothing has a name on disk."""

    rank: int
    size: int
    port: int  # of rank 0's store, on 127.0.0.1
    listen_fd: int | None  # rank 0 only: the socket already bound to `port`
    memory_fd: int  # shared memory for CPU collectives
    buffer_bytes: int  # of each input buffer in that memory
    timeout_s: float  # of every wait for another rank
    shares_cores: bool  # there are fewer cores than ranks
