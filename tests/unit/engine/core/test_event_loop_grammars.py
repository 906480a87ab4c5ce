"""The engine's loop and requests whose grammar is being compiled: they count as waiting and delay no other request."""

import os
import select
import socket
from dataclasses import replace

import pytest

from oarlock.engine.core.event_loop import SERVER_STOPPING, EngineLoop
from oarlock.engine.errors import QueueFullError, RequestError, UnavailableError
from oarlock.engine.input_batch.sampling_metadata import fill_one_by_one
from oarlock.engine.ipc import messages
from oarlock.engine.ipc.frames import FrameReader, FrameSocket
from oarlock.engine.lora.registry import UNLOADED
from oarlock.engine.structured_output.manager import Outcome
from oarlock.engine.types import FinishReason, Grammar
from tests.unit.engine.engine_fakes import FakeExecutor, expected_tokens, make_config, make_info, make_request
from tests.unit.engine.sampling_fakes import CountingGrammar


class FakeManager:
    """A `StructuredOutputManager` that compiles when the test calls `compile`."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.pending: dict[int, tuple] = {}
        self.done: list[Outcome] = []
        self.read, self.write = os.pipe()

    def fileno(self) -> int:
        return self.read

    @property
    def waiting(self) -> list:
        return [*self.pending, *self.done]

    @property
    def pending_by_client(self) -> dict[str, tuple[int, int]]:
        clients: dict[str, list[int]] = {}
        for request, _ in self.pending.values():
            clients.setdefault(request.client, []).append(len(request.prompt_token_ids))
        return {client: (len(lengths), sum(lengths)) for client, lengths in clients.items()}

    def submit(self, request, now):
        if request.params.grammar.text == "0":
            raise RequestError("It is wrong.", request.params.grammar.param)
        if request.params.grammar.text in self.known:
            return CountingGrammar(request.params.grammar)
        self.pending[request.request_id] = (request, now)
        return None

    def compile(self, *, error: RequestError | UnavailableError | None = None) -> None:
        for request, now in self.pending.values():
            matcher = None if error else CountingGrammar(request.params.grammar)
            self.done.append(Outcome(request, now, matcher, error))
        self.pending = {}
        os.write(self.write, b"g")

    def poll(self, now):
        done, self.done = self.done, []
        return done

    def fill_masks(self, batch):
        return fill_one_by_one(batch)

    def abort(self, request_id):
        return self.pending.pop(request_id, None) is not None

    def abort_adapter(self, name):
        return [key for key, (request, _) in list(self.pending.items()) if request.adapter == name and self.abort(key)]

    def abort_all(self):
        left, self.pending = list(self.pending), {}
        return left


class Harness:
    """An `EngineLoop` with a `FakeManager` on one end of a socket."""

    depth = 1  # set by `depths`

    def __init__(self, **config) -> None:
        engine = make_config(pipeline_depth=self.depth, **config)
        self.ours, theirs = socket.socketpair()
        self.manager = FakeManager()
        executor = FakeExecutor(engine, make_info(engine, 33))
        self.loop = EngineLoop(engine, executor, FrameSocket(theirs), structured_output=self.manager)
        self.reader = FrameReader()
        self.refused: dict[int, Exception] = {}
        self.events: dict[int, list] = {}

    def send(self, message: messages.Message) -> None:
        self.ours.sendall(messages.encode(message))

    def ask(self, *requests) -> None:
        for request in requests:
            self.send(messages.Submit.of(request))
        self.run()

    def run(self) -> None:
        while self.loop.tick():
            pass
        self.loop.tick()
        while select.select([self.ours], [], [], 0)[0] and (data := self.ours.recv(1 << 16)):
            for message in map(messages.read_from_engine, self.reader.feed(data)):
                if isinstance(message, messages.Refused):
                    self.refused[message.request_id] = message.exception()
                elif isinstance(message, messages.Events):
                    for event in message.read():
                        self.events.setdefault(event.request_id, []).append(event)

    def tokens(self, number: int) -> list[int]:
        return [token for event in self.events[number] for token in event.token_ids]


@pytest.fixture(params=[1, 2], autouse=True)
def depths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs at both pipeline depths."""
    monkeypatch.setattr(Harness, "depth", request.param)


@pytest.fixture
def harness(depths: None):
    return Harness()


