"""The desk and the forge: requests wait apart, share compilations, leave at will; hostile grammars hurt themselves."""

import json
import os
import select
import signal
import threading
import time
from dataclasses import replace

import psutil
import pytest
from engine_fakes import make_request
from grammar_fakes import DEMO, END, allowed, encode

from engine.errors import INTERNAL, EngineError, QueueFullError, RequestError, UnavailableError
from engine.sampling_params import Grammar
from engine.structured_output import compile_jobs as grammar_jobs
from engine.structured_output import manager as grammar_desk
from engine.structured_output import sandbox as grammar_forge
from engine.structured_output import sandbox_client as grammar_lanes
from engine.structured_output.compiler import GrammarError
from engine.structured_output.manager import Outcome, StructuredOutputManager

CHAIN = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(4000)), 'r4000: "a"'])  # ends any stack
ENDLESS = json.dumps({"type": "integer", "multipleOf": 999_983})  # seconds of work in a few bytes


@pytest.fixture(scope="module")
def shared_desk():
    desk = StructuredOutputManager.open(str(DEMO))
    yield desk
    desk.close()


@pytest.fixture
def desk(shared_desk):
    yield shared_desk
    shared_desk.abort_all()


def asked(number: int, kind: str, text: str, **params):
    return make_request(number, [1, 2], grammar=Grammar(kind, text, "guided_regex"), eos_token_ids=(END,), **params)


def outcomes(desk, count: int) -> dict[int, Outcome]:
    """The next `count` of them, by request; the descriptor must announce each."""
    found: dict[int, Outcome] = {}
    while len(found) < count:
        assert select.select([desk], [], [], 30)[0], "nothing came"
        found |= {outcome.request.request_id: outcome for outcome in desk.take()}
    assert not select.select([desk], [], [], 0.05)[0], "it is still announced"
    return found


def test_a_new_grammar_is_waited_for_and_a_known_one_is_not(desk):
    assert desk.enter(asked(1, "regex", "a(b|c)"), 5.0) is None
    assert desk.num_parked == 1
    outcome = outcomes(desk, 1)[1]
    assert (outcome.arrival_s, outcome.error, desk.num_parked) == (5.0, None, 0)
    again = desk.enter(asked(2, "regex", "a(b|c)"), 6.0)
    assert again is not None and again is not outcome.state
    outcome.state.accept(encode("a"))
    assert encode("b")[0] in allowed(outcome.state) and encode("a")[0] in allowed(again)


