"""Every message reads back as it was written; a frame with wrong fields is a `FrameError`."""

import math
from array import array
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.base.errors import StartupError
from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import ContextLengthError, QueueFullError, RequestError
from oarlock.engine.ipc import messages
from oarlock.engine.ipc.frames import Frame, FrameError, FrameReader
from oarlock.engine.stats import EngineStats
from oarlock.engine.types import (
    POOLS,
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


def frame_of(data: bytes) -> Frame:
    (frame,) = FrameReader().feed(data)
    return frame


def events_of(values, plain=()) -> TokenEvents:
    """`plain`: (request id, token id, number of cached tokens) of each."""
    ids, tokens, cached = zip(*plain, strict=True) if plain else ((), (), ())
    return TokenEvents(array("q", ids), array("i", tokens), array("i", cached), list(values))


def there_and_back(values) -> list[TokenEvent]:
    return list(messages.read_events(frame_of(messages.events(events_of(values)))))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_EVENTS | _ENDS, max_size=6),
    st.lists(st.tuples(st.integers(0, 2**63 - 1), _IDS, _IDS), max_size=6),
)
@pytest.mark.slow
def test_events(values, plain) -> None:
    expected = [TokenEvent(number, (token,), num_cached_tokens=cached) for number, token, cached in plain] + values
    events = messages.read_events(frame_of(messages.events(events_of(values, plain))))
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
    data = messages.events(plain)
    read = messages.read_events(frame_of(data))
    assert list(read) == list(plain) and (read.num_top, read.logprobs) == (plain.num_top, table)
    first, none, last, *_ = read
    assert list(first.logprobs) == [TokenLogprobs(11, -0.5, 1, ((0, -0.5), (1, -1.0)))] and none.logprobs == ()
    assert list(last.logprobs) == [TokenLogprobs(13, -1.5, 3, ((2, -0.25),))]
    for wrong in ([2, -1, -1], [2, -1, 3]):
        plain.num_top = array("i", wrong)
        with pytest.raises(FrameError, match="do not fit"):
            messages.read_events(frame_of(messages.events(plain)))


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
    request = Request(9, (1, 2, 2**31 - 1), params, priority=-3, cache_salt=b"\x00\xff", client="team a")
    assert messages.RequestReader().read(frame_of(messages.request(request))) == request
    for pooling in (PoolingParams("mean"), PoolingParams("logits", (7, 3))):
        request = Request(9, (1, 2), POOLS, pooling=pooling)
        assert messages.RequestReader().read(frame_of(messages.request(request))) == request
    with pytest.raises(FrameError):
        messages.request(Request(1, (2,), SamplingParams(allowed_token_ids=(-(2**31) - 1,))))
    with pytest.raises(FrameError):
        messages.request(Request(1, (2**31,), SamplingParams()))


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
    back = messages.RequestReader().read(frame_of(messages.request(request)))
    assert back == request


@pytest.mark.parametrize(
    ("field", "value"), [("num_allowed", 5), ("num_allowed", -1), ("bad_words", [5]), ("bad_words", [4, -1])]
)
def test_more_ids_than_the_frame_holds(field, value) -> None:
    frame = frame_of(messages.request(Request(1, (1, 2), SamplingParams(allowed_token_ids=(5,), bad_words=((6,),)))))
    frame.head[field] = value
    with pytest.raises(FrameError):
        messages.RequestReader().read(frame)


