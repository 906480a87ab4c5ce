"""Messages between frontend and engine as frames: for each a function that writes it and a function that reads it.

    frontend -> engine   config, request, abort, stats, state, histories, reset_cache, stop
    engine -> frontend   progress, failed, ready, events, refused, alive, stats, state, histories, blocks,
                         cache_reset, dead

The frontend's requests for statistics, the live state, histories and a cache reset have a number, which the reply
repeats.

Does not know sockets. The readers raise `FrameError` if a field of a frame is missing or has another type.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from functools import lru_cache, wraps
from itertools import accumulate, chain, compress
from typing import Any, TypeVar, cast

from oarlock.base.errors import StartupError
from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import (
    ContextLengthError,
    OarlockError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from oarlock.engine.ipc.frames import Frame, FrameError, encode, head_text, join
from oarlock.engine.kv_cache.manager import HASH_BYTES, BlockChanges
from oarlock.engine.stats import EngineState, EngineStats, RequestHistory
from oarlock.engine.types import (
    EngineInfo,
    FinishReason,
    Grammar,
    PoolingParams,
    Request,
    SamplingParams,
    ScoredTokens,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
)

T = TypeVar("T")


def _reader(read: Callable[[Frame], T]) -> Callable[[Frame], T]:
    """Turn every error of `read` into `FrameError`."""

    @wraps(read)
    def checked(frame: Frame) -> T:
        try:
            return read(frame)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise FrameError(f"a bad {frame.head.get('kind')!r} frame: {type(error).__name__}: {error}") from error

    return checked


# -- start


def config(value: EngineConfig) -> bytes:
    return encode({"kind": "config", "config": value.to_json()})


@_reader
def read_config(frame: Frame) -> EngineConfig:
    return EngineConfig.from_json(frame.head["config"])


def progress(phase: str, fraction: float, detail: str = "") -> bytes:
    return encode({"kind": "progress", "phase": phase, "fraction": round(fraction, 4), "detail": detail})


@_reader
def read_progress(frame: Frame) -> tuple[str, float, str]:
    return str(frame.head["phase"]), float(frame.head["fraction"]), str(frame.head["detail"])


def failed(error: StartupError) -> bytes:
    return encode({"kind": "failed", "cause": error.cause, "fix": error.fix, "exit_code": error.exit_code})


@_reader
def read_failed(frame: Frame) -> StartupError:
    head = frame.head
    return StartupError(str(head["cause"]), str(head["fix"]), int(head["exit_code"]))


def ready(info: EngineInfo) -> bytes:
    return encode({"kind": "ready", "info": asdict(info)})


@_reader
def read_ready(frame: Frame) -> EngineInfo:
    fields: dict[str, Any] = dict(frame.head["info"])
    fields["rank_pids"] = tuple(fields["rank_pids"])
    return EngineInfo(**fields)


# -- requests


def request(value: Request) -> bytes:
    """Write a request, with lists as long as a vocabulary or context as ints. Raises `FrameError` for ids over 32
    bits."""
    params = {field.name: getattr(value.params, field.name) for field in fields(value.params)}
    allowed, words = params.pop("allowed_token_ids"), params.pop("bad_words")
    if value.params.grammar is not None:
        params["grammar"] = asdict(value.params.grammar)
    head = {
        "kind": "request",
        "id": value.request_id,
        "params": params,
        "num_allowed": None if allowed is None else len(allowed),
        "bad_words": [len(word) for word in words],
        "priority": value.priority,
        "salt": value.cache_salt.hex(),
        "client": value.client,
        "has_place": value.has_place,
        "yields": value.yields,
    }
    if value.pooling is not None:
        head["pooling"] = asdict(value.pooling)
    return encode(head, chain(value.prompt_token_ids, allowed or (), *words))


class RequestReader:
    """Parser of the `request` frames of one connection.

    The choices of one request arrive one after the other, with equal prompts, allowed ids and bad words. They get the
    same tuple objects, so that the engine processes each list only once.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, Any]] = {}  # field -> its received values, and the result made from them

    def read(self, frame: Frame) -> Request:
        """Read a request. Raises `FrameError` if the frame is not valid."""
        return _reader(self._read)(frame)

    def _read(self, frame: Frame) -> Request:
        head, ints = frame.head, frame.ints
        params = dict(head["params"])
        for name in ("eos_token_ids", "stop_token_ids"):
            params[name] = tuple(int(token) for token in params[name])
        params["logit_bias"] = tuple((int(token), float(value)) for token, value in params["logit_bias"])
        if params["grammar"] is not None:
            params["grammar"] = Grammar(*(str(params["grammar"][field.name]) for field in fields(Grammar)))
        num_allowed, lengths = head["num_allowed"] or 0, tuple(int(length) for length in head["bad_words"])
        words_at = len(ints) - sum(lengths)
        prompt_ends = words_at - num_allowed
        if min((num_allowed, prompt_ends, *lengths)) < 0:
            raise FrameError("more allowed ids and bad words than the frame holds")
        if head["num_allowed"] is not None:
            params["allowed_token_ids"] = self._shared("allowed_token_ids", ints[prompt_ends:words_at], _as_it_is)
        params["bad_words"] = self._shared("bad_words", (lengths, ints[words_at:]), _read_words)
        return Request(
            request_id=int(head["id"]),
            prompt_token_ids=self._shared("prompt", ints[:prompt_ends], tuple),
            params=SamplingParams(**params),
            priority=int(head["priority"]),
            cache_salt=bytes.fromhex(head["salt"]),
            client=str(head["client"]),
            has_place=bool(head["has_place"]),
            yields=bool(head["yields"]),
            pooling=_read_pooling(head["pooling"]) if "pooling" in head else None,
        )

    def _shared(self, name: str, raw: Any, read: Callable[[Any], Any]) -> Any:
        """Return `read(raw)`, or the result of the last call for this field if its `raw` was equal."""
        last = self._last.get(name)
        if last is None or last[0] != raw:
            last = self._last[name] = raw, read(raw)
        return last[1]


