"""The loop over a real socket: containment of single requests, death of ranks, a frontend that does not read."""

import os
import select
import socket
import threading
import time
from collections.abc import Callable

import pytest
from engine_fakes import FakeGroup, Faults, expected_tokens, make_config, make_info, make_request

from engine.core import event_loop as core_module
from engine.core.event_loop import EXIT_BUG, EXIT_OK, EXIT_RANK_DIED, EXIT_RANK_HUNG, EngineLoop
from engine.errors import ContextLengthError, QueueFullError
from engine.ipc import messages
from engine.ipc.frame_socket import FrameSocket, LinkClosedError
from engine.ipc.frames import Frame, FrameReader, encode
from engine.types import FinishReason, TokenEvent

TERMINAL = (FinishReason.STOP, FinishReason.LENGTH)


class House:
    """A core on one end of a socket, a hand-driven frontend on the other."""

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        num_blocks: int = 33,
        full_bytes: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
        **config,
    ) -> None:
        engine = make_config(**config)
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(5)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that tests fill it soon
        self.group = FakeGroup(engine, make_info(engine, num_blocks), faults)
        self.wake_read, self.wake_write = os.pipe()
        self.link = FrameSocket(theirs, full_bytes=full_bytes, clock=clock)
        self.core = EngineLoop(engine, self.group, self.link, wake_fd=self.wake_read, clock=clock)
        self.reader = FrameReader()
        self.frames: list[Frame] = []

    def send(self, *frames: bytes) -> None:
        self.ours.sendall(b"".join(frames))

    def ask(self, *requests) -> None:
        self.send(*(messages.request(request) for request in requests))

    def run_until_idle(self) -> None:
        while self.core.tick():
            pass
        self.core.tick()

    def receive(self) -> list[Frame]:
        while select.select([self.ours], [], [], 0)[0] and (data := self.ours.recv(1 << 16)):
            self.frames += self.reader.feed(data)
        return self.frames

    def events(self) -> list[TokenEvent]:
        return [event for frame in self.receive() if frame.kind == "events" for event in messages.read_events(frame)]

    def ends(self) -> dict[int, TokenEvent]:
        ends = [event for event in self.events() if event.finish_reason is not None]
        assert len(ends) == len({event.request_id for event in ends}), "two terminal events for one request"
        return {event.request_id: event for event in ends}

    def tokens(self, request_id: int) -> list[int]:
        return [token for event in self.events() if event.request_id == request_id for token in event.token_ids]

    def check_idle(self) -> None:
        blocks = self.core.scheduler.kv_cache_manager
        self.core.scheduler.audit()
        assert not self.core.scheduler.has_work and blocks.num_free + blocks.num_cached == blocks.num_total


@pytest.fixture
def house():
    return House()


def test_requests_are_answered_in_one_frame_per_step(house: House) -> None:
    requests = [make_request(number, [number, 2, 3], max_tokens=5) for number in (1, 2, 3)]
    house.ask(*requests)
    house.run_until_idle()
    assert [frame.kind for frame in house.receive()] == ["events"] * 5
    for request in requests:
        assert house.tokens(request.request_id) == expected_tokens(request)
    house.check_idle()


def test_a_group_of_processes_computes_while_events_are_sent() -> None:
    house = House()
    house.core._sends_during_step = True
    request = make_request(1, [1, 2], max_tokens=4)
    house.ask(request)
    house.run_until_idle()
    assert house.tokens(1) == expected_tokens(request) and house.ends()[1].finish_reason in TERMINAL


def test_a_step_without_events_still_proves_life() -> None:
    house = House(max_num_batched_tokens=4)
    house.ask(make_request(1, range(10), max_tokens=1))
    house.run_until_idle()
    assert [frame.kind for frame in house.receive()] == ["alive", "alive", "events"]


def test_refusals_name_their_reason() -> None:
    house = House(max_num_seqs=1, max_waiting_requests=1)
    house.ask(make_request(1, [1]), make_request(2, [1] * 70), make_request(3, [1]), make_request(4, [1]))
    house.run_until_idle()
    refused = dict(messages.read_refused(frame) for frame in house.receive() if frame.kind == "refused")
    assert isinstance(refused[2], ContextLengthError) and isinstance(refused[4], QueueFullError)
    assert house.ends().keys() == {1, 3}


def test_a_reset_forgets_what_was_cached(house: House) -> None:
    request = make_request(1, range(9), max_tokens=3)
    cached = []
    for frames in ([], [], [messages.reset_cache(8)], []):
        house.send(*frames, messages.request(request))
        house.run_until_idle()
        cached.append(max(event.num_cached_tokens for event in house.events()))
        assert house.tokens(1) == expected_tokens(request)
        told = [messages.read_cache_reset(frame) for frame in house.frames if frame.kind == "cache_reset"]
        assert told == ([(8, 2)] if frames else [])
        house.frames.clear()
    assert cached == [0, 8, 0, 8]
    house.check_idle()


def test_an_abort_frees_within_a_step(house: House) -> None:
    house.ask(make_request(1, [1, 2], max_tokens=50))
    house.core.tick()
    house.send(messages.abort(1), messages.abort(99))
    assert not house.core.tick()
    assert house.ends()[1].finish_reason is FinishReason.ABORT
    house.check_idle()


