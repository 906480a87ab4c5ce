"""The engine's loop over a real socket: failures of single requests and of ranks, a frontend that does not read."""

import os
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from oarlock.base.errors import EXIT_BUG, EXIT_OK, EXIT_RANK_DIED, EXIT_RANK_HUNG
from oarlock.engine.core import event_loop
from oarlock.engine.core.event_loop import EngineLoop
from oarlock.engine.errors import ContextLengthError, QueueFullError
from oarlock.engine.ipc import messages
from oarlock.engine.ipc.frames import FrameReader, FrameSocket, FrameSocketClosedError
from oarlock.engine.ipc.messages import Alive, CacheReset, Dead, Events, Refused, Stats, encode
from oarlock.engine.types import FinishReason, TokenEvent
from tests.unit.engine.engine_fakes import FakeExecutor, Faults, expected_tokens, make_config, make_info, make_request
from tests.unit.engine.kv_cache.replayed_blocks import ReplayedBlocks


class Harness:
    """An `EngineLoop` on one end of a socket; the test is the frontend on the other."""

    depth = 1  # set by `depths`

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        num_blocks: int = 33,
        full_bytes: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
        **config,
    ) -> None:
        engine = make_config(pipeline_depth=self.depth, **config)
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(60)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that tests fill it soon
        self.executor = FakeExecutor(engine, make_info(engine, num_blocks), faults)
        self.frame_socket = FrameSocket(theirs, full_bytes=full_bytes, clock=clock)
        self.loop = EngineLoop(engine, self.executor, self.frame_socket, clock=clock)
        self.reader = FrameReader()
        self.received: list[messages.FromEngine] = []

    def send(self, *sent: messages.Message) -> None:
        self.ours.sendall(b"".join(map(encode, sent)))

    def ask(self, *requests) -> None:
        self.send(*map(messages.Submit.of, requests))

    def run_until_idle(self) -> None:
        while self.loop.tick():
            pass
        self.loop.tick()

    def receive(self) -> list[messages.FromEngine]:
        while select.select([self.ours], [], [], 0)[0] and (data := self.ours.recv(1 << 16)):
            self.received += map(messages.read_from_engine, self.reader.feed(data))
        return self.received

    def kinds(self) -> list[type]:
        return [type(message) for message in self.receive()]

    def events(self) -> list[TokenEvent]:
        return [event for message in self.receive() if isinstance(message, Events) for event in message.read()]

    def ends(self) -> dict[int, TokenEvent]:
        ends = [event for event in self.events() if event.finish_reason is not None]
        assert len(ends) == len({event.request_id for event in ends}), "two terminal events for one request"
        return {event.request_id: event for event in ends}

    def tokens(self, request_id: int) -> list[int]:
        return [token for event in self.events() if event.request_id == request_id for token in event.token_ids]

    def check_idle(self) -> None:
        manager = self.loop.scheduler.memory
        self.loop.scheduler.audit()
        assert not self.loop.scheduler.has_work and manager.num_free + manager.num_cached == manager.num_total