def _as_it_is(ints: array) -> array:
    """Keep numbers as an array: as a tuple they would take nine times the memory."""
    return ints


def _read_pooling(fields: dict[str, Any]) -> PoolingParams:
    ids = tuple(int(token) for token in fields["token_ids"])
    return PoolingParams(str(fields["kind"]), ids, int(fields["second_text"]))


def _read_words(raw: tuple[tuple[int, ...], array]) -> tuple[tuple[int, ...], ...]:
    lengths, ints = raw
    return tuple(tuple(ints[end - length : end]) for length, end in zip(lengths, accumulate(lengths), strict=True))


def abort(request_id: int) -> bytes:
    return encode({"kind": "abort", "id": request_id})


def refused(request_id: int, error: OarlockError) -> bytes:
    head: dict[str, Any] = {"kind": "refused", "id": request_id, "message": str(error)}
    if isinstance(error, QueueFullError):
        head |= {"error": "queue_full", "retry_after_s": error.retry_after_s}
    elif isinstance(error, UnavailableError):
        head |= {"error": "unavailable", "code": error.code}
    elif isinstance(error, RequestError):
        name = "context_length" if isinstance(error, ContextLengthError) else "request"
        head |= {"error": name, "param": error.param, "code": error.code}
    else:
        raise TypeError(f"a {type(error).__name__} cannot be sent as a refusal")
    return encode(head)


@_reader
def read_refused(frame: Frame) -> tuple[int, OarlockError]:
    head = frame.head
    request_id, message = int(head["id"]), str(head["message"])
    if head["error"] == "queue_full":
        return request_id, QueueFullError(message, float(head["retry_after_s"]))
    if head["error"] == "unavailable":
        return request_id, UnavailableError(message, str(head["code"]))
    if head["error"] == "context_length":
        return request_id, ContextLengthError(message, head["param"])
    return request_id, RequestError(message, head["param"], head["code"])


@_reader
def read_id(frame: Frame) -> int:
    """Return the request id of a request or an abort."""
    return int(frame.head["id"])


