"""Every message reads back as it was written; a message with wrong fields is a `FrameError`."""

import math
import subprocess
import sys
from array import array
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.base.errors import StartupError
from oarlock.engine.config import EngineConfig
from oarlock.engine.core.engine_core import history, live_state
from oarlock.engine.errors import (
    ContextLengthError,
    QueueFullError,
    RequestError,
    StalledAdapterError,
    UnavailableError,
)
from oarlock.engine.ipc import messages
from oarlock.engine.ipc.frames import FrameError, FrameReader
from oarlock.engine.ipc.messages import (
    Config,
    Event,
    Events,
    RequestReader,
    Submit,
    encode,
    read_from_engine,
    read_from_frontend,
)
from oarlock.engine.stats import EngineStats
from oarlock.engine.types import (
    POOLS,
    AdapterInfo,
    EngineInfo,
    FinishReason,
    Grammar,
    PoolingParams,
    Request,
    SampledTokens,
    SamplingParams,
    ScoredTokens,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
)
from oarlock.workers.config import WorkerConfig
from tests.unit.engine.engine_fakes import Driver, make_config, make_request

_IDS = st.integers(0, 2**31 - 1)
_F32 = st.floats(width=32, allow_nan=False)
_LOGPROBS = st.builds(
    TokenLogprobs, _IDS, _F32, st.integers(1, 2**31 - 1), st.lists(st.tuples(_IDS, _F32), max_size=3).map(tuple)
)
_EVENTS = st.builds(
    TokenEvent,
    request_id=st.integers(0, 2**53),
    token_ids=st.lists(_IDS, max_size=3).map(tuple),
    logprobs=st.lists(_LOGPROBS, max_size=3).map(tuple),
    prompt_logprobs=st.lists(_LOGPROBS, max_size=3).map(tuple),
    num_cached_tokens=_IDS,
)
_ENDS = st.builds(
    TokenEvent,
    request_id=st.integers(0, 2**53),
    token_ids=st.lists(_IDS, max_size=3).map(tuple),
    finish_reason=st.sampled_from(FinishReason),
    stop_token_id=st.none() | _IDS,
    error=st.none() | st.text(),
    error_param=st.none() | st.text(),
    error_code=st.none() | st.text(),
)


def sent(message: messages.Message) -> Any:
    """Return the message as it arrives at the other end."""
    (payload,) = FrameReader().feed(encode(message))
    read = read_from_frontend if isinstance(message, messages.FromFrontend) else read_from_engine
    return read(payload)


def sent_request(request: Request, reader: RequestReader | None = None) -> Request:
    return (reader or RequestReader()).read(sent(Submit.of(request)))


def events_of(values, plain=()) -> TokenEvents:
    """`plain`: (request id, token id, number of cached tokens) of each."""
    ids, tokens, cached = zip(*plain, strict=True) if plain else ((), (), ())
    return TokenEvents(array("q", ids), array("i", tokens), array("i", cached), list(values))


def there_and_back(values) -> list[TokenEvent]:
    return list(sent(Events.of(events_of(values))).read())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_EVENTS | _ENDS, max_size=6),
    st.lists(st.tuples(st.integers(0, 2**63 - 1), _IDS, _IDS), max_size=6),
)
@pytest.mark.slow
def test_events(values, plain) -> None:
    expected = [TokenEvent(number, (token,), num_cached_tokens=cached) for number, token, cached in plain] + values
    events = sent(Events.of(events_of(values, plain))).read()
    assert list(events) == expected and len(events) == len(expected)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3), st.lists(st.tuples(_IDS, _IDS, _F32), min_size=2, max_size=4), st.data())