def bound(number: int, text: str = "3", **params):
    return make_request(number, [1, 2], max_tokens=5, grammar=Grammar("lark", text), **params)


def test_a_request_that_waits_for_its_grammar_delays_no_other(harness):
    harness.ask(bound(1), plain := make_request(2, [1, 2], max_tokens=4))
    assert 1 not in harness.events and harness.tokens(2) == expected_tokens(plain)
    assert not harness.loop.scheduler.has_work and harness.loop.snapshot().num_requests_waiting == 1
    harness.manager.compile()
    harness.run()
    assert harness.tokens(1) == expected_tokens(bound(1))
    assert harness.events[1][-1].finish_reason is FinishReason.STOP
    stats = harness.loop.snapshot()
    assert (stats.num_accepted, stats.num_requests_waiting, stats.num_rejected) == (2, 0, 0)


def test_unloading_ends_requests_that_wait_for_their_grammar():
    """A new content of the same name, which is there before the grammar is ready, never answers them."""
    harness = Harness(max_loras=1)
    first, second = (bytes([number] * 16).hex() for number in (1, 2))
    harness.send(messages.AddAdapter(1, "a", first, "/a"))
    harness.ask(bound(1, adapter="a"), bound(2))
    harness.send(messages.RemoveAdapter(2, "a"))
    harness.send(messages.AddAdapter(3, "a", second, "/b"))
    harness.run()
    (end,) = harness.events[1]
    assert (end.finish_reason, end.error_code, end.error_param) == (FinishReason.ERROR, UNLOADED, "model")
    harness.manager.compile()
    harness.run()
    assert len(harness.events[1]) == 1 and harness.tokens(2) == expected_tokens(bound(2))


def test_the_loop_is_woken_by_the_manager(harness):
    harness.ask(bound(1))
    harness.manager.compile()
    harness.loop._next_beat_s += 600  # nothing else would end the wait
    harness.loop._wait()
    harness.run()
    assert harness.tokens(1) == expected_tokens(bound(1))


def test_a_known_grammar_does_not_wait(harness):
    harness.manager.known.add("3")
    harness.ask(bound(1))
    assert harness.tokens(1) == expected_tokens(bound(1))


def noting(real, name: str, log: list[str]):
    def noted(*arguments, **options):
        log.append(name)
        return real(*arguments, **options)

    return noted


def test_events_are_sent_before_the_masks_that_wait_for_the_same_answer(harness, monkeypatch):
    """And those before the next step, whether or not the loop begins one."""
    log, loop = [], harness.loop
    for owner, name in (
        (loop.engine_core, "finish"),
        (loop._frame_socket, "send"),
        (loop.engine_core.executor, "send_masks"),
        (loop.engine_core.executor, "submit"),
    ):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name), name, log))
    harness.manager.known.add("4")
    harness.ask(bound(1, "4"))
    assert harness.tokens(1) == expected_tokens(bound(1, "4"))
    if harness.depth == 1:
        assert log[:6] == ["submit", "send_masks", "finish", "submit", "send", "send_masks"]
    else:
        assert log[:8] == ["submit", "send_masks", "submit", "finish", "send", "send_masks", "submit", "finish"]
        assert log[8:10] == ["send", "send_masks"]


def test_a_grammar_refused_at_once_or_later_fails_its_request_alone(harness):
    plain = make_request(3, [1, 2], max_tokens=4)
    harness.ask(bound(1, "0"), bound(2), plain)
    harness.manager.compile(error=RequestError("It is too slow.", "guided_json"))
    harness.run()
    assert [str(harness.refused[number]) for number in (1, 2)] == ["It is wrong.", "It is too slow."]
    assert harness.refused[2].param == "guided_json" and not harness.events.keys() - {3}
    assert harness.tokens(3) == expected_tokens(plain)
    assert harness.loop.snapshot().num_rejected == 2


def test_a_lost_sandbox_fails_one_request_by_the_engines_fault(harness):
    plain = make_request(2, [1, 2], max_tokens=4)
    harness.ask(bound(1), plain)
    harness.manager.compile(error=UnavailableError("It is lost.", "grammar_process_lost"))
    harness.run()
    refused = harness.refused[1]
    assert type(refused) is UnavailableError and (str(refused), refused.code) == ("It is lost.", "grammar_process_lost")
    assert harness.tokens(2) == expected_tokens(plain)
    stats = harness.loop.snapshot()
    assert (stats.num_rejected, stats.num_errors) == (0, 1)