# -- events
#
# One frame has all events of a step. Plain events, of a single token, are columns of values. The head has columns for
# the other events, and for each of them a dictionary of its fields:
#     plain    number of plain events       ints     plain ones: request ids (each in two ints), token ids,
#     scored   [M, K] logprobs of plain              num_cached_tokens; with `scored`, num_top, and ranks and ids as
#              ones, alternatives of each            columns; then the token ids of the others; then the integers
#     ids      request ids                           of their logprobs
#     counts   token ids of each            floats   logprobs of `scored`, as columns; then the others' logprobs and
#     cached   num_cached_tokens of each             vectors, of one event after the other
#     extra    {reason, stop, error, param, code, shapes of logprobs, number of pooled values} of each


@lru_cache(1024)
def _plain_head(num_plain: int) -> bytes:
    return head_text({"kind": "events", "plain": num_plain})


def events(values: TokenEvents) -> bytes:
    if not values.others and values.logprobs is None:
        columns = values.request_ids.tobytes(), values.token_ids.tobytes(), values.num_cached_tokens.tobytes()
        return join(_plain_head(len(values.request_ids)), b"".join(columns))
    ints, floats = array("i"), array("f")
    ints.frombytes(values.request_ids.tobytes())
    ints += values.token_ids
    ints += values.num_cached_tokens
    others = values.others
    head: dict[str, Any] = {"kind": "events", "plain": len(values.request_ids)}
    if (scored := values.logprobs) is not None:
        head["scored"] = [len(scored), scored.num_top]
        ints += values.num_top + scored.ranks + scored.top_ids
        floats += scored.logprobs + scored.top_logprobs
    if not others:
        return encode(head, ints, floats)
    ints.extend(chain.from_iterable(event.token_ids for event in others))
    head["ids"] = [event.request_id for event in others]
    head["counts"] = [len(event.token_ids) for event in others]
    head["cached"] = [event.num_cached_tokens for event in others]
    head["extra"] = [_extra(event, ints, floats) for event in others]
    return encode(head, ints, floats)


@_reader
def read_events(frame: Frame) -> TokenEvents:
    head, ints, num_plain = frame.head, frame.ints, int(frame.head["plain"])
    if not 0 <= 4 * num_plain <= len(ints):
        raise FrameError("more plain events than the frame holds")
    request_ids = array("q", ints[: 2 * num_plain].tobytes())
    values = TokenEvents(request_ids, ints[2 * num_plain : 3 * num_plain], ints[3 * num_plain : 4 * num_plain])
    ints, floats = ints[4 * num_plain :], frame.floats
    if "scored" in head:
        ints, floats = _read_scored(values, head["scored"], ints, floats)
    if "ids" in head:
        values.others = _read_others(head, ints, floats)
    return values


def _read_scored(values: TokenEvents, shape: list[int], ints: array, floats: array) -> tuple[array, array]:
    """Add the logprobs of plain events, of `shape` [M, K], to `values`; return the remaining integers and floats."""
    count, k = shape
    num_plain = len(values.request_ids)
    numbers = _Numbers(ints, 0, floats)
    values.num_top = numbers.take_ints(num_plain)
    token_ids = array("i", compress(values.token_ids, (top >= 0 for top in values.num_top)))
    if len(token_ids) != count or max(values.num_top, default=0) > k:
        raise FrameError("logprobs that do not fit the plain events")
    values.logprobs = numbers.take_sampled(token_ids, k)
    return numbers.rest()


def _read_others(head: dict[str, Any], ints: array, floats: array) -> list[TokenEvent]:
    ids, counts, cached, extra = head["ids"], head["counts"], head["cached"], head["extra"]
    if min(counts, default=0) < 0 or sum(counts) > len(ints):
        raise FrameError("token counts that the frame does not hold")
    numbers = _Numbers(ints, sum(counts), floats)
    values = []
    for request_id, count, end, num_cached, more in zip(ids, counts, accumulate(counts), cached, extra, strict=True):
        event = TokenEvent(int(request_id), tuple(ints[end - count : end]), num_cached_tokens=int(num_cached))
        values.append(replace(event, **_read_extra(more, numbers)) if more else event)
    return values


