"""Publishes the events of the prefix cache over ZMQ, as vLLM does, and repeats the newest batches on request.

A separate thread encodes and sends: a PUB socket with frames `[topic, number, batch]`, the number 8 bytes, big endian
and counted from 0; and, where it is asked for, a ROUTER socket that answers `[number]` with all batches from that one
on, `[topic, number, batch]` each, then with `["", -1, ""]`. The engine only appends to a queue, and wakes the thread.

Nothing waits for a reader: batches beyond a subscriber's limit are dropped for it alone, batches beyond the thread's
limit are dropped for all, and both are counted. A reader that misses a number asks for it.
"""

import logging
import os
import threading
import time
from collections import deque

import msgspec
import zmq

from oarlock.engine.config import KvEventsConfig
from oarlock.engine.errors import StartupError
from oarlock.engine.kv_cache.events import BlockEvent
from oarlock.engine.kv_cache.wire import Wire

logger = logging.getLogger("oarlock.engine")

_CLOSE_S = 1.0
_END = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    """Binds (or connects) its sockets when it is made; raises `StartupError`. `start` comes when `Wire` is known."""

    def __init__(self, config: KvEventsConfig, data_parallel_rank: int = 0) -> None:
        self.num_sent = 0  # batches, written by the thread alone
        self.num_overflows = 0  # times that a subscriber fell behind and missed batches; by the thread alone
        self.num_dropped = 0  # batches, because the thread was too far behind; written by `publish` alone
        self._config = config
        self._rank = data_parallel_rank
        self._topic = config.topic.encode()
        self._queue: deque[tuple[int, float, list[BlockEvent]]] = deque()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)  # (number, batch)
        self._next = 0
        self._is_closing = self._has_failed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._context = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, config.hwm, config.endpoint, config.is_bound)
            self._replay = None
            if config.replay_endpoint is not None:
                # A reader acknowledges at every half of the limit: so twice as many always fit.
                self._replay = self._open(zmq.ROUTER, 2 * (config.buffer_steps + 1), config.replay_endpoint, True)
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise
        self.endpoint = _address(self._pub)
        self.replay_endpoint = None if self._replay is None else _address(self._replay)

    def _open(self, kind: int, most: int, endpoint: str, is_bound: bool) -> zmq.Socket:
        address = self._config.of_rank(endpoint, self._rank)
        sock = self._context.socket(kind)
        sock.sndhwm = most
        sock.linger = 0
        sock.ipv6 = "[" in address
        if kind == zmq.PUB:
            sock.xpub_nodrop = True  # a full subscriber is reported, and then dropped for: see `_send`
        try:
            (sock.bind if is_bound else sock.connect)(address)
        except zmq.ZMQError as error:
            name = "endpoint" if kind == zmq.PUB else "replay_endpoint"
            raise StartupError(
                f"--kv-events-config has the {name} {address!r}, which cannot be used: {error.strerror}.",
                f'Give it another address or a free port, for example "{name}": "tcp://*:5557".',
            ) from error
        return sock

    def start(self, wire: Wire) -> None:
        self._thread = threading.Thread(target=self._run, args=(wire,), name="kv-events", daemon=True)
        self._thread.start()
        logger.info("event=kv_events endpoint=%s replay_endpoint=%s", self.endpoint, self.replay_endpoint)

    def publish(self, events: list[BlockEvent]) -> None:
        """Queue one batch of events for the thread. Returns at once."""
        number, self._next = self._next, self._next + 1
        if self._has_failed or len(self._queue) >= self._config.max_queue_size:
            self.num_dropped += 1
            return
        self._queue.append((number, time.time(), events))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send the queued batches within a second, and close the sockets."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        if self._thread is None or not self._thread.is_alive():
            self._context.destroy(linger=0)
            os.close(self._wake)

    # -- the thread

    def _run(self, wire: Wire) -> None:
        try:
            self._send_until_closed(wire)
        except Exception:
            self._has_failed = True
            self._queue.clear()
            logger.exception("event=kv_events_failed")

    def _send_until_closed(self, wire: Wire) -> None:
        encoder = msgspec.msgpack.Encoder()
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._is_closing or self._queue:
            if not self._queue:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
            while self._queue:
                number, seconds, events = self._queue.popleft()
                self._send(number.to_bytes(8, "big"), encoder.encode([seconds, wire.messages(events), self._rank]))
            if self._replay is not None:
                self._answer_replays(self._replay)

    def _send(self, number: bytes, batch: bytes) -> None:
        frames = (self._topic, number, batch)
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # a subscriber has as many batches waiting as it may: it misses those that follow, alone
            self.num_overflows += 1
            self._pub.xpub_nodrop = False
            self._pub.send_multipart(frames, zmq.NOBLOCK)
            self._pub.xpub_nodrop = True
        self._sent.append((number, batch))
        self.num_sent += 1

    def _answer_replays(self, replay: zmq.Socket) -> None:
        while replay.poll(0):
            reader, *frames = replay.recv_multipart()
            if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
                logger.warning("event=kv_replay_refused frames=%s", [len(frame) for frame in frames])
                continue
            for number, batch in self._sent:
                if number >= frames[1]:
                    replay.send_multipart((reader, b"", self._topic, number, batch))
            replay.send_multipart((reader, b"", b"", _END, b""))


def _address(sock: zmq.Socket) -> str:
    """Address of a bound socket, with the port that was chosen where 0 or * was asked for."""
    return sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