def test_requests_share_one_compilation_but_not_their_state(desk):
    for number in range(1, 6):
        assert desk.enter(asked(number, "choice", '["left","right"]'), float(number)) is None
    assert list(desk._waiting) == [("choice", '["left","right"]')]
    found = outcomes(desk, 5)
    assert len({id(outcome.state) for outcome in found.values()}) == 5


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(((", "unclosed"),
        ("lark", CHAIN, grammar_forge.TOO_MUCH),
        ("json_schema", ENDLESS, grammar_forge.TOO_LONG),
    ],
    ids=["wrong", "crashes", "endless"],
)
def test_a_hostile_grammar_is_refused_alone(desk, kind, text, reason):
    desk.enter(asked(1, kind, text), 0.0)
    desk.enter(asked(2, "regex", f"innocent|{kind}"), 0.0)
    found = outcomes(desk, 2)
    error = found[1].error
    assert isinstance(error, RequestError) and found[1].state is None
    assert reason in error.message and (error.param, error.code) == ("guided_regex", "invalid_grammar")
    assert found[2].error is None


def test_what_is_wrong_is_remembered_but_not_what_was_only_slow(desk):
    for text, is_kept in (("[", True), (CHAIN, True)):
        kind = "regex" if text == "[" else "lark"
        if desk._kept.get((kind, text)) is None:
            desk.enter(asked(1, kind, text), 0.0)
            outcomes(desk, 1)
        with pytest.raises(RequestError):
            desk.enter(asked(2, kind, text), 0.0)
        assert ((kind, text) in desk._kept) is is_kept
    assert ("json_schema", ENDLESS) not in desk._kept


def test_who_leaves_while_it_compiles_leaves_nothing_behind(desk):
    desk.enter(asked(1, "regex", "leaving(1|2)"), 0.0)
    desk.enter(asked(2, "regex", "leaving(1|2)"), 0.0)
    assert desk.abort(1) and not desk.abort(1) and not desk.abort(99)
    assert desk.num_parked == 1
    assert list(outcomes(desk, 1)) == [2]
    assert not desk._waiting and desk.enter(asked(3, "regex", "leaving(1|2)"), 0.0) is not None


class SlowForge:
    """Finds nothing wrong with any grammar, but not before it is told to go on."""

    def __init__(self):
        self.asked = []
        self.go_on = threading.Event()

    def ask(self, number, grammar):
        self.asked.append(grammar.text)
        assert self.go_on.wait(30)

    def close(self):
        self.go_on.set()


@pytest.fixture
def slow_desk():
    """Both lanes at work on the grammars of requests 1 and 2, with no end in sight."""
    desk = StructuredOutputManager.open(str(DEMO))
    desk._forge = SlowForge()
    for number in (1, 2):
        desk.enter(asked(number, "regex", f"{number}x"), 0.0)
    deadline = time.monotonic() + 30
    while len(desk._forge.asked) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    yield desk
    desk.close()


def rest(desk) -> set[int]:
    """Who has an outcome once nothing is compiled any more, whichever lane is done first."""
    found = set()
    while desk._waiting:
        assert select.select([desk], [], [], 30)[0], "nothing came"
        found |= {outcome.request.request_id for outcome in desk.take()}
    return found


def test_what_nobody_waits_for_any_more_is_not_compiled(slow_desk):
    for number in range(3, 1003):
        slow_desk.enter(asked(number, "regex", f"{number}x"), 0.0)
        slow_desk.abort(number)
    assert (len(slow_desk._jobs), len(slow_desk._waiting), slow_desk.num_parked) == (0, 2, 2)
    slow_desk.abort(1)
    slow_desk.enter(asked(1, "regex", "wanted"), 0.0)
    slow_desk._forge.go_on.set()
    assert rest(slow_desk) == {1, 2} and sorted(slow_desk._forge.asked) == ["1x", "2x", "wanted"]


def test_who_shares_a_grammar_keeps_it_when_another_leaves(slow_desk):
    for number in (3, 4):
        slow_desk.enter(asked(number, "regex", "shared"), 0.0)
    slow_desk.abort(3)
    slow_desk.abort(1)
    slow_desk.enter(asked(5, "regex", "1x"), 0.0)  # what is being compiled is joined, though nobody waited for it
    slow_desk._forge.go_on.set()
    assert rest(slow_desk) == {2, 4, 5}
    assert slow_desk._forge.asked.count("1x") == 1


def test_a_full_queue_of_grammars_is_said_at_once(slow_desk, monkeypatch):
    monkeypatch.setattr(grammar_jobs, "MAX_JOBS", 3)
    for number in (3, 4, 5):
        slow_desk.enter(asked(number, "regex", f"{number}x"), 0.0)
    with pytest.raises(QueueFullError, match="at most 3") as refusal:
        slow_desk.enter(asked(6, "regex", "6x"), 0.0)
    assert 1 <= refusal.value.retry_after_s <= 60 and slow_desk.num_parked == 5
    slow_desk.enter(asked(7, "regex", "5x"), 0.0)  # no job of its own
    slow_desk.enter(replace(asked(8, "regex", "8x"), has_place=True), 0.0)
    slow_desk.abort_all()
    assert (len(slow_desk._jobs), slow_desk.num_parked, slow_desk.num_parked_tokens) == (0, 0, 0)
    monkeypatch.setattr(grammar_jobs, "MAX_CHARACTERS", 10)
    slow_desk.enter(asked(9, "regex", "a" * 100), 0.0)
    with pytest.raises(QueueFullError, match="10 characters"):
        slow_desk.enter(asked(10, "regex", "b"), 0.0)


def test_the_tokens_of_those_who_wait_are_counted(slow_desk):
    assert slow_desk.num_parked_tokens == 4
    slow_desk.abort(1)
    assert slow_desk.num_parked_tokens == 2
    slow_desk._forge.go_on.set()
    rest(slow_desk)
    assert slow_desk.num_parked_tokens == 0


def test_a_lost_forge_is_started_again(desk):
    desk.enter(asked(1, "regex", "before(x|y)"), 0.0)
    outcomes(desk, 1)
    first = desk._forge._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    desk.enter(asked(2, "regex", "after(x|y)"), 0.0)
    assert outcomes(desk, 1)[2].error is None
    assert desk._forge._process is not first


def test_a_forge_that_stays_lost_is_our_fault_and_nothing_is_remembered(desk, monkeypatch):
    desk._forge.close()
    desk._forge._is_closed = False
    monkeypatch.setattr(grammar_lanes, "_MODULE", ("-c", "pass"))  # ends before it has answered
    desk.enter(asked(1, "regex", "lost(x|y)"), 0.0)
    desk.enter(asked(2, "regex", "lost(x|y)"), 0.0)
    found = outcomes(desk, 2)
    assert all(type(found[number].error) is UnavailableError for number in (1, 2))
    assert found[1].error is not found[2].error and found[1].error.code == "grammar_process_lost"
    monkeypatch.undo()
    assert desk.enter(asked(3, "regex", "lost(x|y)"), 0.0) is None, "nothing is known of this grammar"
    assert outcomes(desk, 1)[3].error is None


def test_our_own_mistake_with_a_grammar_is_no_refusal(desk, monkeypatch):
    monkeypatch.setattr(desk._compiler, "compile", lambda grammar: 1 / 0)
    desk.enter(asked(1, "regex", "broken(x|y)"), 0.0)
    error = outcomes(desk, 1)[1].error
    assert isinstance(error, EngineError) and str(error) == INTERNAL
    monkeypatch.undo()
    assert desk.enter(asked(2, "regex", "broken(x|y)"), 0.0) is None
    assert outcomes(desk, 1)[2].error is None


def test_no_more_is_kept_than_the_limit(desk, monkeypatch):
    monkeypatch.setattr(grammar_desk, "MAX_KEPT", 2)
    for number in range(4):
        desk.enter(asked(number, "choice", f'["{number}"]'), 0.0)
        outcomes(desk, 1)
    assert list(desk._kept) == [("choice", '["2"]'), ("choice", '["3"]')]
    assert desk._kept_characters == 10
    monkeypatch.setattr(grammar_desk, "MAX_KEPT_CHARACTERS", 11)
    desk.enter(asked(9, "choice", '["9", "10"]'), 0.0)
    outcomes(desk, 1)
    assert list(desk._kept) == [("choice", '["9", "10"]')]


def test_a_request_id_is_used_once(desk):
    desk.enter(asked(1, "regex", "once"), 0.0)
    with pytest.raises(RequestError, match="in use"):
        desk.enter(asked(1, "regex", "once"), 0.0)


def test_a_model_without_readable_tokens_is_served_without_grammars(tmp_path):
    desk = StructuredOutputManager.open(str(tmp_path))
    with pytest.raises(RequestError, match=r"tokenizer\.json") as refusal:
        desk.enter(asked(1, "regex", "a"), 0.0)
    assert refusal.value.param == "guided_regex" and desk.take() == []
    desk.close()


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


class _Endless:
    def compile(self, grammar):
        time.sleep(60)


class _Greedy:
    def compile(self, grammar):
        return bytearray(8 << 30)


class _Deep:
    def compile(self, grammar):
        os.kill(os.getpid(), signal.SIGKILL)


class _Wrong:
    def compile(self, grammar):
        raise GrammarError("it is wrong")


@pytest.mark.parametrize(
    ("compiler", "verdict"),
    [
        (_Endless(), grammar_forge.TOO_LONG),
        (_Greedy(), grammar_forge.TOO_MUCH),
        (_Deep(), grammar_forge.TOO_MUCH),
        (_Wrong(), "it is wrong"),
    ],
    ids=["time", "memory", "stack", "wrong"],
)
def test_a_trial_is_really_ended(compiler, verdict, monkeypatch):
    monkeypatch.setattr(grammar_forge, "DEADLINE_S", 0.3 if isinstance(compiler, _Endless) else 30)
    before = _children()  # servers that other tests share
    assert grammar_forge._try(compiler, Grammar("regex", "a")) == verdict
    assert _children() <= before, "the trial outlives its verdict"
