"""KV events over real sockets, read by another process that knows vLLM's format alone."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from oarlock.base.errors import StartupError
from oarlock.engine.config import KvEventsConfig
from oarlock.engine.kv_cache.block_events import (
    AllBlocksCleared,
    BlockEvent,
    BlockEventLog,
    BlockRemoved,
    BlockStored,
    salt_with_adapter,
)
from oarlock.engine.kv_cache.publisher import EventConverter, KvEventPublisher, short_hash
from tests.unit.engine.engine_fakes import Driver
from tests.unit.engine.kv_cache.test_block_events import Listening
from tests.unit.engine.scheduler.test_pipeline_depth import make_scene, run_scene

LONG_S = 60
TOPIC = "kv@pod-1@model"


class Reader:
    """The process of `kv_event_reader.py`."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        assert publisher.replay_endpoint is not None
        script = str(Path(__file__).with_name("kv_event_reader.py"))
        command = [sys.executable, script, publisher.endpoint, publisher.replay_endpoint, TOPIC]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def report(self, number: int) -> dict:
        """Report of the reader when it has all batches before `number`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(number, file=self.process.stdin, flush=True)
        found = json.loads(self.process.stdout.readline())
        found["blocks"] = {int(block): rest for block, rest in found["blocks"].items()}
        return found


@contextmanager
def reading(publisher: KvEventPublisher) -> Iterator[Reader]:
    reader = Reader(publisher)
    try:
        yield reader
    finally:
        reader.process.kill()
        reader.process.communicate()


@contextmanager
def publishing(folder: Path, rank: int = 0, wire: EventConverter | None = None, **keys) -> Iterator[KvEventPublisher]:
    config = KvEventsConfig(
        endpoint=f"ipc://{folder}/pub", replay_endpoint=f"ipc://{folder}/replay", topic=TOPIC, **keys
    )
    publisher = KvEventPublisher(config, rank)
    try:
        if wire is not None:
            publisher.start(wire.block_size, wire.sliding_window)
        yield publisher
    finally:
        publisher.close()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


class Publishing(Listening):
    """Publishes what each step stores and removes."""

    publisher: KvEventPublisher
    num_batches = 0

    def compare(self) -> None:
        events = self.log.take()
        self.replayed.replay(events)
        self.replayed.check(self.manager)
        if events:
            self.publisher.publish(events)
            self.num_batches += 1


@pytest.mark.parametrize("seed", [4, 14])  # without and with a window
def test_another_process_knows_what_the_pool_has(tmp_path: Path, seed: int) -> None:
    scene = make_scene(seed)

    def make(*arguments) -> Publishing:
        driver = Publishing(*arguments)
        driver.publisher = publisher
        return driver

    wire = EventConverter(scene.config["block_size"], scene.window)
    with publishing(tmp_path, 3, wire) as publisher, reading(publisher) as reader:
        driver = run_scene(scene, 2, make)
        found = reader.report(driver.num_batches)
    assert driver.replayed.num_removed and driver.replayed.stored
    expected = {
        short_hash(block): {
            "parent": None if event.parent_hash is None else short_hash(event.parent_hash),
            "token_ids": list(event.token_ids),
            "keys": None,
        }
        for block, event in driver.replayed.stored.items()
    }
    assert found["blocks"] == expected
    assert (found["lost"], found["ranks"], found["topics"]) == (0, [3], [TOPIC])


def block(number: int, parent: int | None = None, salt: bytes = b"", size: int = 2) -> BlockStored:
    before = None if parent is None else name(parent)
    return BlockStored(name(number), before, [number] * size, salt)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_reader_that_missed_batches_asks_for_them(tmp_path: Path) -> None:
    """It comes when the first are gone, and gets those that are kept."""
    with publishing(tmp_path, wire=EventConverter(2), buffer_steps=4) as publisher:
        for number in range(10):
            publisher.publish([block(number)])
        wait_for(lambda: publisher.num_sent == 10)
        with reading(publisher) as reader:
            found = reader.report(10)
            assert sorted(found["blocks"]) == [6, 7, 8, 9]
            assert (found["replayed"], found["lost"]) == (4, 6)
            publisher.publish([block(10, 9), BlockRemoved(name(6))])
            assert sorted(reader.report(11)["blocks"]) == [7, 8, 9, 10]


def test_a_request_that_is_no_number_gets_no_answer_and_harms_nothing(tmp_path: Path, context: zmq.Context) -> None:
    with publishing(tmp_path, wire=EventConverter(2)) as publisher:
        publisher.publish([block(1)])
        constrained = context.socket(zmq.DEALER)
        constrained.connect(str(publisher.replay_endpoint))
        for frames in ([b"x"], [b"", b"12"], [b"", b"0" * 8, b""], [b"", bytes(8)]):
            constrained.send_multipart(frames)
        assert constrained.poll(LONG_S * 1000)
        empty, topic, number, payload = constrained.recv_multipart()
        assert (empty, topic, number) == (b"", TOPIC.encode(), bytes(8))
        assert msgspec.msgpack.decode(payload)[1][0]["block_hashes"] == [1]
        assert constrained.recv_multipart() == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


@pytest.mark.slow
def test_a_subscriber_that_never_reads_loses_batches_and_nobody_else_does(tmp_path: Path, context: zmq.Context) -> None:
    with publishing(tmp_path, wire=EventConverter(4000), hwm=2, buffer_steps=1000) as publisher:
        stuck = context.socket(zmq.SUB)
        stuck.rcvhwm = 1
        stuck.connect(publisher.endpoint)
        stuck.setsockopt(zmq.SUBSCRIBE, b"")
        number = 0
        while not stuck.poll(20):  # until it is subscribed
            publisher.publish([block(number, size=4000)])
            number += 1
        with reading(publisher) as reader:
            for later in range(number, number + 500):
                publisher.publish([block(later, size=4000)])
            found = reader.report(number + 500)
            assert len(found["blocks"]) == number + 500 and found["lost"] == 0
            assert publisher.num_sent == number + 500 and publisher.num_dropped == 0
            assert publisher.num_overflows > 0


def test_batches_beyond_the_queue_are_dropped_and_counted(tmp_path: Path) -> None:
    with publishing(tmp_path, max_queue_size=2) as publisher:
        for number in range(5):
            publisher.publish([block(number)])  # no thread runs yet
        assert publisher.num_dropped == 3
        publisher.start(2)
        wait_for(lambda: publisher.num_sent == 2)
        publisher.publish([block(5)])
        with reading(publisher) as reader:
            found = reader.report(6)
            assert sorted(found["blocks"]) == [0, 1, 5] and found["lost"] == 3


def test_a_failing_thread_stops_nothing_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with publishing(tmp_path, wire=EventConverter(2)) as publisher:
        publisher.publish([block(1, salt=b"\x80")])  # no text
        wait_for(lambda: publisher._has_failed)
        publisher.publish([block(2)])
        assert publisher.num_dropped == 1
    assert "event=kv_events_failed" in caplog.text


@pytest.mark.parametrize("kind", ["endpoint", "replay_endpoint"])
def test_an_address_in_use_is_named_before_anything_else_starts(tmp_path: Path, kind: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        addresses = {"endpoint": f"ipc://{tmp_path}/pub", kind: f"tcp://127.0.0.1:{port}"}
        if kind == "endpoint":
            addresses[kind] = f"tcp://*:{port}"
        with pytest.raises(StartupError) as caught:
            KvEventPublisher(KvEventsConfig(**addresses))
    assert f"{kind} " in caught.value.cause and "in use" in caught.value.cause
    assert "free port" in caught.value.fix and "\n" not in str(caught.value)


def test_each_replica_has_its_own_port() -> None:
    of_rank = KvEventsConfig.of_rank
    assert [of_rank("tcp://*:5557", rank) for rank in (0, 1, 7)] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5564"]
    assert of_rank("tcp://[::1]:5557", 2) == "tcp://[::1]:5559"
    assert of_rank("tcp://*:0", 2) == "tcp://*:0" and of_rank("tcp://127.0.0.1:*", 2) == "tcp://127.0.0.1:*"
    assert of_rank("ipc:///run/kv", 0) == "ipc:///run/kv" and of_rank("ipc:///run/kv", 2) == "ipc:///run/kv_dp2"


def test_messages_match_vllm() -> None:
    """Blocks that follow each other are one message; a salt is told with the first block of a sequence."""
    events: list[BlockEvent] = [block(1, salt=b"a|b"), block(2, 1, b"a|b"), block(7), BlockRemoved(name(1))]
    events += [BlockRemoved(name(2)), AllBlocksCleared(), block(3, 2)]
    stored = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 1, 2, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["a|b"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    other = {**stored, "block_hashes": [7], "token_ids": [7, 7], "extra_keys": [None]}
    assert EventConverter(2).messages(events) == [
        stored,
        other,
        {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
        {**other, "block_hashes": [3], "parent_block_hash": 2, "token_ids": [3, 3]},
    ]
    windowed = EventConverter(2, 8, has_key_in_salts=True).messages(events)[0]
    assert windowed["extra_keys"] == [["b"], None]  # without the part that names the API key
    assert (windowed["kv_cache_spec_kind"], windowed["kv_cache_spec_sliding_window"]) == ("sliding_window", 8)
    assert EventConverter(2, has_key_in_salts=True).messages([block(1, salt=b"a|")])[0]["extra_keys"] == [None]
    digest = bytes(range(16)).hex()
    adapted = EventConverter(2, has_key_in_salts=True).messages([block(1, salt=salt_with_adapter(b"a|b", digest))])[0]
    assert (adapted["lora_name"], adapted["extra_keys"]) == (digest, [["b"]])


def test_a_log_costs_nothing_where_there_is_none() -> None:
    driver: Driver = run_scene(make_scene(1), 1)
    assert driver.scheduler.memory.leader.pool.event_log is None
    assert BlockEventLog().take() == []