def test_scored_prompts_are_sent_as_columns(num_top, rows, data) -> None:
    top_ids, top = (
        data.draw(st.lists(of, min_size=len(rows) * num_top, max_size=len(rows) * num_top)) for of in (_IDS, _F32)
    )
    ids, ranks, logprobs = zip(*rows, strict=True)
    scored = ScoredTokens(
        num_top, array("i", ids), array("i", ranks), array("f", logprobs), array("i", top_ids), array("f", top)
    )
    values = [
        TokenEvent(1, (2,)),
        TokenEvent(3, (4,), prompt_logprobs=scored),
        TokenEvent(5, prompt_logprobs=scored[1:]),
    ]
    assert there_and_back(values) == values
    entries = [*scored]
    assert [entry.token_id for entry in entries] == [*ids] and len(entries) == len(scored)
    assert [pair for entry in entries for pair in entry.top] == [*zip(top_ids, top, strict=True)]
    assert [*scored[1:3]] == entries[1:3] and [scored[index - len(rows)] for index in range(len(rows))] == entries


def test_sampled_logprobs_are_sent_as_far_as_they_are_shown() -> None:
    """With rows that nobody wants between them, drafts, fewer alternatives than others, and events of other kinds."""
    ranks, own = array("i", range(1, 7)), array("f", [-0.5 * row for row in range(6)])
    top_ids, top = array("i", range(12)), array("f", [-math.inf if n % 5 == 0 else -n / 4 for n in range(12)])
    table = ScoredTokens(2, array("i", range(10, 16)), ranks, own, top_ids, top)
    values = [
        TokenEvent(1, (11,), SampledTokens(table, 1, 1, 2)),
        TokenEvent(2, (12, 13), SampledTokens(table, 2, 2, 1), num_cached_tokens=3),
        TokenEvent(3, (9,)),
        TokenEvent(4, (15,), SampledTokens(table, 5, 1, 0), finish_reason=FinishReason.LENGTH),
        TokenEvent(5, (3,), (TokenLogprobs(3, -0.5, 1, ((3, -0.5), (4, -2.0), (5, -3.0))),)),
    ]
    assert there_and_back(values) == values
    entries = [list(one.logprobs) for one in there_and_back(values)]
    assert entries[1] == [TokenLogprobs(12, -1.0, 3, ((4, -1.0),)), TokenLogprobs(13, -1.5, 4, ((6, -1.5),))]
    assert entries[0][0].top == ((2, -0.5), (3, -0.75)) and entries[3] == [TokenLogprobs(15, -2.5, 6)]


@pytest.mark.parametrize(
    "others", [[], [TokenEvent(9, (8, 7), (TokenLogprobs(8, -0.5, 1), TokenLogprobs(7, -1.0, 2)))]]
)
def test_logprobs_of_plain_events_are_columns(others) -> None:
    table = ScoredTokens(
        2, array("i", [11, 13]), array("i", [1, 3]), array("f", [-0.5, -1.5]),
        array("i", range(4)), array("f", [-0.5, -1.0, -0.25, -2.0]),
    )  # fmt: skip
    plain = events_of(others, [(1, 11, 0), (2, 12, 4), (3, 13, 0)])
    plain.num_top, plain.logprobs = array("i", [2, -1, 1]), table
    read = sent(Events.of(plain)).read()
    assert list(read) == list(plain) and (read.num_top, read.logprobs) == (plain.num_top, table)
    first, none, last, *_ = read
    assert list(first.logprobs) == [TokenLogprobs(11, -0.5, 1, ((0, -0.5), (1, -1.0)))] and none.logprobs == ()
    assert list(last.logprobs) == [TokenLogprobs(13, -1.5, 3, ((2, -0.25),))]
    for wrong in ([2, -1, -1], [2, -1, 3], [2, -2, 1], [2, 1]):
        plain.num_top = array("i", wrong)
        with pytest.raises(FrameError, match="do not fit"):
            sent(Events.of(plain)).read()


def test_vectors_are_sent_with_their_bits() -> None:
    vectors = array("f", [0.1, -0.0, 3e38, 1e-45])
    values = [
        TokenEvent(1, pooled=vectors),
        TokenEvent(2, (3,), (TokenLogprobs(3, -0.5, 1),)),
        TokenEvent(4, pooled=vectors[1:], finish_reason=FinishReason.STOP),
    ]
    assert there_and_back(values) == values
    assert [array("f", one.pooled).tobytes() for one in there_and_back(values)[::2]] == [
        vectors.tobytes(),
        vectors[1:].tobytes(),
    ]
    split = list(messages.chunks(events_of(values), most_entries=4))
    assert [[one.request_id for one in chunk] for chunk in split] == [[1], [2, 4]]


