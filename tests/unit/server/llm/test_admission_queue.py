"""Which sequences are at the engine: windows, turns, places that are handed on, and what is never sent."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from oarlock.engine.errors import QueueFullError
from oarlock.engine.scheduler.request_queue import RequestQueue
from oarlock.server.llm.admission_queue import AdmissionQueue


class Engine:
    """Counts what it holds. Four may wait behind the two that run, with a hundred prompt tokens."""

    def __init__(self, **limits):
        self.admission_queue = AdmissionQueue(2, **{"max_waiting_requests": 4, "max_waiting_tokens": 100, **limits})
        self.sent = []  # (request, index, is_admitted)

    def ask(self, name, *tokens):
        return self.admission_queue.open(tokens, lambda *what: self.sent.append((name, *what)))

    def indices(self, name):
        return [index for sender, index, _ in self.sent if sender == name]


@pytest.fixture
def engine():
    return Engine()


def test_a_request_of_one_sequence_goes_at_once_however_full_it_is(engine):
    for number in range(20):
        engine.ask(number, 1)
    assert engine.sent == [(number, 0, False) for number in range(20)]


def test_one_request_has_at_most_what_can_run_and_as_many_again(engine):
    many = engine.ask("many", *[1] * 10)
    assert engine.sent == [("many", 0, False), ("many", 1, True), ("many", 2, True), ("many", 3, True)]
    many.ended(1)
    many.ended(0)
    assert engine.indices("many") == [0, 1, 2, 3, 4, 5]
    for index in range(2, 10):
        many.ended(index)
    assert engine.indices("many") == list(range(10)) and engine.admission_queue.is_idle


def test_half_of_the_queue_is_left_to_first_sequences(engine):
    others = [engine.ask(number, 1) for number in range(3)]
    many = engine.ask("many", *[1] * 5)
    assert engine.indices("many") == [0]
    many.ended(0)
    assert engine.indices("many") == [0, 1], "its place is its own"
    others[0].ended(0)
    assert engine.indices("many") == [0, 1, 2]


def test_requests_take_turns(engine):
    others = [engine.ask(number, 1) for number in range(3)]
    many = {name: engine.ask(name, *[1] * 5) for name in "ab"}
    for other, expected in zip(others, ([[0], [0]], [[0, 1], [0]], [[0, 1], [0, 1]]), strict=True):
        other.ended(0)
        assert [engine.indices(name) for name in "ab"] == expected
    many["a"].close()
    many["a"].ended(0)
    many["a"].ended(1)
    assert [engine.indices(name) for name in "ab"] == [[0, 1], [0, 1, 2, 3]]


def test_prompts_wait_by_their_tokens_until_those_before_them_run(engine):
    many = engine.ask("many", 30, 30, 30, 1)
    assert engine.indices("many") == [0]
    many.begun(0)
    assert engine.indices("many") == [0, 1]
    many.begun(0)
    assert engine.indices("many") == [0, 1], "only the first word counts"
    many.ended(1)
    assert engine.indices("many") == [0, 1, 2, 3]


def test_a_prompt_of_any_length_goes_when_nothing_else_of_its_request_is_there(engine):
    many = engine.ask("many", 1000, 2000, 3000)
    for index in range(3):
        assert engine.indices("many") == list(range(index + 1))
        many.ended(index)
    assert engine.admission_queue.is_idle


def test_closed_groups_send_nothing_more(engine):
    many = engine.ask("many", *[1] * 10)
    many.close()
    for index in range(4):
        many.ended(index)
    assert engine.indices("many") == [0, 1, 2, 3] and engine.admission_queue.is_idle
    many.close()


def test_a_queue_of_no_length_is_enough():
    engine = Engine(max_waiting_requests=0, max_waiting_tokens=0)
    many = engine.ask("many", *[5] * 6)
    for index in range(6):
        assert engine.indices("many") == list(range(index + 1))
        many.ended(index)


def test_low_priority_groups_run_one_sequence_until_other_requests_end(engine):
    others = [True]
    engine.admission_queue.others_are_open = lambda: others[0]
    batch = engine.admission_queue.open(
        [1] * 6, lambda *what: engine.sent.append(("batch", *what)), is_low_priority=True
    )
    assert engine.indices("batch") == [0]
    batch.begun(0)
    batch.ended(0)
    assert engine.indices("batch") == [0, 1], "it never waits for ever"
    many = engine.ask("many", *[1] * 3)
    assert engine.indices("many") == [0, 1, 2] and engine.indices("batch") == [0, 1]
    for index in range(3):
        many.ended(index)
    others[0] = False
    batch.begun(1)
    assert engine.indices("batch") == [0, 1, 2, 3, 4]
    others[0] = True
    for index in range(1, 4):
        batch.ended(index)
    assert engine.indices("batch") == [0, 1, 2, 3, 4]
    batch.ended(4)
    batch.ended(5)
    assert engine.indices("batch") == list(range(6)) and engine.admission_queue.is_idle


def test_requests_refused_before_reading_would_be_refused_by_the_engine():
    """Random scenes of clients beside the engine's own queue, which decides what is not certain."""
    refused = {True: 0, False: 0}
    for seed in range(300):
        draw = random.Random(seed)
        rows, places = draw.randint(1, 4), draw.randint(0, 9)
        queue, running = RequestQueue(places, 1000), []
        server = AdmissionQueue(rows, places, 1000)
        for number in range(60):
            client, is_low_priority = draw.choice("aaaab"), draw.random() < 0.1
            try:
                if not is_low_priority:  # those that yield have their place
                    queue.check(1, rows - len(running), 0.0, client)
            except QueueFullError:
                is_early = bool(list(early(server, client)))
                refused[is_early] += 1
            else:
                assert is_low_priority or not list(early(server, client)), seed
                request = SimpleNamespace(client=client, is_low_priority=is_low_priority)
                timeline = SimpleNamespace(first_scheduled_s=None)
                seq = SimpleNamespace(key=(0.0, number), request=request, num_prompt_tokens=1, timeline=timeline)
                queue.push(seq)
                seq.submission = server.open([1], lambda *what: None, is_low_priority=is_low_priority, client=client)
            while len(queue) and len(running) < rows and draw.random() < 0.9:
                running.append(queue[0])
                queue.admit(queue[0], 0.0)
            if running and draw.random() < 0.3:
                ended = running.pop(draw.randrange(len(running)))
                draw.choice([ended.submission.begun, lambda index: None])(0)
                ended.submission.ended(0)
    assert refused[True] > 3 * refused[False] > 0


def early(server, client):
    try:
        server.check_room(client)
    except QueueFullError as error:
        assert 1 <= error.retry_after_s <= 60
        yield error


def test_a_client_alone_is_refused_when_rows_and_places_are_taken_and_no_sooner(engine):
    first = [engine.ask(number, 1) for number in range(6)]
    assert list(early(engine.admission_queue, ""))
    first[0].ended(0)
    assert not list(early(engine.admission_queue, ""))


def test_a_client_within_its_share_is_never_refused_unread(engine):
    for _ in range(20):
        engine.admission_queue.open([1], lambda *what: None, client="loud")
    assert list(early(engine.admission_queue, "loud"))
    assert not list(early(engine.admission_queue, "quiet"))