def test_an_abort_while_waiting_ends_it_in_one_event(harness):
    harness.ask(bound(1), bound(2))
    harness.send(messages.Abort(1))
    harness.run()
    assert [event.finish_reason for event in harness.events[1]] == [FinishReason.ABORT]
    harness.manager.compile()
    harness.run()
    assert len(harness.events[1]) == 1 and harness.tokens(2) == expected_tokens(bound(2))


def test_a_request_that_could_never_run_does_not_wait_first(harness):
    harness.ask(make_request(1, [1] * 500, grammar=Grammar("lark", "3")))
    assert isinstance(harness.refused[1], RequestError) and not harness.manager.pending


def test_requests_that_wait_for_grammars_count_in_the_queue():
    harness = Harness(max_num_seqs=2, max_waiting_requests=3)
    harness.ask(*(bound(number) for number in range(1, 8)))
    assert sorted(harness.refused) == [6, 7] and isinstance(harness.refused[6], QueueFullError)
    harness.ask(make_request(8, [1, 2]))
    assert isinstance(harness.refused[8], QueueFullError), "pending requests keep their places"
    harness.manager.compile()
    harness.run()
    assert sorted(harness.events) == [1, 2, 3, 4, 5] and sorted(harness.refused) == [6, 7, 8]


def test_requests_of_one_client_that_wait_for_grammars_lock_no_other_client_out():
    harness = Harness(max_num_seqs=2, max_waiting_requests=8, max_waiting_tokens=40)
    harness.ask(*(bound(number, client="a") for number in range(1, 41)))
    assert sorted(harness.refused) == list(range(11, 41)), "two rows and eight places"
    plain = make_request(41, [1, 2], max_tokens=4, client="b")
    harness.ask(plain, *(bound(number, client="b") for number in range(42, 50)))
    assert harness.tokens(41) == expected_tokens(plain)
    assert sorted(number for number in harness.refused if number > 41) == [45, 46, 47, 48, 49], "half of the places"
    harness.ask(bound(50, client="a"))
    assert isinstance(harness.refused[50], QueueFullError)


def test_prompts_of_requests_that_wait_for_grammars_count_as_waiting_tokens():
    harness = Harness(max_waiting_tokens=5)
    harness.ask(bound(1), bound(2), bound(3), make_request(4, [1, 2]))
    assert sorted(harness.refused) == [3, 4] and isinstance(harness.refused[3], QueueFullError)
    stats = harness.loop.snapshot()
    assert (stats.num_requests_waiting, stats.num_waiting_tokens, stats.num_rejected) == (2, 4, 2)
    harness.manager.compile()
    harness.run()
    assert sorted(harness.events) == [1, 2]
    stats = harness.loop.snapshot()
    assert (stats.num_requests_waiting, stats.num_waiting_tokens) == (0, 0)


def test_a_request_is_not_refused_when_its_grammar_is_ready():
    harness = Harness(max_num_seqs=1, max_waiting_requests=1)
    harness.ask(bound(1), make_request(2, [1, 2], max_tokens=9))
    harness.send(messages.Submit.of(replace(make_request(3, [1, 2]), is_admitted=True)))
    harness.loop.tick()
    harness.manager.compile()
    harness.run()
    assert not harness.refused and sorted(harness.events) == [1, 2, 3]


def test_the_first_to_come_is_the_first_to_run():
    harness = Harness(max_num_seqs=1)
    harness.ask(bound(1))
    harness.send(messages.Submit.of(make_request(2, [1, 2], max_tokens=30)))
    harness.loop.tick()
    harness.send(messages.Submit.of(make_request(3, [1, 2], max_tokens=2)))
    harness.manager.compile()
    harness.run()
    assert list(harness.events) == [2, 1, 3], "2 runs already, and 1 came before 3"


def test_a_stop_ends_requests_that_wait_for_grammars(harness):
    harness.ask(bound(1))
    harness.loop.stop()
    harness.loop.run()
    harness.run()
    assert [(event.finish_reason, event.error) for event in harness.events[1]] == [
        (FinishReason.ERROR, SERVER_STOPPING)
    ]
