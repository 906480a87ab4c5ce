"""The loop and the desk: who waits for a grammar counts as waiting, holds up nobody, ends in one event or refusal."""

import os
import select
import socket
from dataclasses import replace

import pytest
from choice_fakes import CountingGrammar
from engine_fakes import FakeGroup, expected_tokens, make_config, make_info, make_request

from engine.core.event_loop import STOPPING, EngineLoop
from engine.errors import QueueFullError, RequestError, UnavailableError
from engine.ipc import messages
from engine.ipc.frame_socket import FrameSocket
from engine.ipc.frames import FrameReader
from engine.sampling_params import Grammar
from engine.structured_output.manager import Outcome
from engine.types import FinishReason


class SlowDesk:
    """Compiles nothing until it is told to; a `StructuredOutputManager` for the loop."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.parked: dict[int, tuple] = {}
        self.done: list[Outcome] = []
        self.read, self.write = os.pipe()

    def fileno(self) -> int:
        return self.read

    @property
    def num_parked(self) -> int:
        return len(self.parked)

    @property
    def num_parked_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request, _ in self.parked.values())

    def enter(self, request, now):
        if request.params.grammar.text == "0":
            raise RequestError("It is wrong.", request.params.grammar.param)
        if request.params.grammar.text in self.known:
            return CountingGrammar(request.params.grammar)
        self.parked[request.request_id] = (request, now)
        return None

    def compile(self, *, error: RequestError | UnavailableError | None = None) -> None:
        for request, now in self.parked.values():
            state = None if error else CountingGrammar(request.params.grammar)
            self.done.append(Outcome(request, now, state, error))
        self.parked = {}
        os.write(self.write, b"g")

    def take(self):
        done, self.done = self.done, []
        return done

    def abort(self, request_id):
        return self.parked.pop(request_id, None) is not None

    def abort_all(self):
        left, self.parked = list(self.parked), {}
        return left


class House:
    """A core with that desk on one end of a socket."""

    def __init__(self, **config) -> None:
        engine = make_config(**config)
        self.ours, theirs = socket.socketpair()
        self.desk = SlowDesk()
        group = FakeGroup(engine, make_info(engine, 33))
        self.core = EngineLoop(engine, group, FrameSocket(theirs), grammars=self.desk)
        self.reader = FrameReader()
        self.refused: dict[int, Exception] = {}
        self.events: dict[int, list] = {}

    def ask(self, *requests) -> None:
        for request in requests:
            self.ours.sendall(messages.request(request))
        self.run()

    def run(self) -> None:
        while self.core.tick():
            pass
        self.core.tick()
        while select.select([self.ours], [], [], 0)[0] and (data := self.ours.recv(1 << 16)):
            for frame in self.reader.feed(data):
                if frame.kind == "refused":
                    number, error = messages.read_refused(frame)
                    self.refused[number] = error
                elif frame.kind == "events":
                    for event in messages.read_events(frame):
                        self.events.setdefault(event.request_id, []).append(event)

    def tokens(self, number: int) -> list[int]:
        return [token for event in self.events[number] for token in event.token_ids]


@pytest.fixture
def house():
    return House()


def bound(number: int, text: str = "3", **params):
    return make_request(number, [1, 2], max_tokens=5, grammar=Grammar("lark", text), **params)


def test_who_waits_for_a_grammar_holds_up_nobody(house):
    house.ask(bound(1), plain := make_request(2, [1, 2], max_tokens=4))
    assert 1 not in house.events and house.tokens(2) == expected_tokens(plain)
    assert not house.core.scheduler.has_work and house.core.snapshot().num_requests_waiting == 1
    house.desk.compile()
    house.run()
    assert house.tokens(1) == expected_tokens(bound(1))
    assert house.events[1][-1].finish_reason is FinishReason.STOP
    stats = house.core.snapshot()
    assert (stats.num_accepted, stats.num_requests_waiting, stats.num_rejected) == (2, 0, 0)


def test_the_loop_is_woken_by_the_desk(house):
    house.ask(bound(1))
    house.desk.compile()
    house.core._next_beat_s += 600  # nothing else would end the wait
    house.core._wait()
    house.run()
    assert house.tokens(1) == expected_tokens(bound(1))


def test_a_known_grammar_does_not_wait(house):
    house.desk.known.add("3")
    house.ask(bound(1))
    assert house.tokens(1) == expected_tokens(bound(1))


def test_a_grammar_that_is_refused_at_once_or_later_hurts_its_request_alone(house):
    plain = make_request(3, [1, 2], max_tokens=4)
    house.ask(bound(1, "0"), bound(2), plain)
    house.desk.compile(error=RequestError("It is too slow.", "guided_json"))
    house.run()
    assert [str(house.refused[number]) for number in (1, 2)] == ["It is wrong.", "It is too slow."]
    assert house.refused[2].param == "guided_json" and not house.events.keys() - {3}
    assert house.tokens(3) == expected_tokens(plain)
    assert house.core.snapshot().num_rejected == 2


def test_a_grammar_process_that_is_lost_fails_one_request_by_our_fault(house):
    plain = make_request(2, [1, 2], max_tokens=4)
    house.ask(bound(1), plain)
    house.desk.compile(error=UnavailableError("It is lost.", "grammar_process_lost"))
    house.run()
    refused = house.refused[1]
    assert type(refused) is UnavailableError and (str(refused), refused.code) == ("It is lost.", "grammar_process_lost")
    assert house.tokens(2) == expected_tokens(plain)
    stats = house.core.snapshot()
    assert (stats.num_rejected, stats.num_errors) == (0, 1)


def test_an_abort_while_waiting_ends_it_in_one_event(house):
    house.ask(bound(1), bound(2))
    house.ours.sendall(messages.abort(1))
    house.run()
    assert [event.finish_reason for event in house.events[1]] == [FinishReason.ABORT]
    house.desk.compile()
    house.run()
    assert len(house.events[1]) == 1 and house.tokens(2) == expected_tokens(bound(2))


def test_a_request_that_could_never_run_does_not_wait_first(house):
    house.ask(make_request(1, [1] * 500, grammar=Grammar("lark", "3")))
    assert isinstance(house.refused[1], RequestError) and not house.desk.parked


def test_those_who_wait_for_grammars_fill_the_waiting_room():
    house = House(max_num_seqs=2, max_waiting_requests=3)
    house.ask(*(bound(number) for number in range(1, 8)))
    assert sorted(house.refused) == [6, 7] and isinstance(house.refused[6], QueueFullError)
    house.ask(make_request(8, [1, 2]))
    assert isinstance(house.refused[8], QueueFullError), "their places are not anybody's"
    house.desk.compile()
    house.run()
    assert sorted(house.events) == [1, 2, 3, 4, 5] and sorted(house.refused) == [6, 7, 8]


def test_the_prompts_of_those_who_wait_for_grammars_count_as_waiting_tokens():
    house = House(max_waiting_tokens=5)
    house.ask(bound(1), bound(2), bound(3), make_request(4, [1, 2]))
    assert sorted(house.refused) == [3, 4] and isinstance(house.refused[3], QueueFullError)
    stats = house.core.snapshot()
    assert (stats.num_requests_waiting, stats.num_waiting_tokens, stats.num_rejected) == (2, 4, 2)
    house.desk.compile()
    house.run()
    assert sorted(house.events) == [1, 2]
    stats = house.core.snapshot()
    assert (stats.num_requests_waiting, stats.num_waiting_tokens) == (0, 0)


def test_who_waited_for_a_grammar_is_not_refused_when_it_is_ready():
    house = House(max_num_seqs=1, max_waiting_requests=1)
    house.ask(bound(1), make_request(2, [1, 2], max_tokens=9))
    house.ours.sendall(messages.request(replace(make_request(3, [1, 2]), has_place=True)))
    house.core.tick()
    house.desk.compile()
    house.run()
    assert not house.refused and sorted(house.events) == [1, 2, 3]


def test_the_first_to_come_is_the_first_to_run():
    house = House(max_num_seqs=1)
    house.ask(bound(1))
    house.ours.sendall(messages.request(make_request(2, [1, 2], max_tokens=30)))
    house.core.tick()
    house.ours.sendall(messages.request(make_request(3, [1, 2], max_tokens=2)))
    house.desk.compile()
    house.run()
    assert list(house.events) == [2, 1, 3], "2 runs already, and 1 came before 3"


def test_a_server_that_stops_says_so_to_those_who_wait(house):
    house.ask(bound(1))
    house.core.stop()
    house.core.run()
    house.run()
    assert [(event.finish_reason, event.error) for event in house.events[1]] == [(FinishReason.ERROR, STOPPING)]