def test_infinite_logprobs_are_sent() -> None:
    event = TokenEvent(1, (2,), (TokenLogprobs(2, -math.inf, 5, ((1, 0.0), (2, -math.inf))),))
    assert there_and_back([event]) == [event]


def test_requests() -> None:
    params = SamplingParams(
        max_tokens=7, temperature=0.25, seed=-(2**63), eos_token_ids=(1, 2), stop_token_ids=(3,), prompt_logprobs=2
    )
    request = Request(
        9, (1, 2, 2**31 - 1), params, priority=-3, cache_salt=b"\x00\xff", client="team a", adapter="poems"
    )
    assert sent_request(request) == request
    for pooling in (PoolingParams("mean"), PoolingParams("logits", (7, 3))):
        request = Request(9, (1, 2), POOLS, pooling=pooling)
        assert sent_request(request) == request
    with pytest.raises(FrameError):
        Submit.of(Request(1, (2,), SamplingParams(allowed_token_ids=(-(2**31) - 1,))))
    with pytest.raises(FrameError):
        Submit.of(Request(1, (2**31,), SamplingParams()))
    with pytest.raises(FrameError):
        Submit.of(Request(1, (2,), SamplingParams(stop_token_ids=(2**64,))))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(_IDS, min_size=1, max_size=4).map(tuple),
    st.builds(
        SamplingParams,
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.001, 10),
        logit_bias=st.lists(st.tuples(_IDS, st.floats(-100, 100)), max_size=3).map(tuple),
        allowed_token_ids=st.none() | st.lists(_IDS, max_size=4).map(partial(array, "i")),
        bad_words=st.lists(st.lists(_IDS, max_size=3).map(tuple), max_size=3).map(tuple),
        grammar=st.none() | st.builds(Grammar, *[st.text(max_size=9)] * 3),
    ),
)
def test_constraints_are_sent(prompt, params) -> None:
    request = Request(1, prompt, params)
    assert sent_request(request) == request


@pytest.mark.parametrize(
    ("index", "value"),
    [(0, array("f", [1.0])), (0, None), (1, array("q", [1])), (2, {"max_tokens": "x"}), (4, "salt"), (8, {"kind": 3})],
)
def test_bodies_with_wrong_fields(index: int, value: Any) -> None:
    body = messages._read_body(Submit.of(Request(1, (1, 2), SamplingParams(allowed_token_ids=(5,)))).body)
    fields = list(msgspec.structs.astuple(body))
    RequestReader().read(Submit(1, msgspec.Raw(messages._ENCODER.encode(fields))))
    fields[index] = value
    for wrong in (fields, fields[:-2], [*fields, 1]):
        with pytest.raises(FrameError):
            RequestReader().read(Submit(1, msgspec.Raw(messages._ENCODER.encode(wrong))))