def test_stats_and_an_orderly_stop(house: House) -> None:
    house.ask(make_request(1, [1, 2], max_tokens=50))
    house.core.tick()
    house.send(messages.ask_stats(5), messages.stop())
    assert house.core.run() == EXIT_OK
    (frame,) = [frame for frame in house.receive() if frame.kind == "stats"]
    number, stats = messages.read_stats(frame)
    assert number == 5 and stats.num_requests_running == 1 and stats.uptime_s > 0 and stats.state == "ready"
    assert house.ends()[1].finish_reason is FinishReason.ERROR
    assert "shutting down" in (house.ends()[1].error or "")
    house.check_idle()


@pytest.mark.parametrize(
    "faults, code", [(Faults(die_at_step=3), EXIT_RANK_DIED), (Faults(hang_at_step=3), EXIT_RANK_HUNG)]
)
@pytest.mark.parametrize("overlapping", [False, True])
def test_a_lost_rank_ends_every_request_with_one_event(faults: Faults, code: int, overlapping: bool) -> None:
    house = House(faults, max_num_seqs=2)
    house.core._sends_during_step = overlapping
    house.ask(*(make_request(number, [number], max_tokens=9) for number in range(1, 6)))
    assert house.core.run() == code
    ends = house.ends()
    assert ends.keys() == {1, 2, 3, 4, 5}
    assert {end.finish_reason for end in ends.values()} == {FinishReason.ERROR}
    assert all("rank" not in (end.error or "") and "signal" not in (end.error or "") for end in ends.values())
    (dead,) = [frame for frame in house.receive() if frame.kind == "dead"]
    cause, exit_code = messages.read_dead(dead)
    assert "rank 1" in cause and exit_code == code
    assert len(house.tokens(1)) == 2  # what was computed before has been delivered
    assert house.core.snapshot().state == "dead"