@pytest.fixture(params=[1, 2], autouse=True)
def depths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs at both pipeline depths."""
    monkeypatch.setattr(Harness, "depth", request.param)


@pytest.fixture
def harness(depths: None):
    return Harness()


def test_requests_are_answered_in_one_frame_per_step(harness: Harness) -> None:
    requests = [make_request(number, [number, 2, 3], max_tokens=5) for number in (1, 2, 3)]
    harness.ask(*requests)
    harness.run_until_idle()
    assert harness.kinds() == [Events] * 5
    for request in requests:
        assert harness.tokens(request.request_id) == expected_tokens(request)
    harness.check_idle()


def test_a_step_without_events_sends_a_heartbeat() -> None:
    harness = Harness(max_num_batched_tokens=4)
    harness.ask(make_request(1, range(10), max_tokens=1))
    harness.run_until_idle()
    assert harness.kinds() == [Alive, Alive, Events]


def test_refusals_name_their_reason() -> None:
    harness = Harness(max_num_seqs=1, max_waiting_requests=1)
    harness.ask(make_request(1, [1]), make_request(2, [1] * 70), make_request(3, [1]), make_request(4, [1]))
    harness.run_until_idle()
    refused = {one.request_id: one.exception() for one in harness.receive() if isinstance(one, Refused)}
    assert isinstance(refused[2], ContextLengthError) and isinstance(refused[4], QueueFullError)
    assert harness.ends().keys() == {1, 3}


def test_subscribers_know_the_cached_blocks(harness: Harness) -> None:
    """Also after a reset that comes without a step, and on a pool in which blocks are evicted."""
    subscribers = [ReplayedBlocks(harness.loop.scheduler.memory.block_size) for _ in range(2)]
    for one in subscribers:
        harness.loop.subscribe_to_blocks(one.replay)
    for number in range(1, 9):
        harness.ask(make_request(number, range(number, number + 20), max_tokens=6))
        harness.run_until_idle()
        for one in subscribers:
            one.check(harness.loop.scheduler.memory)
    harness.send(messages.ResetCache(1))
    harness.run_until_idle()
    for one in subscribers:
        assert one.num_removed and one.num_cleared == 1 and not one.stored


def test_a_reset_empties_the_prefix_cache(harness: Harness) -> None:
    request = make_request(1, range(9), max_tokens=3)
    cached = []
    for resets in ([], [], [messages.ResetCache(8)], []):
        harness.send(*resets, messages.Submit.of(request))
        harness.run_until_idle()
        cached.append(max(event.num_cached_tokens for event in harness.events()))
        assert harness.tokens(1) == expected_tokens(request)
        answers = [message for message in harness.received if isinstance(message, CacheReset)]
        assert answers == ([CacheReset(8, 2)] if resets else [])
        harness.received.clear()
    assert cached == [0, 8, 0, 8]
    harness.check_idle()


def test_an_abort_frees_within_a_step(harness: Harness) -> None:
    harness.ask(make_request(1, [1, 2], max_tokens=50))
    harness.loop.tick()
    harness.send(messages.Abort(1), messages.Abort(99))
    assert harness.loop.tick() == (harness.depth == 2)  # a step in flight is finished
    assert harness.ends()[1].finish_reason is FinishReason.ABORT
    harness.check_idle()


def test_stats_and_an_orderly_stop(harness: Harness) -> None:
    harness.ask(make_request(1, [1, 2], max_tokens=50))
    harness.loop.tick()
    harness.send(messages.AskStats(5), messages.Stop())
    assert harness.loop.run() == EXIT_OK
    (message,) = [message for message in harness.receive() if isinstance(message, Stats)]
    stats = message.stats
    assert message.number == 5 and stats.num_requests_running == 1 and stats.uptime_s > 0 and stats.state == "ready"
    assert harness.ends()[1].finish_reason is FinishReason.ERROR
    assert "shutting down" in (harness.ends()[1].error or "")
    harness.check_idle()


@pytest.mark.parametrize(
    "faults, code", [(Faults(die_at_step=3), EXIT_RANK_DIED), (Faults(hang_at_step=3), EXIT_RANK_HUNG)]
)
def test_a_lost_rank_ends_every_request_with_one_event(faults: Faults, code: int) -> None:
    harness = Harness(faults, max_num_seqs=2)
    harness.ask(*(make_request(number, [number], max_tokens=9) for number in range(1, 6)))
    assert harness.loop.run() == code
    ends = harness.ends()
    assert ends.keys() == {1, 2, 3, 4, 5}
    assert {end.finish_reason for end in ends.values()} == {FinishReason.ERROR}
    assert all("rank" not in (end.error or "") and "signal" not in (end.error or "") for end in ends.values())
    (dead,) = [message for message in harness.receive() if isinstance(message, Dead)]
    assert "rank 1" in dead.cause and dead.exit_code == code
    assert len(harness.tokens(1)) == 2  # what was computed before has been delivered
    assert harness.loop.snapshot().state == "dead"


def test_an_exception_in_the_loop_ends_every_request(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.ask(make_request(1, [1], max_tokens=9))
    monkeypatch.setattr(harness.loop.scheduler, "schedule", lambda *args, **named: 1 / 0)
    assert harness.loop.run() == EXIT_BUG
    assert harness.ends()[1].finish_reason is FinishReason.ERROR
    assert isinstance(dead := harness.received[0], Dead) and "ZeroDivisionError" in dead.cause


def test_bytes_that_are_no_frame_end_the_loop(harness: Harness) -> None:
    harness.ours.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert harness.loop.run() == EXIT_BUG
    for surprise in (Alive(1), messages.Config("another", "{}")):
        other = Harness()
        other.send(surprise)
        assert other.loop.run() == EXIT_BUG


@pytest.mark.parametrize("body", [b"\x90", msgspec.msgpack.encode("prompt")])
def test_a_request_with_a_bad_body_fails_alone(harness: Harness, body: bytes) -> None:
    request = make_request(2, [1, 2], max_tokens=4)
    harness.send(messages.Submit(1, msgspec.Raw(body)), messages.Submit.of(request))
    harness.run_until_idle()
    assert harness.ends()[1].finish_reason is FinishReason.ERROR and harness.tokens(2) == expected_tokens(request)
    harness.check_idle()


def test_a_frontend_that_leaves_ends_the_loop(harness: Harness) -> None:
    harness.ask(make_request(1, [1], max_tokens=50))
    harness.ours.close()
    assert harness.loop.run() == EXIT_OK


# -- exceptions with one request

_STAGES = ["read", "add", "allocate", "grow_by_one", "build", "update_from_output", "cache_blocks", "send", "poison"]


def inject(harness: Harness, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `stage` for request 2 alone."""
    scheduler, input_batch = harness.loop.scheduler, harness.loop.engine_core._input_batch

    def broken(owner, name: str, is_victim) -> None:
        real = getattr(owner, name)

        def wrapper(*args, **kwargs):
            if is_victim(*args):
                raise RuntimeError("injected")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    def of_seq(seq, *_) -> bool:
        return seq.request_id == 2

    if stage == "read":
        broken(harness.loop._request_reader, "read", lambda message: message.request_id == 2)
    elif stage == "add":
        broken(scheduler, "add", lambda request, now: request.request_id == 2)
    elif stage in ("allocate", "grow_by_one", "cache_blocks"):
        broken(scheduler.memory, stage, of_seq)
    elif stage == "build":
        broken(input_batch, "_assign", of_seq)
    elif stage == "update_from_output":
        broken(scheduler._results, "_append_tokens", lambda item, *_: item.seq.request_id == 2)
    elif stage == "send":
        broken(event_loop.messages, "_event", lambda event: event.request_id == 2 and not event.error)
    elif stage == "poison":
        harness.executor.faults = Faults(poisoned_seeds=(2,))


