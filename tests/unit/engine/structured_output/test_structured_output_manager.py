"""The structured output manager and its sandbox: pending requests, shared compilations, hostile grammars."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest

from oarlock.engine.errors import INTERNAL, EngineError, QueueFullError, RequestError, UnavailableError
from oarlock.engine.structured_output import grammar_memory, sandbox
from oarlock.engine.structured_output import manager as manager_module
from oarlock.engine.structured_output.compiler import GrammarError
from oarlock.engine.structured_output.manager import TOO_LONG_CACHED_S, Outcome, StructuredOutputManager
from oarlock.engine.structured_output.sandbox import TOO_LONG, Trial
from oarlock.engine.types import Grammar
from tests.house.rules import ROOT
from tests.unit.engine.engine_fakes import make_request
from tests.unit.engine.structured_output.grammar_fakes import DEMO, END, allowed, encode

CHAIN = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(4000)), 'r4000: "a"'])  # ends any stack
ENDLESS = json.dumps({"type": "integer", "multipleOf": 999_983})  # seconds of work in a few bytes


@pytest.fixture(scope="module")
def shared_manager():
    manager = StructuredOutputManager.open(str(DEMO))
    yield manager
    manager.close()


@pytest.fixture
def manager(shared_manager):
    yield shared_manager
    shared_manager.abort_all()


def asked(number: int, kind: str, text: str, **params):
    return make_request(number, [1, 2], grammar=Grammar(kind, text, "guided_regex"), eos_token_ids=(END,), **params)


def outcomes(manager, count: int) -> dict[int, Outcome]:
    """The next `count` outcomes by request id; the descriptor must be readable for each."""
    found: dict[int, Outcome] = {}
    while len(found) < count:
        assert select.select([manager], [], [], 30)[0], "no outcome"
        found |= {outcome.request.request_id: outcome for outcome in manager.poll(0.0)}
    if select.select([manager], [], [], 0.05)[0]:  # a thread may tell of an outcome that was just taken
        assert manager.poll(0.0) == []
        assert not select.select([manager], [], [], 0.05)[0], "still readable"
    return found


@pytest.mark.slow
def test_a_new_grammar_makes_its_request_pending_and_a_known_one_does_not(manager):
    assert manager.submit(asked(1, "regex", "a(b|c)"), 5.0) is None
    assert manager.num_pending == 1
    outcome = outcomes(manager, 1)[1]
    assert (outcome.arrival_s, outcome.error, manager.num_pending) == (5.0, None, 0)
    again = manager.submit(asked(2, "regex", "a(b|c)"), 6.0)
    assert again is not None and again is not outcome.matcher
    outcome.matcher.accept(encode("a"))
    assert encode("b")[0] in allowed(outcome.matcher) and encode("a")[0] in allowed(again)


def test_requests_share_one_compilation_but_not_their_matcher(manager):
    for number in range(1, 6):
        assert manager.submit(asked(number, "choice", '["left","right"]'), float(number)) is None
    assert list(manager.waiting) == [("choice", '["left","right"]')]
    found = outcomes(manager, 5)
    assert len({id(outcome.matcher) for outcome in found.values()}) == 5


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(((", "unclosed"),
        ("lark", CHAIN, sandbox.TOO_MUCH),
        ("json_schema", ENDLESS, sandbox.TOO_LONG),
    ],
    ids=["wrong", "crashes", "endless"],
)
@pytest.mark.slow
def test_a_hostile_grammar_is_refused_alone(manager, kind, text, reason):
    manager.submit(asked(1, kind, text), 0.0)
    manager.submit(asked(2, "regex", f"innocent|{kind}"), 0.0)
    found = outcomes(manager, 2)
    error = found[1].error
    assert isinstance(error, RequestError) and found[1].matcher is None
    assert reason in error.message and (error.param, error.code) == ("guided_regex", "invalid_grammar")
    assert found[2].error is None


def test_a_grammar_that_takes_too_long_is_refused_at_once_until_it_is_tried_again(manager, monkeypatch):
    tried = []
    monkeypatch.setattr(
        manager._sandbox, "check", lambda number, grammar: tried.append(grammar.text) or Trial(TOO_LONG)
    )
    manager.submit(asked(1, "regex", "slow(a|b)"), 0.0)
    assert outcomes(manager, 1)[1].error.message.endswith(f"{TOO_LONG}.")
    for number in (2, 3):
        with pytest.raises(RequestError, match=TOO_LONG):
            manager.submit(asked(number, "regex", "slow(a|b)"), TOO_LONG_CACHED_S - 1)
    assert tried == ["slow(a|b)"] and manager.num_pending == 0
    assert manager.submit(asked(4, "regex", "slow(a|b)"), TOO_LONG_CACHED_S) is None, "the machine may have been slow"
    outcomes(manager, 1)
    assert tried == ["slow(a|b)"] * 2


def test_refusals_are_kept_within_a_bound_and_take_no_place_of_compiled_grammars(manager, monkeypatch):
    monkeypatch.setattr(manager_module, "MAX_REFUSED", 3)
    manager.submit(asked(1, "regex", "wanted(a|b)"), 0.0)
    outcomes(manager, 1)
    monkeypatch.setattr(manager._sandbox, "check", lambda number, grammar: Trial("it is wrong"))
    for number in range(2, 100):
        manager.submit(asked(number, "regex", f"{number}["), 0.0)
    outcomes(manager, 98)
    assert len(manager._refused) == 3
    assert manager.submit(asked(1, "regex", "wanted(a|b)"), 0.0) is not None


def test_an_abort_during_compilation_leaves_nothing_behind(manager):
    manager.submit(asked(1, "regex", "leaving(1|2)"), 0.0)
    manager.submit(asked(2, "regex", "leaving(1|2)"), 0.0)
    assert manager.abort(1) and not manager.abort(1) and not manager.abort(99)
    assert manager.num_pending == 1
    assert list(outcomes(manager, 1)) == [2]
    assert not manager.waiting and manager.submit(asked(3, "regex", "leaving(1|2)"), 0.0) is not None


class SlowSandbox:
    """Accepts every grammar once `go_on` is set."""

    def __init__(self):
        self.asked = []
        self.go_on = threading.Event()

    def check(self, number, grammar):
        self.asked.append(grammar.text)
        assert self.go_on.wait(30)
        return Trial(None)

    def close(self):
        self.go_on.set()


@pytest.fixture
def slow_manager():
    """Manager whose two threads are at work on the grammars of requests 1 and 2 until `go_on` is set."""
    manager = StructuredOutputManager.open(str(DEMO))
    manager._sandbox = SlowSandbox()
    for number in (1, 2):
        manager.submit(asked(number, "regex", f"{number}x"), 0.0)
    deadline = time.monotonic() + 30
    while len(manager._sandbox.asked) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    yield manager
    manager.close()


def rest(manager) -> set[int]:
    """The requests that get an outcome until nothing is compiled any more."""
    found = set()
    while manager.waiting:
        assert select.select([manager], [], [], 30)[0], "no outcome"
        found |= {outcome.request.request_id for outcome in manager.poll(0.0)}
    return found


def test_a_grammar_that_no_request_needs_is_not_compiled(slow_manager):
    for number in range(3, 1003):
        slow_manager.submit(asked(number, "regex", f"{number}x"), 0.0)
        slow_manager.abort(number)
    assert (len(slow_manager._jobs), len(slow_manager.waiting), slow_manager.num_pending) == (0, 2, 2)
    slow_manager.abort(1)
    slow_manager.submit(asked(1, "regex", "wanted"), 0.0)
    slow_manager._sandbox.go_on.set()
    assert rest(slow_manager) == {1, 2} and sorted(slow_manager._sandbox.asked) == ["1x", "2x", "wanted"]


def test_an_abort_does_not_take_a_shared_grammar_from_others(slow_manager):
    for number in (3, 4):
        slow_manager.submit(asked(number, "regex", "shared"), 0.0)
    slow_manager.abort(3)
    slow_manager.abort(1)
    slow_manager.submit(asked(5, "regex", "1x"), 0.0)  # joins the running compilation, though no request needed it
    slow_manager._sandbox.go_on.set()
    assert rest(slow_manager) == {2, 4, 5}
    assert slow_manager._sandbox.asked.count("1x") == 1


def test_a_full_queue_of_grammars_refuses_at_once(slow_manager, monkeypatch):
    monkeypatch.setattr(manager_module, "MAX_JOBS", 3)
    for number in (3, 4, 5):
        slow_manager.submit(asked(number, "regex", f"{number}x"), 0.0)
    with pytest.raises(QueueFullError, match="at most 3") as refusal:
        slow_manager.submit(asked(6, "regex", "6x"), 0.0)
    assert 1 <= refusal.value.retry_after_s <= 60 and slow_manager.num_pending == 5
    slow_manager.submit(asked(7, "regex", "5x"), 0.0)  # no job of its own
    slow_manager.submit(replace(asked(8, "regex", "8x"), is_admitted=True), 0.0)
    slow_manager.abort_all()
    assert (len(slow_manager._jobs), slow_manager.num_pending, slow_manager.pending_by_client) == (0, 0, {})
    monkeypatch.setattr(manager_module, "MAX_CHARACTERS", 10)
    slow_manager.submit(asked(9, "regex", "a" * 100), 0.0)
    with pytest.raises(QueueFullError, match="10 characters"):
        slow_manager.submit(asked(10, "regex", "b"), 0.0)


def test_pending_requests_are_counted_by_client(slow_manager):
    slow_manager.submit(replace(asked(3, "regex", "3x"), client="b"), 0.0)
    assert slow_manager.pending_by_client == {"": (2, 4), "b": (1, 2)}
    slow_manager.abort(1)
    slow_manager.abort(3)
    assert slow_manager.pending_by_client == {"": (1, 2)}
    slow_manager._sandbox.go_on.set()
    rest(slow_manager)
    assert slow_manager.pending_by_client == {}


def test_clients_take_turns_at_the_compiler_and_each_has_a_share_of_its_queue(slow_manager, monkeypatch):
    """One has asked for many grammars before the other comes."""
    monkeypatch.setattr(manager_module, "MAX_JOBS", 6)
    many = [replace(asked(number, "regex", f"{number}x"), client="many") for number in range(3, 9)]
    for request in many:
        slow_manager.submit(request, 0.0)
    with pytest.raises(QueueFullError):
        slow_manager.submit(replace(many[0], request_id=9, params=asked(9, "regex", "9x").params), 0.0)
    for number, text in ((10, "10x"), (11, "11x"), (12, "8x")):  # the last one waits behind all of the other client
        slow_manager.submit(replace(asked(number, "regex", text), client="few"), 0.0)
    taken = [slow_manager._jobs.get() for _ in range(8)]
    assert [client for client, _ in taken] == ["many", "few"] * 3 + ["many"] * 2
    assert [grammar.text for _, grammar in taken] == ["3x", "10x", "4x", "11x", "5x", "8x", "6x", "7x"]


def test_a_lost_sandbox_is_started_again(manager):
    manager.submit(asked(1, "regex", "before(x|y)"), 0.0)
    outcomes(manager, 1)
    first = manager._sandbox._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    manager.submit(asked(2, "regex", "after(x|y)"), 0.0)
    assert outcomes(manager, 1)[2].error is None
    assert manager._sandbox._process is not first


@pytest.mark.slow
def test_a_sandbox_that_stays_lost_is_the_engines_fault_and_nothing_is_kept(manager, monkeypatch):
    manager._sandbox.close()
    manager._sandbox._is_closed = False
    monkeypatch.setattr(sandbox, "_MODULE", ("-c", "pass"))  # ends before it has answered
    manager.submit(asked(1, "regex", "lost(x|y)"), 0.0)
    manager.submit(asked(2, "regex", "lost(x|y)"), 0.0)
    found = outcomes(manager, 2)
    assert all(type(found[number].error) is UnavailableError for number in (1, 2))
    assert found[1].error is not found[2].error and found[1].error.code == "grammar_process_lost"
    monkeypatch.undo()
    assert manager.submit(asked(3, "regex", "lost(x|y)"), 0.0) is None, "nothing is kept of this grammar"
    assert outcomes(manager, 1)[3].error is None


def test_an_exception_in_the_compiler_is_no_refusal(manager, monkeypatch):
    monkeypatch.setattr(manager._compiler, "compile", lambda grammar: 1 / 0)
    manager.submit(asked(1, "regex", "broken(x|y)"), 0.0)
    error = outcomes(manager, 1)[1].error
    assert isinstance(error, EngineError) and str(error) == INTERNAL
    monkeypatch.undo()
    assert manager.submit(asked(2, "regex", "broken(x|y)"), 0.0) is None
    assert outcomes(manager, 1)[2].error is None


def test_no_more_is_kept_than_the_limit(manager, monkeypatch):
    monkeypatch.setattr(manager_module, "MAX_CACHED", 2)
    for number in range(4):
        manager.submit(asked(number, "choice", f'["{number}"]'), 0.0)
        outcomes(manager, 1)
    assert list(manager._cache) == [("choice", '["2"]'), ("choice", '["3"]')]
    assert manager._cached_characters == 10
    monkeypatch.setattr(manager_module, "MAX_CACHED_CHARACTERS", 11)
    manager.submit(asked(9, "choice", '["9", "10"]'), 0.0)
    outcomes(manager, 1)
    assert list(manager._cache) == [("choice", '["9", "10"]')]


def test_a_request_id_is_used_once(manager):
    manager.submit(asked(1, "regex", "once"), 0.0)
    with pytest.raises(RequestError, match="in use"):
        manager.submit(asked(1, "regex", "once"), 0.0)


def test_a_model_without_readable_tokens_is_served_without_grammars(tmp_path):
    manager = StructuredOutputManager.open(str(tmp_path))
    with pytest.raises(RequestError, match=r"tokenizer\.json") as refusal:
        manager.submit(asked(1, "regex", "a"), 0.0)
    assert refusal.value.param == "guided_regex" and manager.poll(0.0) == []
    manager.close()


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


class _Endless:
    def compile(self, grammar):
        while True:
            pass


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
    ("compiler", "problem"),
    [
        (_Endless(), sandbox.TOO_LONG),
        (_Greedy(), sandbox.TOO_MUCH),
        (_Deep(), sandbox.TOO_MUCH),
        (_Wrong(), "it is wrong"),
    ],
    ids=["time", "memory", "stack", "wrong"],
)
@pytest.mark.slow
def test_a_trial_is_ended_at_its_limits(compiler, problem, monkeypatch):
    monkeypatch.setattr(sandbox, "DEADLINE_S", 0.3 if isinstance(compiler, _Endless) else 30)
    before = _children()  # servers that other tests share
    assert sandbox._try(compiler, Grammar("regex", "a"), lambda: None).problem == problem
    assert _children() <= before, "the trial outlives its result"


def test_a_client_that_shares_a_waiting_grammar_need_not_wait_for_the_others_turn() -> None:
    jobs = manager_module.CompileJobs(num_threads=2)
    for text in ("first", "second"):
        jobs.put(Grammar("regex", text), "loud")
        jobs.get()
        if text == "first":
            jobs.done("loud", 60.0)  # compilations are slow: each client has one thread at a time
    last = Grammar("regex", "last")
    jobs.put(last, "loud")
    taken: list[object] = []
    idle = threading.Thread(target=lambda: taken.append(jobs.get()), daemon=True)
    idle.start()
    while not jobs._changed._waiters:  # ty: ignore[unresolved-attribute]
        time.sleep(0.001)
    jobs.share(manager_module.key_of(last), "quiet")
    idle.join(60)
    assert taken == [("quiet", last)]


class PanicException(BaseException):
    """The class of the same name that PyO3 raises."""


def _panic(*_):
    raise PanicException("index out of bounds")


@pytest.mark.slow
def test_a_panic_of_the_library_is_a_refusal_wherever_it_comes(manager, monkeypatch):
    manager.submit(asked(1, "regex", "panics(a|b)"), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(manager_module, "GrammarMatcher", _panic)
        error = outcomes(manager, 1)[1].error
        assert isinstance(error, RequestError) and "index out of bounds" in error.message
        with pytest.raises(RequestError, match="index out of bounds"):
            manager.submit(asked(2, "regex", "panics(a|b)"), 0.0)
    assert manager.submit(asked(3, "regex", "panics(a|b)"), 0.0) is not None
    monkeypatch.setattr(manager._compiler, "compile", _panic)
    manager.submit(asked(4, "regex", "more(a|b)"), 0.0)
    assert str(outcomes(manager, 1)[4].error) == INTERNAL, "and the thread lives"
    monkeypatch.undo()
    manager.submit(asked(5, "regex", "more(a|b)"), 0.0)
    assert outcomes(manager, 1)[5].error is None


def _sandbox_processes(manager) -> list[psutil.Process]:
    """Return the sandbox's process and its forks. Other tests of this worker may have sandboxes of their own."""
    process = psutil.Process(manager._sandbox._process.pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_hung_or_killed_sandbox_is_started_again_within_seconds(manager, monkeypatch, how):
    monkeypatch.setattr(sandbox, "_SILENCE_S", 1.0)
    for number in range(4):  # both connections have given a sign of life
        manager.submit(asked(number, "regex", f"first{how}{number}"), 0.0)
    outcomes(manager, 4)
    hung = _sandbox_processes(manager)
    for process in hung:
        process.send_signal(how)
    for number in (10, 11):
        manager.submit(asked(number, "regex", f"second{how}{number}"), 0.0)
    assert [outcome.error for outcome in outcomes(manager, 2).values()] == [None, None]
    _, alive = psutil.wait_procs(hung, timeout=10)
    assert not alive, "a stopped process is left"


@pytest.mark.slow
def test_a_sandbox_that_hangs_again_is_our_503(manager, monkeypatch):
    manager._sandbox.close()
    manager._sandbox._is_closed = False
    monkeypatch.setattr(sandbox, "_START_S", 0.5)
    monkeypatch.setattr(sandbox, "_MODULE", ("-c", "import time; time.sleep(60)"))
    manager.submit(asked(1, "regex", "hangs(x|y)"), 0.0)
    error = outcomes(manager, 1)[1].error
    assert isinstance(error, UnavailableError) and error.code == "grammar_process_lost"
    monkeypatch.undo()
    assert manager.submit(asked(2, "regex", "hangs(x|y)"), 0.0) is None, "nothing is kept of this grammar"
    assert outcomes(manager, 1)[2].error is None


class _Asleep:
    def compile(self, grammar):
        time.sleep(60)


@pytest.mark.slow
def test_a_trial_that_does_not_run_is_no_refusal_and_gives_signs_of_life(monkeypatch):
    monkeypatch.setattr(sandbox, "_PATIENCE_S", 1.0)
    monkeypatch.setattr(sandbox, "_BEAT_S", 0.1)
    beats: list[None] = []
    trial = sandbox._check(_Asleep(), Grammar("regex", "a"), lambda: beats.append(None))
    assert trial.is_lost and trial.problem is None and len(beats) > 5


def test_compiled_grammars_are_kept_within_bytes_and_refused_beyond_them(manager, monkeypatch):
    """A grammar counts as long as a request uses it, and a client has half."""
    mib = 1 << 20
    monkeypatch.setattr(manager_module, "MAX_CACHED_BYTES", 20 * mib)
    monkeypatch.setattr(grammar_memory, "MAX_BYTES", 100 * mib)
    monkeypatch.setattr(grammar_memory, "MAX_CLIENT_BYTES", 50 * mib)
    monkeypatch.setattr(manager._sandbox, "check", lambda number, grammar: Trial(None, 15 * mib))
    manager._cache.clear()
    manager._cached_bytes = manager._cached_characters = 0
    manager._memory = grammar_memory.GrammarMemory()

    def ask(number: int, client: str):
        manager.submit(replace(asked(number, "regex", f"{number}(sized|other)"), client=client), 0.0)
        return outcomes(manager, 1)[number]

    for number in range(100, 110):
        assert ask(number, "one").error is None
    assert len(manager._cache) == 1 and manager._cached_bytes == manager._memory.num_bytes() == 15 * mib
    used = [ask(number, "one") for number in range(200, 203)]
    assert all(outcome.matcher is not None for outcome in used)
    error = ask(300, "one").error
    assert isinstance(error, QueueFullError) and "memory" in error.message
    used += [ask(number, "two") for number in range(400, 403)]
    assert all(outcome.matcher is not None for outcome in used) and ask(500, "three").error is not None
    used.clear()
    assert ask(301, "one").error is None and manager._memory.num_bytes() <= 30 * mib


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_the_measured_size_is_that_of_the_grammar_and_is_given_back():
    # In a process of its own: memory that earlier tests have used may return to the system meanwhile.
    script = f"from {__name__} import measure_grammars; measure_grammars()"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def measure_grammars() -> None:
    manager = StructuredOutputManager.open(str(DEMO))
    names = [f"property_{number}" for number in range(800)]
    grammar_memory.trim()  # otherwise grammars take memory that the start has freed
    before = grammar_memory.resident_bytes()
    try:
        for number in range(6):
            schema = {"type": "object", "properties": {f"{name}{number}": {"type": "string"} for name in names}}
            manager.submit(asked(number, "json_schema", json.dumps(schema)), 0.0)
            assert outcomes(manager, 1)[number].error is None
        told, grown = manager._memory.num_bytes(), grammar_memory.resident_bytes() - before
        assert told > 4 << 20 and 0.5 < grown / told < 2, (
            f"{told} bytes were counted, and the process has grown by {grown}"
        )
        while manager._cache:
            manager._drop_oldest()
        assert manager._memory.num_bytes() == 0
        assert grammar_memory.resident_bytes() - before < grown / 2
    finally:
        manager.close()
