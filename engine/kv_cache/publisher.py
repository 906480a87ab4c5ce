"""Publisher of the prefix cache's events over ZMQ, as in vLLM, which repeats the newest batches on request.

A separate thread encodes and sends. A PUB socket sends frames `[topic, number, batch]`, the number as 8 bytes, big
endian and counted from 0. An optional ROUTER socket replies to `[number]` with all batches from that number on,
`[topic, number, batch]` each, then with `["", -1, ""]`. The engine only appends to a queue, and wakes the thread.

Nothing waits for a reader. Batches beyond a subscriber's limit are dropped only for it, batches beyond the thread's
limit are dropped for all, and both are counted. A reader that misses a number can request it.

A batch is `[time, [messages], data parallel rank]`. Its messages are vLLM's, which msgpack encodes as maps with a
`type`. Hashes are sent as their last 64 bits, an unsigned integer: readers use them as names of blocks, and find blocks
by tokens.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from oarlock.base.errors import StartupError
from oarlock.engine.config import KvEventsConfig
from oarlock.engine.kv_cache.block_events import AllBlocksCleared, BlockEvent, BlockStored, split_salt

logger = logging.getLogger("oarlock.engine")

_POOL = "GPU"  # the memory that attention reads, on any device, which routers count as a hit
_GROUP = 0  # all layers share one table of blocks
_CLOSE_S = 1.0
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class EventConverter:
    """Converter of one engine's cache events to messages. The fields are common to all its messages."""

    block_size: int
    sliding_window: int | None = None
    has_key_in_salts: bool = False  # the part of a salt before its first `|` names an API key and is left out

    def messages(self, events: Iterable[BlockEvent]) -> list[dict[str, Any]]:
        """Return a message for each run of blocks that follow each other in a sequence, and for each run of
        removals."""
        found: list[dict[str, Any]] = []
        newest: BlockEvent | None = None
        for event in events:
            if isinstance(event, BlockStored):
                if isinstance(newest, BlockStored) and event.parent_hash == newest.block_hash:
                    found[-1]["block_hashes"].append(short_hash(event.block_hash))
                    found[-1]["token_ids"] += event.token_ids
                    found[-1]["extra_keys"].append(None)
                else:
                    found.append(self._stored(event))
            elif isinstance(event, AllBlocksCleared):
                found.append({"type": "AllBlocksCleared"})
            elif newest is not None and type(newest) is type(event):
                found[-1]["block_hashes"].append(short_hash(event.block_hash))
            else:
                hashes = [short_hash(event.block_hash)]
                found.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": _POOL, "group_idx": _GROUP})
            newest = event
        return found

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        parent, salt = event.parent_hash, self._published_salt(event)
        message = {
            "type": "BlockStored",
            "block_hashes": [short_hash(event.block_hash)],
            "parent_block_hash": None if parent is None else short_hash(parent),
            "token_ids": list(event.token_ids),
            "block_size": self.block_size,
            "lora_id": None,
            "medium": _POOL,
            "lora_name": split_salt(event.cache_salt)[1],  # the digest, since a name may get another content
            "extra_keys": [[salt] if salt else None],
            "group_idx": _GROUP,
            "kv_cache_spec_kind": "full_attention" if self.sliding_window is None else "sliding_window",
        }
        if self.sliding_window is not None:
            message["kv_cache_spec_sliding_window"] = self.sliding_window
        return message

    def _published_salt(self, event: BlockStored) -> str:
        """Return the salt to publish with a sequence's first block; "" for other blocks, whose parents' hashes cover
        it."""
        if event.parent_hash is not None:
            return ""
        salt = split_salt(event.cache_salt)[0].decode()
        return salt.partition("|")[2] if self.has_key_in_salts else salt


def short_hash(block_hash: bytes) -> int:
    """Return the name of a block in messages."""
    return int.from_bytes(block_hash[-8:], "big")


class KvEventPublisher:
    """Publisher of cache events. Binds (or connects) its sockets in the constructor; raises `StartupError`. Call
    `start` after loading."""

    def __init__(self, config: KvEventsConfig, data_parallel_rank: int = 0) -> None:
        self.num_sent = 0  # batches, written only by the thread
        self.num_overflows = 0  # times that a subscriber fell behind and missed batches; written only by the thread
        self.num_dropped = 0  # batches, because the thread was too far behind; written only by `publish`
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
                # A reader acknowledges at every half of the limit, so twice the limit always fits.
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
            sock.xpub_nodrop = True  # a full subscriber is reported; `_send` then drops the batch for it
        try:
            (sock.bind if is_bound else sock.connect)(address)
        except zmq.ZMQError as error:
            name = "endpoint" if kind == zmq.PUB else "replay_endpoint"
            raise StartupError(
                f"--kv-events-config has the {name} {address!r}, which cannot be used: {error.strerror}.",
                f'Give it another address or a free port, for example "{name}": "tcp://*:5557".',
            ) from error
        return sock

    def start(self, block_size: int, sliding_window: int | None = None) -> None:
        wire = EventConverter(block_size, sliding_window, self._config.has_key_in_salts)
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

    def _run(self, wire: EventConverter) -> None:
        try:
            self._send_until_closed(wire)
        except Exception:
            self._has_failed = True
            self._queue.clear()
            logger.exception("event=kv_events_failed")

    def _send_until_closed(self, wire: EventConverter) -> None:
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
                self._send_replays(self._replay)

    def _send(self, number: bytes, batch: bytes) -> None:
        frames = (self._topic, number, batch)
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # a subscriber's queue is full: only it misses the following batches
            self.num_overflows += 1
            self._pub.xpub_nodrop = False
            self._pub.send_multipart(frames, zmq.NOBLOCK)
            self._pub.xpub_nodrop = True
        self._sent.append((number, batch))
        self.num_sent += 1

    def _send_replays(self, replay: zmq.Socket) -> None:
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
    """Return the address of a bound socket, with the chosen port if 0 or * was asked for."""
    return sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
