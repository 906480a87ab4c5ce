"""What encryption costs a link between hosts: its messages beside the same bytes over plain TCP, on loopback.

    python -m benchmarks.node_link [--rounds N] [--messages N]

One thread sends a message and receives it at the other end, so figures are processor time and no waiting. Both ways
take turns in each round. Figures are microseconds for sending and receiving one message: the median over rounds of the
median over messages.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import struct
import time
from collections.abc import Callable

from workers.distributed.nodes.handshake import Opening, answer
from workers.distributed.nodes.link import Link, Peer, set_options

SIZES = (1_000, 5_000, 20_000, 50_000)  # bytes; a decode step of 64 sequences has about 5,000
_LENGTH = struct.Struct("<I")
_SECRET = "known to both ends of this benchmark"


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for end in (ours, theirs):
        set_options(end)
    return ours, theirs


def sealed_way() -> Callable[[bytes], None]:
    """Sends and receives one message through a link."""
    opening = Opening(_SECRET)
    reply, of_head = answer(_SECRET, opening.message)
    ours, theirs = connected()
    node, head = Link(ours, opening.finish(reply), Peer(0, "a", "a")), Link(theirs, of_head, Peer(1, "b", "b"))

    def move(payload: bytes) -> None:
        node.send(1, payload)
        while (message := head.receive()) is None:
            node.flush()
        assert len(message.payload) == len(payload)

    return move


def plain_way() -> Callable[[bytes], None]:
    """The same with a length before each message, and nothing else."""
    ours, theirs = connected()
    for end in (ours, theirs):
        end.setblocking(False)
    buffer = bytearray(_LENGTH.size + max(SIZES))

    def move(payload: bytes) -> None:
        unsent = memoryview(_LENGTH.pack(len(payload)) + payload)
        count, size = 0, len(unsent)
        while count < size:
            if unsent:
                unsent = unsent[ours.send(unsent) :]
            with memoryview(buffer)[count:] as room:
                count += theirs.recv_into(room)
        assert len(bytes(memoryview(buffer)[_LENGTH.size : count])) == len(payload)

    return move


def microseconds(move: Callable[[bytes], None], payload: bytes, count: int) -> float:
    """The median over `count` messages, after a tenth as many that do not count."""
    times = []
    for _ in range(count // 10 + count):
        begin = time.perf_counter()
        move(payload)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[-count:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--messages", type=int, default=500)
    arguments = parser.parse_args()
    ways = {"sealed": sealed_way(), "plain": plain_way()}
    print("   bytes   sealed us    plain us   more us")
    for size in SIZES:
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, move in ways.items():
                found[name].append(microseconds(move, bytes(size), arguments.messages))
        sealed, plain = (statistics.median(found[name]) for name in ("sealed", "plain"))
        print(f"{size:8} {sealed:11.1f} {plain:11.1f} {sealed - plain:9.1f}")


if __name__ == "__main__":
    main()