def _extra(event: TokenEvent, ints: array, floats: array) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if event.finish_reason:
        extra["reason"] = event.finish_reason.value
    if event.stop_token_id is not None:
        extra["stop"] = event.stop_token_id
    if event.error is not None:
        extra["error"] = event.error
    if event.error_param is not None:
        extra["param"] = event.error_param
    if event.error_code is not None:
        extra["code"] = event.error_code
    for name, entries in (("logprobs", event.logprobs), ("prompt_logprobs", event.prompt_logprobs)):
        if not entries:
            continue
        if isinstance(entries, ScoredTokens):
            extra[name] = {"count": len(entries), "top": entries.num_top}
            ints += entries.token_ids + entries.ranks + entries.top_ids
            floats += entries.logprobs + entries.top_logprobs
        else:
            extra[name] = [len(entry.top) for entry in entries]
            for entry in entries:
                ints.extend((entry.token_id, entry.rank, *(token for token, _ in entry.top)))
                floats.extend((entry.logprob, *(logprob for _, logprob in entry.top)))
    if event.pooled:
        extra["pooled"] = len(event.pooled)
        floats.extend(event.pooled)
    return extra


def _read_extra(extra: dict[str, Any], numbers: "_Numbers") -> dict[str, Any]:
    fields: dict[str, Any] = {
        "finish_reason": FinishReason(extra["reason"]) if "reason" in extra else None,
        "stop_token_id": extra.get("stop"),
        "error": extra.get("error"),
        "error_param": extra.get("param"),
        "error_code": extra.get("code"),
    }
    for name in ("logprobs", "prompt_logprobs"):
        shape = extra.get(name)
        if isinstance(shape, dict):
            fields[name] = numbers.take_scored(int(shape["count"]), int(shape["top"]))
        elif shape is not None:
            fields[name] = tuple(numbers.take(int(num_top)) for num_top in shape)
    if "pooled" in extra:
        fields["pooled"] = numbers.take_floats(int(extra["pooled"]))
    return fields


class _Numbers:
    """Reader of logprobs, in the order in which they were written."""

    def __init__(self, ints: array, first: int, floats: array) -> None:
        self._ints, self._floats = ints, floats
        self._next_int, self._next_float = first, 0

    def rest(self) -> tuple[array, array]:
        """Return the integers and floats that were not taken."""
        return self._ints[self._next_int :], self._floats[self._next_float :]

    def take(self, num_top: int) -> TokenLogprobs:
        token_id, rank, *top_ids = self.take_ints(2 + num_top)
        logprob, *top = self.take_floats(1 + num_top)
        return TokenLogprobs(token_id, logprob, rank, tuple(zip(top_ids, top, strict=True)))

    def take_scored(self, count: int, num_top: int) -> ScoredTokens:
        return self.take_sampled(self.take_ints(count), num_top)

    def take_sampled(self, token_ids: array, num_top: int) -> ScoredTokens:
        count = len(token_ids)
        ranks, top_ids = self.take_ints(count), self.take_ints(count * num_top)
        logprobs, top_logprobs = self.take_floats(count), self.take_floats(count * num_top)
        return ScoredTokens(num_top, token_ids, ranks, logprobs, top_ids, top_logprobs)

    def take_ints(self, count: int) -> array:
        first, self._next_int = self._next_int, self._next_int + count
        return _slice(self._ints, first, count)

    def take_floats(self, count: int) -> array:
        first, self._next_float = self._next_float, self._next_float + count
        return _slice(self._floats, first, count)


def _slice(numbers: array, first: int, count: int) -> array:
    found = numbers[first : first + count]
    if count < 0 or len(found) < count:
        raise FrameError("fewer logprobs than announced")
    return found


# -- the rest


def alive(step_id: int) -> bytes:
    """Write a heartbeat: every rank has just responded, without events."""
    return encode({"kind": "alive", "step_id": step_id})


def ask_stats(number: int) -> bytes:
    return encode({"kind": "stats", "number": number})


def stats(number: int, value: EngineStats) -> bytes:
    return encode({"kind": "stats", "number": number, "stats": value.to_dict()})


@_reader
def read_number(frame: Frame) -> int:
    """Return the number of a request or of its reply."""
    return int(frame.head["number"])