def test_the_choices_of_a_request_share_their_long_lists() -> None:
    reader = RequestReader()

    def read(number: int, **other) -> Request:
        params = {"seed": number, "allowed_token_ids": array("i", (5, 6, 7)), "bad_words": ((6, 8), (9,))} | other
        request = Request(number, (1, 2, 3, number // 3), SamplingParams(**params))
        back = sent_request(request, reader)
        assert back == request
        return back

    first, second = read(1), read(2)
    assert first.prompt_token_ids is second.prompt_token_ids
    assert first.params.allowed_token_ids is second.params.allowed_token_ids
    assert first.params.bad_words is second.params.bad_words
    other = read(3, bad_words=((6,), (8, 9)))
    assert other.prompt_token_ids is not first.prompt_token_ids, "and equal ones alone"


@pytest.mark.parametrize(
    "error",
    [
        RequestError("bad", "prompt", "c"),
        ContextLengthError("long"),
        QueueFullError("full", 2.5),
        UnavailableError("lost", "grammar_process_lost"),
    ],
)
def test_refusals(error) -> None:
    message = sent(messages.Refused.of(4, error))
    got = message.exception()
    assert message.request_id == 4
    assert type(got) is type(error) and vars(got) == vars(error) and str(got) == str(error)


def test_other_errors_are_not_sent_as_refusals() -> None:
    with pytest.raises(TypeError):
        messages.Refused.of(1, ValueError("x"))  # type: ignore[arg-type]


def test_start_and_end() -> None:
    config = EngineConfig(WorkerConfig("a model\udcff", max_model_len=5), max_waiting_requests=3)
    assert sent(Config.of(config)).read() == config
    info = EngineInfo(1, 2, 3, 4, 5, 6, 7, "cpu", "float32", "x", "A", 8, 9, 10, True, 0.5, 11, 12, rank_pids=(11, 12))
    stats = EngineStats(num_accepted=3)
    stats.step_time_s.observe(0.2)
    for message in (
        messages.Progress("loading", 0.5),
        messages.Progress("waiting", 0.5, "for node 1"),
        messages.Ready(info),
        messages.Ready(replace(info, max_silence_s=9.5)),
        messages.Dead("gone", 5),
        messages.Stats(6, stats),
        messages.AskStats(6),
        messages.AskState(6),
        messages.AskHistories(6, [1, 2]),
        messages.Histories(6, []),
        messages.ResetCache(7),
        messages.CacheReset(7, 40),
        messages.AddAdapter(8, "poems", "00" * 16, "/adapters/poems"),
        messages.RemoveAdapter(9, "poems"),
        messages.AdapterDone(9, 3),
        messages.AskAdapters(10),
        messages.Adapters(10, [AdapterInfo("poems", "00" * 16, "/adapters/poems", "ready", 1, 3)]),
        messages.Abort(7),
        messages.Alive(8),
        messages.Stop(),
    ):
        assert sent(message) == message
    assert sent(messages.Dead.of("no \udcff", 5)) == messages.Dead("no \\udcff", 5)
    failed = sent(messages.Failed.of(StartupError("cause \udcff", "fix", 4))).error()
    assert (failed.cause, failed.fix, failed.exit_code) == ("cause \\udcff", "fix", 4)
    refused = sent(messages.AdapterDone.refused(9, RequestError("bad", "lora_path", "c")))
    with pytest.raises(RequestError) as caught:
        refused.read()
    assert (caught.value.message, caught.value.param, caught.value.code) == ("bad", "lora_path", "c")
    stalled = StalledAdapterError("poems", "/adapters/poems")
    with pytest.raises(UnavailableError) as unavailable:
        sent(messages.AdapterDone.refused(9, stalled)).read()
    assert (unavailable.value.message, unavailable.value.code) == (stalled.message, stalled.code)


def test_the_state_and_the_history_of_an_engine() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    for number in (1, 2, 3):
        driver.add(make_request(number, range(number, number + 9), max_tokens=5))
    for _ in range(3):
        driver.step()
    state = live_state(driver.scheduler, driver.now)
    assert state["running"] and state["waiting"]
    known = [one for number in (1, 3) if (one := history(driver.scheduler, number)) is not None]
    assert len(known) == 2
    for message in (messages.State(1, state), messages.Histories(2, known)):
        assert sent(message) == message
    del state["kv"]  # type: ignore[misc]
    with pytest.raises(FrameError, match="kv"):
        sent(messages.State(1, state))


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(FrameError, match=r"version 0123abcd, those of the engine .*must be restarted"):
        Config("0123abcd", EngineConfig(WorkerConfig("model")).to_json()).read()
    for wrong in ("{", "[]", '{"worker": {}}', "{}"):
        with pytest.raises(FrameError, match="a bad configuration"):
            Config(messages.schema_digest(), wrong).read()


@pytest.mark.slow
def test_the_version_does_not_depend_on_the_interpreter() -> None:
    code = "from oarlock.engine.ipc.messages import schema_digest; print(schema_digest())"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == messages.schema_digest()


def test_values_that_cannot_be_sent_are_a_typed_error() -> None:
    for wrong in ("\ud800", 2**64, object()):
        with pytest.raises(FrameError, match="Progress message that cannot be sent"):
            encode(messages.Progress(wrong, 0.5))  # type: ignore[arg-type]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_ENCODED = [
    encode(message)[8:]
    for message in (
        Submit.of(Request(1, (1, 2), SamplingParams(bad_words=((1, 2),), allowed_token_ids=(3,)))),
        Config.of(EngineConfig(WorkerConfig("model"))),
        messages.Refused(1, "queue_full", "full"),
        messages.Stats(6, EngineStats()),
        messages.Blocks(False, [bytes(32)], [bytes(32)]),
        Events(bytes(8), bytes(4), bytes(4), [Event(3, (1, 2), 0, (TokenLogprobs(1, -0.5, 1, ((2, -1.0),)),))]),
    )
]


def read_wholly(payload: bytes) -> None:
    """Read a payload as either side would."""
    for read in (read_from_frontend, read_from_engine):
        try:
            message = read(memoryview(payload))
        except FrameError:
            continue
        if isinstance(message, Submit):
            RequestReader().read(message)
        elif isinstance(message, Config | Events | messages.Blocks):
            message.read()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*messages.FromFrontend.__args__, *messages.FromEngine.__args__]), st.lists(_VALUES, max_size=6))
