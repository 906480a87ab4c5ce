"""Reader of KV events in a separate process, as a router's: `python kv_event_reader.py ENDPOINT REPLAY_ENDPOINT TOPIC`.

It knows the format alone: three frames, msgpack, vLLM's types. It asks for missed batches. Each line `NUMBER` on its
standard input is answered with one line of JSON, once all batches before NUMBER are applied: the blocks that are there.
"""

import json
import sys

import msgspec
import zmq

NOTHING_FOR_MS = 200


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Reader:
    def __init__(self, endpoint: str, replay_endpoint: str, topic: str) -> None:
        context = zmq.Context()
        self.sub = context.socket(zmq.SUB)
        self.sub.connect(endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.replay = context.socket(zmq.DEALER)
        self.replay.connect(replay_endpoint)
        self.blocks: dict[int, dict] = {}
        self.next = self.num_replayed = self.num_lost = 0
        self.ranks: set[int | None] = set()
        self.topics: set[str] = set()
        self.decoder = msgspec.msgpack.Decoder(Batch)

    def read_until(self, number: int) -> None:
        while self.next < number:
            if not self.sub.poll(NOTHING_FOR_MS):
                self.catch_up()
                continue
            topic, seq, payload = self.sub.recv_multipart()
            self.topics.add(topic.decode())
            if int.from_bytes(seq, "big") > self.next:
                self.catch_up()
            self.apply(int.from_bytes(seq, "big"), payload)

    def catch_up(self) -> None:
        self.replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            _, topic, seq, payload = self.replay.recv_multipart()
            if int.from_bytes(seq, "big", signed=True) < 0:
                return
            self.topics.add(topic.decode())
            self.num_replayed += 1
            self.apply(int.from_bytes(seq, "big"), payload)

    def apply(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return
        self.num_lost += number - self.next
        self.next = number + 1
        batch = self.decoder.decode(payload)
        self.ranks.add(batch.data_parallel_rank)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    self.blocks.pop(block)
            else:
                self.store(event)

    def store(self, event: BlockStored) -> None:
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        keys = event.extra_keys or [None] * len(event.block_hashes)
        parent = event.parent_block_hash
        for index, block in enumerate(event.block_hashes):
            tokens = event.token_ids[index * event.block_size :][: event.block_size]
            self.blocks[block] = {"parent": parent, "token_ids": tokens, "keys": keys[index]}
            parent = block


def main() -> None:
    reader = Reader(*sys.argv[1:])
    for line in sys.stdin:
        reader.read_until(int(line))
        found = {"blocks": reader.blocks, "replayed": reader.num_replayed, "lost": reader.num_lost}
        found |= {"ranks": sorted(reader.ranks, key=str), "topics": sorted(reader.topics)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