def test_the_choices_of_a_request_share_their_long_lists() -> None:
    reader = messages.RequestReader()

    def read(number: int, **other) -> Request:
        params = {"seed": number, "allowed_token_ids": array("i", (5, 6, 7)), "bad_words": ((6, 8), (9,))} | other
        request = Request(number, (1, 2, 3, number // 3), SamplingParams(**params))
        back = reader.read(frame_of(messages.request(request)))
        assert back == request
        return back

    first, second = read(1), read(2)
    assert first.prompt_token_ids is second.prompt_token_ids
    assert first.params.allowed_token_ids is second.params.allowed_token_ids
    assert first.params.bad_words is second.params.bad_words
    other = read(3, bad_words=((6,), (8, 9)))
    assert other.prompt_token_ids is not first.prompt_token_ids, "and equal ones alone"


@pytest.mark.parametrize(
    "error", [RequestError("bad", "prompt", "c"), ContextLengthError("long"), QueueFullError("full", 2.5)]
)
def test_refusals(error) -> None:
    request_id, got = messages.read_refused(frame_of(messages.refused(4, error)))
    assert request_id == 4 and type(got) is type(error) and vars(got) == vars(error) and str(got) == str(error)


def test_other_errors_are_not_sent_as_refusals() -> None:
    with pytest.raises(TypeError):
        messages.refused(1, ValueError("x"))  # type: ignore[arg-type]


def test_start_and_end() -> None:
    config = EngineConfig(WorkerConfig("model", max_model_len=5), max_waiting_requests=3)
    assert messages.read_config(frame_of(messages.config(config))) == config
    info = EngineInfo(1, 2, 3, 4, 5, 6, 7, "cpu", "float32", "x", "A", 8, 9, 10, True, 0.5, 11, 12, rank_pids=(11, 12))
    assert messages.read_ready(frame_of(messages.ready(info))) == info
    assert messages.read_progress(frame_of(messages.progress("loading", 0.5))) == ("loading", 0.5, "")
    waiting = ("waiting", 0.5, "for node 1")
    assert messages.read_progress(frame_of(messages.progress(*waiting))) == waiting
    failed = messages.read_failed(frame_of(messages.failed(StartupError("cause", "fix", 4))))
    assert (failed.cause, failed.fix, failed.exit_code) == ("cause", "fix", 4)
    assert messages.read_dead(frame_of(messages.dead("gone", 5))) == ("gone", 5)
    stats = EngineStats(num_accepted=3)
    stats.step_time_s.observe(0.2)
    assert messages.read_stats(frame_of(messages.stats(6, stats))) == (6, stats)
    assert messages.read_number(frame_of(messages.ask_stats(6))) == 6
    assert messages.read_number(frame_of(messages.reset_cache(7))) == 7
    assert messages.read_cache_reset(frame_of(messages.cache_reset(7, 40))) == (7, 40)
    assert messages.read_id(frame_of(messages.abort(7))) == 7


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_READERS = [
    messages.read_config,
    messages.read_progress,
    messages.read_failed,
    messages.read_ready,
    messages.RequestReader().read,
    messages.read_refused,
    messages.read_id,
    messages.read_events,
    messages.read_stats,
    messages.read_number,
    messages.read_cache_reset,
    messages.read_dead,
]
_GOOD = {
    "id": 1,
    "ids": [1, 2],
    "counts": [1, 1],
    "cached": [0, 0],
    "plain": 1,
    "extra": [{"reason": "stop", "logprobs": [1]}, {}],
    "params": {"eos_token_ids": [], "stop_token_ids": [], "logit_bias": [], "bad_words": [], "grammar": None},
    "num_allowed": None,
    "priority": 0,
    "client": "",
    "salt": "00",
    "number": 1,
    "blocks": 2,
}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(_READERS), st.dictionaries(st.sampled_from([*_GOOD, "stats", "info", "config"]), _JSON), st.data()
)
@pytest.mark.slow
def test_frames_that_are_no_message_are_typed_errors(read, damage, data) -> None:
    frame = Frame({**_GOOD, "kind": "x", **damage})
    frame.ints.extend(data.draw(st.lists(st.integers(-9, 9), max_size=5)))
    try:
        read(frame)
    except FrameError:
        return
    # what was read without complaint can be read again: nothing was consumed or half done
    read(frame)


@pytest.mark.parametrize(
    ("plain", "counts", "num_ints"),
    [(0, [5, 0], 1), (0, [-1, 1], 1), (0, [1], 1), (1, [0, 0], 3), (1, [1, 1], 5), (-1, [0, 0], 4)],
)
def test_wrong_counts(plain, counts, num_ints) -> None:
    head = {"kind": "events", "plain": plain, "ids": [1, 2], "counts": counts, "cached": [0, 0], "extra": [{}, {}]}
    frame = Frame(head)
    frame.ints.extend([1] * num_ints)
    with pytest.raises(FrameError):
        messages.read_events(frame)


def test_large_answers_are_cut_into_several_frames() -> None:
    entries = tuple(TokenLogprobs(1, 0.0, 1) for _ in range(10))
    values = [TokenEvent(number, prompt_logprobs=entries) for number in range(7)]
    events = events_of(values, [(9, 8, 7)])
    chunks = list(messages.chunks(events, most_entries=40))
    assert [len(chunk) for chunk in chunks] == [3, 2, 2, 1]
    assert [event for chunk in chunks for event in chunk] == list(events)