def test_wrong_fields_are_typed_errors(kind: type, values: list[Any]) -> None:
    with suppress(FrameError):
        read_wholly(msgspec.msgpack.encode([kind.__name__, *values]))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(_ENCODED), st.data())
def test_damaged_messages_are_typed_errors(payload: bytes, data) -> None:
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FrameError):
        read_wholly(bytes(damaged[: data.draw(st.integers(1, len(damaged)))]))


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x90", b"\xc0", b"\x91\xa4Stop\x00", b"\x91\xa7Unknown", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff",
     b"\x92\xa5Abort\xa1x", b"\x93\xa5Abort\x01\x02", b'{"kind":"stop"}'],
)  # fmt: skip
def test_payloads_that_are_no_message(payload: bytes) -> None:
    for read in (read_from_frontend, read_from_engine):
        with pytest.raises(FrameError, match="not a message"):
            read(memoryview(payload))


_TABLE = ScoredTokens(1, array("i", [1]), array("i", [1]), array("f", [0.0]), array("i", [2]), array("f", [-1.0]))


@pytest.mark.parametrize(
    "wrong",
    [
        Events(bytes(16), bytes(4), bytes(8)),
        Events(bytes(16), bytes(8), bytes(4)),
        Events(bytes(4), bytes(2), bytes(2)),
        Events(bytes(8), bytes(4), bytes(4), logprobs=_TABLE),
        Events(bytes(8), bytes(4), bytes(4), num_top=array("q", [1]), logprobs=_TABLE),
        Events(b"", b"", b"", [Event(1, (), 0, pooled=array("i", [1]))]),
        *(
            Events(b"", b"", b"", [Event(1, (), 0, prompt_logprobs=replace(_TABLE, **change))])
            for change in (
                {"num_top": -1},
                {"num_top": 2},
                {"ranks": array("i")},
                {"ranks": array("f", [1.0])},
                {"top_logprobs": array("f", [0.0, 1.0])},
            )
        ),
    ],
)
def test_columns_that_do_not_fit(wrong: Events) -> None:
    with pytest.raises(FrameError):
        sent(wrong).read()


def test_arrays_of_other_types_are_typed_errors() -> None:
    for code, data in ((ord("i"), b"\x00\x00\x00"), (ord("z"), b""), (1, b""), (-1, bytes(4))):
        event = [3, [], 0, [], [], None, None, None, None, None, msgspec.msgpack.Ext(code, data)]
        with pytest.raises(FrameError):
            read_from_engine(memoryview(msgspec.msgpack.encode(["Events", b"", b"", b"", [event]]))).read()


def test_large_answers_are_cut_into_several_frames() -> None:
    entries = tuple(TokenLogprobs(1, 0.0, 1) for _ in range(10))
    values = [TokenEvent(number, prompt_logprobs=entries) for number in range(7)]
    events = events_of(values, [(9, 8, 7)])
    chunks = list(messages.chunks(events, most_entries=40))
    assert [len(chunk) for chunk in chunks] == [3, 2, 2, 1]
    assert [event for chunk in chunks for event in chunk] == list(events)
