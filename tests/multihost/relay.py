"""The cable between two emulated hosts: carries IP packets from one TUN device to another, late, slowly or not at all.

A process of its own, started by `hosts.py`: `python relay.py TUN TUN CONTROL`, three inherited descriptors. Knows IP
packets only, so every protocol goes through it. Packets are as large as the kernel's segmentation offload makes them
(64 KB), which a wire would carry in pieces; they count as these pieces, with Ethernet's framing.

A line of JSON on CONTROL changes the settings, and is answered by an empty one once they hold. Its end is ours.

    {"delay_s": 0.001, "bytes_per_s": 125e6, "loss": 0.0, "open": [true, true]}

`open` is by direction: from the first device to the second, and back.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections import deque

VNET_HEADER = struct.Struct("=BBHHHH")  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
TCP_IP_HEADERS = 52  # bytes; what each further segment of a large packet repeats
FRAMING = 38  # bytes of a wire that Ethernet takes for each packet
MAX_BACKLOG = 1 << 20  # bytes that wait for the wire in one direction; what comes beyond is dropped, as a switch does
TIMER_S = 20e-6  # what is due within this goes at once: a timer would be later by more
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29


def wire_bytes(packet: bytes) -> int:
    """Bytes that a wire would carry for what a TUN device gives us (a virtio header of 10 bytes before the packet)."""
    _, _, _, gso_size, _, _ = VNET_HEADER.unpack_from(packet)
    length = len(packet) - VNET_HEADER.size
    segments = max(1, -(-length // gso_size)) if gso_size else 1
    return length + (segments - 1) * TCP_IP_HEADERS + segments * FRAMING


class Direction:
    """One way of the cable: packets in the order in which they came, each with the time at which it arrives."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink
        self.is_open = True
        self.delay_s, self.s_per_byte, self.loss = 0.0, 0.0, 0.0
        self.waiting: deque[tuple[float, bytes]] = deque()
        self._free_s = 0.0  # when the wire has sent all that waits
        self._random = random.Random(1)

    def take(self) -> None:
        """Reads what the device has, at most 64 packets."""
        for _ in range(64):
            try:
                packet = os.read(self.source, 1 << 17)
            except BlockingIOError:
                return
            now, size = time.monotonic(), wire_bytes(packet)
            backlog_s = max(0.0, self._free_s - now)
            lost = self.loss and self._random.random() < self.loss
            if not self.is_open or lost or (self.s_per_byte and backlog_s > MAX_BACKLOG * self.s_per_byte):
                continue
            self._free_s = now + backlog_s + size * self.s_per_byte
            due_s = self._free_s + self.delay_s
            if due_s <= now + TIMER_S and not self.waiting:
                self._put(packet)
            else:
                self.waiting.append((due_s, packet))

    def give(self, now: float) -> None:
        """Writes what has arrived by now."""
        while self.waiting and self.waiting[0][0] <= now + TIMER_S:
            packet = self.waiting.popleft()[1]
            if self.is_open:
                self._put(packet)

    def _put(self, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # the device is down: a cable does not care
            os.write(self.sink, packet)


class Control:
    """Connection to the harness, which changes the settings."""

    def __init__(self, connection: socket.socket, ways: tuple[Direction, Direction]) -> None:
        self.connection, self.ways = connection, ways
        self._rest = b""

    def read(self) -> bool:
        """Read and answer one line; False once the connection has ended."""
        received = self.connection.recv(1 << 16)
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            self._apply(json.loads(line))
            self.connection.sendall(b"\n")
        return bool(received)

    def _apply(self, settings: dict) -> None:
        for number, way in enumerate(self.ways):
            way.delay_s = settings.get("delay_s", way.delay_s)
            way.loss = settings.get("loss", way.loss)
            if "bytes_per_s" in settings:
                way.s_per_byte = 1 / settings["bytes_per_s"] if settings["bytes_per_s"] else 0.0
            if "open" in settings:
                way.is_open = settings["open"][number]


def relay(first: int, second: int, connection: socket.socket) -> None:
    """Carry packets until the connection ends."""
    ways = (Direction(first, second), Direction(second, first))
    control = Control(connection, ways)
    while True:
        due_s = min((way.waiting[0][0] for way in ways if way.waiting), default=None)
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        readable, _, _ = select.select([first, second, connection], [], [], timeout_s)
        if connection in readable and not control.read():
            return
        for way in ways:
            if way.source in readable:
                way.take()
            way.give(time.monotonic())


def main() -> None:
    first, second, control = map(int, sys.argv[1:])
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_TIMERSLACK, 1)  # nanoseconds; 50,000 otherwise, half of a short delay
    with contextlib.suppress(OSError):  # beside busy ranks a cable must not wait for a core
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    for descriptor in (first, second):
        os.set_blocking(descriptor, False)
    relay(first, second, socket.socket(fileno=control))


if __name__ == "__main__":
    main()