@pytest.mark.parametrize("stage", _STAGES)
def test_an_exception_in_one_request_fails_that_request_alone(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    requests = [make_request(number, range(number, number + 6), max_tokens=6, logprobs=0) for number in (1, 2, 3)]
    inject(harness, stage, monkeypatch)
    harness.ask(*requests)
    harness.run_until_idle()
    ends = harness.ends()
    assert ends[2].finish_reason is FinishReason.ERROR and "injected" not in (ends[2].error or "")
    for request in (requests[0], requests[2]):
        assert harness.tokens(request.request_id) == expected_tokens(request)
    assert harness.loop.scheduler.stats.num_errors == 1
    harness.check_idle()
    # the next request is served as usual
    request = make_request(4, range(9), max_tokens=5)
    harness.ask(request)
    harness.run_until_idle()
    assert harness.tokens(4) == expected_tokens(request)


def test_an_input_batch_that_always_fails_ends_the_engine(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = harness.loop.engine_core._input_batch.build, []

    def broken(output):
        calls.append(output)
        if len(calls) == 1:
            raise RuntimeError("injected")
        return real(output)

    monkeypatch.setattr(harness.loop.engine_core._input_batch, "build", broken)
    harness.ask(make_request(1, [1]))
    assert harness.loop.run() == EXIT_BUG
    assert harness.ends()[1].finish_reason is FinishReason.ERROR


def test_requests_that_can_never_be_scheduled_are_failed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.ask(make_request(1, [1]))
    monkeypatch.setattr(harness.loop.scheduler.requests, "start", lambda *_: False)
    assert harness.loop.tick() and not harness.loop.tick()
    assert harness.ends()[1].finish_reason is FinishReason.ERROR


# -- idle


def run_in_thread(harness: Harness) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(harness.loop.run()), daemon=True)
    thread.start()
    return thread, codes


@pytest.mark.slow
def test_idle_is_silent_but_for_heartbeats_and_uses_no_processor() -> None:
    harness = Harness(heartbeat_interval_s=0.1)
    turns = []
    real = harness.loop.tick
    harness.loop.tick = lambda: turns.append(1) or real()  # type: ignore[method-assign]
    thread, codes = run_in_thread(harness)
    deadline = time.monotonic() + 60
    while harness.executor.num_pings < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    harness.send(messages.Stop())
    thread.join(60)
    assert codes == [EXIT_OK]
    kinds = harness.kinds()
    assert kinds and set(kinds) == {Alive} and len(kinds) == harness.executor.num_pings
    assert len(turns) <= len(kinds) + 3, "the idle loop turned more often than it was woken"


def test_a_rank_that_dies_while_idle_is_found_by_the_heartbeat() -> None:
    harness = Harness(Faults(die_at_ping=2), heartbeat_interval_s=0.05)
    assert harness.loop.run() == EXIT_RANK_DIED
    assert harness.kinds() == [Alive, Dead]


def test_a_rank_that_dies_while_idle_is_found_at_once() -> None:
    read, write = os.pipe()
    engine = make_config(heartbeat_interval_s=1000.0)
    executor = FakeExecutor(engine, make_info(engine), Faults(die_at_ping=1))
    executor.fileno_for_death = lambda: [read]  # type: ignore[method-assign]
    ours, theirs = socket.socketpair()
    os.close(write)
    assert EngineLoop(engine, executor, FrameSocket(theirs)).run() == EXIT_RANK_DIED
    (payload,) = FrameReader().feed(ours.recv(1 << 16))
    assert isinstance(messages.read_from_engine(payload), Dead)
    os.close(read)


def test_stop_wakes_an_idle_loop() -> None:
    harness = Harness(heartbeat_interval_s=1000.0)
    thread, codes = run_in_thread(harness)
    harness.send(messages.Stop())
    thread.join(60)
    assert codes == [EXIT_OK]


# -- a frontend that does not read


def test_a_frontend_that_does_not_read_pauses_the_engine_and_loses_nothing() -> None:
    harness = Harness(full_bytes=2000, max_model_len=100, num_blocks=110)
    requests = [make_request(number, [number], max_tokens=90, logprobs=20) for number in (1, 2, 3, 4)]
    harness.ask(*requests)
    while harness.loop.tick():
        pass
    assert harness.frame_socket.is_full and harness.loop.scheduler.has_work
    paused_at = harness.executor.num_steps
    assert not harness.loop.tick() and harness.executor.num_steps == paused_at
    thread, codes = run_in_thread(harness)
    deadline = time.monotonic() + 60
    while len(harness.ends()) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    for request in requests:
        assert harness.tokens(request.request_id) == expected_tokens(request, 100)
    harness.send(messages.Stop())
    thread.join(60)
    assert codes == [EXIT_OK]


class Clock:
    """Clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def busy_harness(clock: Clock) -> Harness:
    """Harness whose steps write more than the socket takes, and whose heartbeat is always due."""
    harness = Harness(full_bytes=40_000, max_model_len=100, num_blocks=110, heartbeat_interval_s=0.0, clock=clock)
    harness.ask(*(make_request(number, [number], max_tokens=90, logprobs=20) for number in (1, 2, 3, 4)))
    return harness


def test_a_frontend_that_reads_is_kept_after_long_steps() -> None:
    clock = Clock()
    harness = busy_harness(clock)
    for _ in range(4):
        clock.now += 1000.0  # of steps, without a wait
        harness.loop.tick()
        harness.receive()
    while harness.loop.tick():
        pass
    harness.loop._wait()
    assert harness.frame_socket.has_pending and not harness.ends()


def test_a_frontend_that_reads_a_little_now_and_then_is_kept() -> None:
    clock = Clock()
    harness = busy_harness(clock)
    while harness.loop.tick():
        pass
    for _ in range(6):
        clock.now += 40.0
        harness.reader.feed(harness.ours.recv(1 << 16))
        assert harness.frame_socket.has_pending
        harness.loop._wait()


def test_a_frontend_that_never_reads_counts_as_gone() -> None:
    clock = Clock()
    harness = busy_harness(clock)
    while harness.loop.tick():
        pass
    for _ in range(2):
        clock.now += 30.0
        harness.loop._wait()
    clock.now += 1.0
    assert harness.loop.run() == EXIT_OK
    assert harness.loop.scheduler.has_work and harness.frame_socket.is_full


def test_a_frame_socket_raises_when_its_reader_is_gone() -> None:
    ours, theirs = socket.socketpair()
    frame_socket = FrameSocket(theirs)
    ours.close()
    with pytest.raises(FrameSocketClosedError):
        frame_socket.receive()
    with pytest.raises(FrameSocketClosedError):
        frame_socket.send(b"x")
    frame_socket.close()