@_reader
def read_stats(frame: Frame) -> tuple[int, EngineStats]:
    return int(frame.head["number"]), EngineStats.from_dict(frame.head["stats"])


def ask_state(number: int) -> bytes:
    return encode({"kind": "state", "number": number})


def state(number: int, value: EngineState) -> bytes:
    return encode({"kind": "state", "number": number, "state": value})


def read_state(frame: Frame) -> tuple[int, EngineState]:
    """Read number and state. Raises `FrameError`."""
    number, value = frame.head.get("number"), frame.head.get("state")
    if not isinstance(number, int) or not isinstance(value, dict) or not EngineState.__required_keys__ <= value.keys():
        raise FrameError("a bad 'state' frame: a number and the members of a state are required")
    return number, cast(EngineState, value)


def ask_histories(request_ids: Sequence[int]) -> Callable[[int], bytes]:
    """Return a function that writes the request for the histories of these requests."""
    return lambda number: encode({"kind": "histories", "number": number, "ids": list(request_ids)})


def read_ids(frame: Frame) -> list[int]:
    """Read the request ids. Raises `FrameError`."""
    ids = frame.head.get("ids")
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise FrameError("a bad 'histories' frame: a list of ids is required")
    return ids


def histories(number: int, values: list[RequestHistory]) -> bytes:
    """Write the reply: the histories of the known requests."""
    return encode({"kind": "histories", "number": number, "histories": values})


def read_histories(frame: Frame) -> tuple[int, list[RequestHistory]]:
    """Read number and histories. Raises `FrameError`."""
    number, values = frame.head.get("number"), frame.head.get("histories")
    if not isinstance(number, int) or not isinstance(values, list):
        raise FrameError("a bad 'histories' frame: a number and a list are required")
    return number, cast(list[RequestHistory], values)


def blocks(value: BlockChanges) -> bytes:
    """Write the changes; the stored hashes come first."""
    ints = array("i", b"".join((*value.stored, *value.removed)))
    return encode({"kind": "blocks", "cleared": value.is_cleared, "num_stored": len(value.stored)}, ints)


def read_blocks(frame: Frame) -> BlockChanges:
    """Read the changes from a frame. Raises `FrameError`."""
    data, num_stored, is_cleared = frame.ints.tobytes(), frame.head.get("num_stored"), frame.head.get("cleared")
    count, rest = divmod(len(data), HASH_BYTES)
    if rest or type(num_stored) is not int or not 0 <= num_stored <= count or type(is_cleared) is not bool:
        raise FrameError("a bad 'blocks' frame: hashes are missing")
    hashes = [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]
    return BlockChanges(is_cleared, hashes[:num_stored], hashes[num_stored:])


def reset_cache(number: int) -> bytes:
    """Write the request to empty the prefix cache."""
    return encode({"kind": "reset_cache", "number": number})


def cache_reset(number: int, num_blocks: int) -> bytes:
    return encode({"kind": "cache_reset", "number": number, "blocks": num_blocks})


@_reader
def read_cache_reset(frame: Frame) -> tuple[int, int]:
    return int(frame.head["number"]), int(frame.head["blocks"])


def stop() -> bytes:
    return encode({"kind": "stop"})


def dead(cause: str, exit_code: int) -> bytes:
    return encode({"kind": "dead", "cause": cause, "exit_code": exit_code})


@_reader
def read_dead(frame: Frame) -> tuple[str, int]:
    return str(frame.head["cause"]), int(frame.head["exit_code"])


def chunks(values: TokenEvents, most_entries: int = 4_000_000) -> Iterable[TokenEvents]:
    """Split events into parts that each fit one frame, for any number of logprobs; keep their order."""
    chunk = replace(values, others=[])
    size = len(chunk)
    for event in values.others:
        chunk.others.append(event)
        size += 1 + len(event.pooled)
        if event.prompt_logprobs:
            size += len(event.prompt_logprobs) * (2 + len(event.prompt_logprobs[0].top))
        if size >= most_entries:
            yield chunk
            chunk, size = TokenEvents(), 0
    if len(chunk):
        yield chunk