def test_a_mistake_of_the_loop_ends_everyone_cleanly(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.ask(make_request(1, [1], max_tokens=9))
    monkeypatch.setattr(house.core.scheduler, "schedule", lambda now: 1 / 0)
    assert house.core.run() == EXIT_BUG
    assert house.ends()[1].finish_reason is FinishReason.ERROR
    assert "ZeroDivisionError" in messages.read_dead(house.frames[0])[0]


def test_garbage_from_the_frontend_ends_the_loop(house: House) -> None:
    house.send(b"GET / HTTP/1.1\r\n\r\n")
    assert house.core.run() == EXIT_BUG
    other = House()
    other.send(encode({"kind": "surprise"}))
    assert other.core.run() == EXIT_BUG


def test_a_frontend_that_leaves_ends_the_loop(house: House) -> None:
    house.ask(make_request(1, [1], max_tokens=50))
    house.ours.close()
    assert house.core.run() == EXIT_OK


# -- one request's fault is one request's end

_STAGES = ["read", "add", "allocate", "allocate_slots", "build", "update_from_output", "cache_blocks", "send", "poison"]


def inject(house: House, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `stage` for request 2 alone."""
    scheduler, builder = house.core.scheduler, house.core.stepper._builder

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
        broken(house.core._request_reader, "read", lambda frame: frame.head["id"] == 2)
    elif stage == "add":
        broken(scheduler, "add", lambda request, now: request.request_id == 2)
    elif stage in ("allocate", "allocate_slots", "cache_blocks"):
        broken(scheduler.kv_cache_manager, stage, of_seq)
    elif stage == "build":
        broken(builder, "_assign", of_seq)
    elif stage == "update_from_output":
        broken(scheduler, "_append_token", of_seq)
    elif stage == "send":
        broken(core_module.messages, "_extra", lambda event, *_: event.request_id == 2 and not event.error)
    elif stage == "poison":
        house.group.faults = Faults(poisoned_seeds=(2,))


@pytest.mark.parametrize("stage", _STAGES)
def test_an_exception_in_one_request_fails_that_request_alone(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    requests = [make_request(number, range(number, number + 6), max_tokens=6, logprobs=0) for number in (1, 2, 3)]
    inject(house, stage, monkeypatch)
    house.ask(*requests)
    house.run_until_idle()
    ends = house.ends()
    assert ends[2].finish_reason is FinishReason.ERROR and "injected" not in (ends[2].error or "")
    for request in (requests[0], requests[2]):
        assert house.tokens(request.request_id) == expected_tokens(request)
    assert house.core.scheduler.stats.num_errors == 1
    house.check_idle()
    # and the next one is served as if nothing had been
    request = make_request(4, range(9), max_tokens=5)
    house.ask(request)
    house.run_until_idle()
    assert house.tokens(4) == expected_tokens(request)


def test_a_builder_that_fails_for_everyone_is_our_own_death(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = house.core.stepper._builder.build, []

    def broken(output):
        calls.append(output)
        if len(calls) == 1:
            raise RuntimeError("injected")
        return real(output)

    monkeypatch.setattr(house.core.stepper._builder, "build", broken)
    house.ask(make_request(1, [1]))
    assert house.core.run() == EXIT_BUG
    assert house.ends()[1].finish_reason is FinishReason.ERROR


def test_work_that_nobody_can_run_is_ended_not_spun_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.ask(make_request(1, [1]))
    monkeypatch.setattr(house.core.scheduler, "_start_running", lambda *_: False)
    assert house.core.tick() and not house.core.tick()
    assert house.ends()[1].finish_reason is FinishReason.ERROR


# -- idle


def run_in_thread(house: House) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(house.core.run()), daemon=True)
    thread.start()
    return thread, codes


def test_idle_is_silent_but_for_heartbeats_and_uses_no_processor() -> None:
    house = House(heartbeat_interval_s=0.1)
    turns = []
    real = house.core.tick
    house.core.tick = lambda: turns.append(1) or real()  # type: ignore[method-assign]
    thread, codes = run_in_thread(house)
    time.sleep(0.55)
    house.send(messages.stop())
    thread.join(5)
    assert codes == [EXIT_OK]
    kinds = [frame.kind for frame in house.receive()]
    assert kinds and set(kinds) == {"alive"} and len(kinds) == house.group.num_pings
    assert len(turns) <= len(kinds) + 3, "the idle loop turned more often than it was woken"


def test_a_rank_that_dies_while_idle_is_found_by_the_heartbeat() -> None:
    house = House(Faults(die_at_ping=2), heartbeat_interval_s=0.05)
    assert house.core.run() == EXIT_RANK_DIED
    assert [frame.kind for frame in house.receive()] == ["alive", "dead"]


def test_a_rank_that_dies_while_idle_is_found_at_once() -> None:
    read, write = os.pipe()
    engine = make_config(heartbeat_interval_s=1000.0)
    group = FakeGroup(engine, make_info(engine), Faults(die_at_ping=1))
    group.fileno_for_death = lambda: [read]  # type: ignore[method-assign]
    ours, theirs = socket.socketpair()
    os.close(write)
    assert EngineLoop(engine, group, FrameSocket(theirs)).run() == EXIT_RANK_DIED
    (frame,) = FrameReader().feed(ours.recv(1 << 16))
    assert frame.kind == "dead"
    os.close(read)


def test_stop_wakes_an_idle_loop() -> None:
    house = House(heartbeat_interval_s=1000.0)
    thread, codes = run_in_thread(house)
    house.core.stop()
    os.write(house.wake_write, b"x")
    thread.join(5)
    assert codes == [EXIT_OK]


# -- a frontend that does not read


def test_an_unread_link_pauses_the_engine_and_loses_nothing() -> None:
    house = House(full_bytes=2000, max_model_len=100, num_blocks=110)
    requests = [make_request(number, [number], max_tokens=90, logprobs=20) for number in (1, 2, 3, 4)]
    house.ask(*requests)
    while house.core.tick():
        pass
    assert house.link.is_full and house.core.scheduler.has_work
    paused_at = house.group.num_steps
    assert not house.core.tick() and house.group.num_steps == paused_at
    thread, codes = run_in_thread(house)
    deadline = time.monotonic() + 30
    while len(house.ends()) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    for request in requests:
        assert house.tokens(request.request_id) == expected_tokens(request, 100)
    house.send(messages.stop())
    thread.join(5)
    assert codes == [EXIT_OK]


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def busy_house(clock: Clock) -> House:
    """One whose steps write more than the socket takes, and whose heartbeat is always due."""
    house = House(full_bytes=40_000, max_model_len=100, num_blocks=110, heartbeat_interval_s=0.0, clock=clock)
    house.ask(*(make_request(number, [number], max_tokens=90, logprobs=20) for number in (1, 2, 3, 4)))
    return house


def test_a_frontend_that_reads_is_alive_however_long_the_engine_did_not_wait() -> None:
    clock = Clock()
    house = busy_house(clock)
    for _ in range(4):
        clock.now += 1000.0  # of steps, without a wait
        house.core.tick()
        house.receive()
    while house.core.tick():
        pass
    house.core._wait()
    assert house.link.has_pending and not house.ends()


def test_a_frontend_that_takes_a_little_now_and_then_is_alive() -> None:
    clock = Clock()
    house = busy_house(clock)
    while house.core.tick():
        pass
    for _ in range(6):
        clock.now += 40.0
        house.reader.feed(house.ours.recv(1 << 16))
        assert house.link.has_pending
        house.core._wait()


def test_a_frontend_that_never_reads_is_as_good_as_gone() -> None:
    clock = Clock()
    house = busy_house(clock)
    while house.core.tick():
        pass
    for _ in range(2):
        clock.now += 30.0
        house.core._wait()
    clock.now += 1.0
    assert house.core.run() == EXIT_OK
    assert house.core.scheduler.has_work and house.link.is_full


def test_a_link_says_when_its_reader_is_gone() -> None:
    ours, theirs = socket.socketpair()
    link = FrameSocket(theirs)
    ours.close()
    with pytest.raises(LinkClosedError):
        link.receive()
    with pytest.raises(LinkClosedError):
        link.send(b"x")
    link.close()
