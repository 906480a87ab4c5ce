"""Messages between frontend and engine: structs that `msgspec` writes and reads as msgpack, one in each frame.

    frontend -> engine   Config, Submit, Abort, AskStats, AskState, AskHistories, ResetCache, AddAdapter, RemoveAdapter,
                         AskAdapters, Stop
    engine -> frontend   Progress, Failed, Ready, Events, Refused, Alive, Stats, State, Histories, Blocks, CacheReset,
                         AdapterDone, Adapters, Dead

The frontend's requests for statistics, the live state, histories, a cache reset and adapters have a number, which the
reply repeats. Arrays are sent as the bytes of their items, after the code of their type. Each field is checked against
its annotation when a message is read.

Does not know sockets.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from oarlock.base.errors import StartupError
from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import (
    ContextLengthError,
    OarlockError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from oarlock.engine.ipc.frames import FrameError, as_frame
from oarlock.engine.kv_cache.block_events import HASH_BYTES, BlockChanges
from oarlock.engine.stats import EngineState, EngineStats, RequestHistory
from oarlock.engine.types import (
    AdapterInfo,
    EngineInfo,
    FinishReason,
    PoolingParams,
    Request,
    SamplingParams,
    ScoredTokens,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
)

T = TypeVar("T")

_INT64, _INT32, _FLOAT32 = "q", "i", "f"  # type codes of arrays
_UNSENDABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError)  # errors of values that cannot be encoded


class Message(Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of the messages. On the wire, a message is an array of its class name and its fields."""


# -- start


class Config(Message):
    """The first message of the frontend."""

    schema: str  # digest of all messages: a frontend and an engine of different versions refuse each other
    engine_config: str  # JSON, because a path can have bytes that are not UTF-8

    @staticmethod
    def of(config: EngineConfig) -> "Config":
        return Config(schema_digest(), config.to_json())

    def read(self) -> EngineConfig:
        """Return the configuration. Raises `FrameError`."""
        if self.schema != schema_digest():
            raise FrameError(
                f"the server's messages have the version {self.schema:.40}, those of the engine {schema_digest()}: "
                "Oarlock was installed again while the server ran, which must be restarted"
            )
        try:
            return EngineConfig.from_json(self.engine_config)
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            raise FrameError(f"a bad configuration: {type(error).__name__}: {error}") from error


class Progress(Message):
    """Progress of the start. `fraction`: of the phase."""

    phase: str
    fraction: float
    detail: str = ""


class Failed(Message):
    """The start has failed, and the engine ends."""

    cause: str
    fix: str
    exit_code: int

    @staticmethod
    def of(error: StartupError) -> "Failed":
        return Failed(_as_unicode(error.cause), _as_unicode(error.fix), error.exit_code)

    def error(self) -> StartupError:
        return StartupError(self.cause, self.fix, self.exit_code)


class Ready(Message):
    """Every rank has loaded."""

    info: EngineInfo


def _as_unicode(text: str) -> str:
    """Return `text` with escapes for the bytes of file names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


# -- requests


class _Body(Struct, array_like=True, forbid_unknown_fields=True):
    prompt: array  # int32
    allowed_token_ids: array | None  # int32
    params: SamplingParams  # without `allowed_token_ids`
    priority: int
    cache_salt: bytes
    client: str
    is_admitted: bool
    is_low_priority: bool
    pooling: PoolingParams | None
    adapter: str | None


class Submit(Message):
    """A request, whose body is decoded separately: a mistake in it must fail only this request."""

    request_id: int
    body: Raw

    @staticmethod
    def of(request: Request) -> "Submit":
        """Make the message of a request. Raises `FrameError` for token ids over 32 bits."""
        params, allowed = request.params, request.params.allowed_token_ids
        try:
            if allowed is not None:
                params, allowed = replace(params, allowed_token_ids=None), array(_INT32, allowed)
            body = _Body(
                array(_INT32, request.prompt_token_ids), allowed, params, request.priority, request.cache_salt,
                request.client, request.is_admitted, request.is_low_priority, request.pooling, request.adapter,
            )  # fmt: skip
            return Submit(request.request_id, Raw(_ENCODER.encode(body)))
        except _UNSENDABLE as error:
            raise FrameError(f"values that a message cannot hold: {error}") from error


class RequestReader:
    """Parser of the requests of one connection.

    The choices of one request arrive one after the other, with equal prompts, allowed ids and bad words. They get the
    same objects, so that the engine processes each list only once.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, Any]] = {}  # field -> its received values, and the result made from them

    def read(self, message: Submit) -> Request:
        """Read a request. Raises `FrameError` if its body is not valid."""
        body = _read_body(message.body)
        params, allowed = body.params, body.allowed_token_ids
        _check_types((body.prompt, _INT32), *([] if allowed is None else [(allowed, _INT32)]))
        if params.bad_words:
            params = replace(params, bad_words=self._shared("bad_words", params.bad_words, tuple))
        if allowed is not None:
            params = replace(params, allowed_token_ids=self._shared("allowed_token_ids", allowed, lambda ids: ids))
        return Request(
            request_id=message.request_id,
            prompt_token_ids=self._shared("prompt", body.prompt, tuple),
            params=params,
            priority=body.priority,
            cache_salt=body.cache_salt,
            client=body.client,
            is_admitted=body.is_admitted,
            is_low_priority=body.is_low_priority,
            pooling=body.pooling,
            adapter=body.adapter,
        )

    def _shared(self, name: str, raw: Any, read: Callable[[Any], Any]) -> Any:
        """Return `read(raw)`, or the result of the last call for this field if its `raw` was equal."""
        last = self._last.get(name)
        if last is None or last[0] != raw:
            last = self._last[name] = (raw, read(raw))
        return last[1]


class Abort(Message):
    request_id: int


class Refused(Message):
    """A request was not accepted. The fields after `message` are attributes of the error."""

    request_id: int
    error: Literal["queue_full", "unavailable", "context_length", "request"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 0.0

    @staticmethod
    def of(request_id: int, error: OarlockError) -> "Refused":
        if isinstance(error, QueueFullError):
            return Refused(request_id, "queue_full", str(error), retry_after_s=error.retry_after_s)
        if isinstance(error, UnavailableError):
            return Refused(request_id, "unavailable", str(error), code=error.code)
        if isinstance(error, RequestError):
            name = "context_length" if isinstance(error, ContextLengthError) else "request"
            return Refused(request_id, name, str(error), error.param, error.code)
        raise TypeError(f"a {type(error).__name__} cannot be sent as a refusal")

    def exception(self) -> OarlockError:
        if self.error == "queue_full":
            return QueueFullError(self.message, self.retry_after_s)
        if self.error == "unavailable":
            return UnavailableError(self.message, str(self.code))
        if self.error == "context_length":
            return ContextLengthError(self.message, self.param)
        return RequestError(self.message, self.param, self.code)


# -- events


class Event(Struct, array_like=True, forbid_unknown_fields=True):
    """A `TokenEvent`."""

    request_id: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    logprobs: ScoredTokens | tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: ScoredTokens | tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_param: str | None = None
    error_code: str | None = None
    pooled: array | None = None  # float32


class Events(Message):
    """All events of a step: `TokenEvents`. Most messages have only the first columns, as bytes: the fastest form."""

    request_ids: bytes  # int64 [n]
    token_ids: bytes  # int32 [n]
    num_cached_tokens: bytes  # int32 [n]
    others: list[Event] = []
    num_top: array | None = None  # int32 [n]
    logprobs: ScoredTokens | None = None

    @staticmethod
    def of(values: TokenEvents) -> "Events":
        message = Events(values.request_ids.tobytes(), values.token_ids.tobytes(), values.num_cached_tokens.tobytes())
        if values.logprobs is not None:
            message.num_top, message.logprobs = values.num_top, values.logprobs
        if values.others:
            message.others = [_event(event) for event in values.others]
        return message

    def read(self) -> TokenEvents:
        """Return the events. Raises `FrameError` if the columns do not fit each other."""
        size = len(self.request_ids)
        if size % 8 or not size == 2 * len(self.token_ids) == 2 * len(self.num_cached_tokens):
            raise FrameError("columns of events that do not have the same length")
        values = TokenEvents(
            array(_INT64, self.request_ids), array(_INT32, self.token_ids), array(_INT32, self.num_cached_tokens)
        )
        if self.logprobs is not None:
            values.num_top, values.logprobs = _scored_columns(self.num_top, self.logprobs, len(values.request_ids))
        if self.others:
            values.others = [_token_event(event) for event in self.others]
        return values


def _event(event: TokenEvent) -> Event:
    pooled = event.pooled
    return Event(
        event.request_id,
        event.token_ids,
        event.num_cached_tokens,
        _sent_scores(event.logprobs),
        _sent_scores(event.prompt_logprobs),
        event.finish_reason,
        event.stop_token_id,
        event.error,
        event.error_param,
        event.error_code,
        None if not pooled else pooled if isinstance(pooled, array) else array(_FLOAT32, pooled),
    )


def _token_event(event: Event) -> TokenEvent:
    for scores in (event.logprobs, event.prompt_logprobs):
        if isinstance(scores, ScoredTokens):
            _check_scores(scores)
    if event.pooled is not None:
        _check_types((event.pooled, _FLOAT32))
    return TokenEvent(
        event.request_id,
        event.token_ids,
        event.logprobs,
        event.prompt_logprobs,
        event.finish_reason,
        event.stop_token_id,
        event.num_cached_tokens,
        event.error,
        event.error_param,
        event.error_code,
        () if event.pooled is None else event.pooled,
    )


def _sent_scores(scores: Sequence[TokenLogprobs]) -> ScoredTokens | tuple[TokenLogprobs, ...]:
    """Return `scores` as columns if they are the whole table; otherwise as entries."""
    return scores if isinstance(scores, ScoredTokens) else tuple(scores)


def _scored_columns(num_top: array | None, scores: ScoredTokens, count: int) -> tuple[array, ScoredTokens]:
    """Return `num_top` and `scores`. Raises `FrameError` if they do not fit `count` events."""
    _check_scores(scores)
    if num_top is None or len(num_top) != count:
        raise FrameError("logprobs that do not fit the plain events")
    _check_types((num_top, _INT32))
    least, most = min(num_top, default=0), max(num_top, default=0)
    if len(scores) != count - num_top.count(-1) or least < -1 or most > scores.num_top:
        raise FrameError("logprobs that do not fit the plain events")
    return num_top, scores


def _check_scores(scores: ScoredTokens) -> None:
    columns = scores.token_ids, scores.ranks, scores.top_ids, scores.logprobs, scores.top_logprobs
    _check_types(*zip(columns, (_INT32, _INT32, _INT32, _FLOAT32, _FLOAT32), strict=True))
    count, num_top = len(scores), scores.num_top
    if num_top < 0 or [len(column) for column in columns] != [count, count, count * num_top, count, count * num_top]:
        raise FrameError("columns of logprobs that do not fit each other")


def _check_types(*arrays: tuple[array, str]) -> None:
    for values, code in arrays:
        if values.typecode != code:
            raise FrameError(f"an array of the type {values.typecode}, not {code}")


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


# -- the rest


class Alive(Message):
    """Heartbeat: every rank has just responded, without events."""

    step_id: int


class AskStats(Message):
    number: int


class Stats(Message):
    number: int
    stats: EngineStats


class AskState(Message):
    number: int


class State(Message):
    number: int
    state: EngineState


class AskHistories(Message):
    number: int
    request_ids: list[int]


class Histories(Message):
    """Histories of the requests that the engine knows."""

    number: int
    histories: list[RequestHistory]


class Blocks(Message):
    """Changes of the prefix cache: `BlockChanges`."""

    is_cleared: bool
    stored: Sequence[Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]]
    removed: Sequence[Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]]

    def read(self) -> BlockChanges:
        return BlockChanges(self.is_cleared, self.stored, self.removed)


class ResetCache(Message):
    """Empty the prefix cache."""

    number: int


class CacheReset(Message):
    number: int
    num_blocks: int


class AddAdapter(Message):
    """Let a name refer to a LoRA adapter, and load it."""

    number: int
    name: str
    digest: str
    directory: str


class RemoveAdapter(Message):
    """Forget the name of an adapter, and end its requests."""

    number: int
    name: str


class AdapterDone(Message):
    """An adapter was loaded or unloaded, or neither: then there is an error."""

    number: int
    num_ended: int = 0  # requests that were ended
    error: str | None = None
    param: str | None = None
    code: str | None = None

    @staticmethod
    def refused(number: int, error: RequestError | UnavailableError) -> "AdapterDone":
        param = error.param if isinstance(error, RequestError) else None
        return AdapterDone(number, 0, error.message, param, error.code)

    def read(self) -> int:
        """Return the number of ended requests. Raises `RequestError`, or `UnavailableError` if no field is at fault."""
        if self.error is not None and self.param is None and self.code is not None:
            raise UnavailableError(self.error, self.code)
        if self.error is not None:
            raise RequestError(self.error, self.param, self.code)
        return self.num_ended


class AskAdapters(Message):
    number: int


class Adapters(Message):
    """All names of adapters, in the order in which they were added."""

    number: int
    adapters: list[AdapterInfo]


class Stop(Message):
    pass


class Dead(Message):
    """The engine loop has failed."""

    cause: str
    exit_code: int

    @staticmethod
    def of(cause: str, exit_code: int) -> "Dead":
        return Dead(_as_unicode(cause), exit_code)


# -- encoding

FromFrontend = (
    Config
    | Submit
    | Abort
    | AskStats
    | AskState
    | AskHistories
    | ResetCache
    | AddAdapter
    | RemoveAdapter
    | AskAdapters
    | Stop
)
FromEngine = (
    Progress
    | Failed
    | Ready
    | Events
    | Refused
    | Alive
    | Stats
    | State
    | Histories
    | Blocks
    | CacheReset
    | AdapterDone
    | Adapters
    | Dead
)


def _encoded(value: object) -> msgspec.msgpack.Ext:
    if isinstance(value, array):
        return msgspec.msgpack.Ext(ord(value.typecode), memoryview(value))
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _decoded(code: int, data: memoryview) -> array:
    values = array(chr(code))
    values.frombytes(data)
    return values


def _decoder(kind: Any) -> Callable[[memoryview | Raw], Any]:
    """Return a function that decodes messages of the type `kind`, and raises `FrameError` for anything else."""
    decode = msgspec.msgpack.Decoder(kind, ext_hook=_decoded).decode

    def read(payload: memoryview | Raw) -> Any:
        try:
            return decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise FrameError(f"not a message: {error}") from error

    return read


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
_read_body: Callable[[Raw], _Body] = _decoder(_Body)
read_from_frontend: Callable[[memoryview], FromFrontend] = _decoder(FromFrontend)
read_from_engine: Callable[[memoryview], FromEngine] = _decoder(FromEngine)


def encode(message: Message) -> bytes:
    """Return the frame of a message. Raises `FrameError` if a value cannot be sent, or if the frame is too large."""
    try:
        payload = _ENCODER.encode(message)
    except _UNSENDABLE as error:
        raise FrameError(f"a {type(message).__name__} message that cannot be sent: {error}") from error
    return as_frame(payload)


@cache
def schema_digest() -> str:
    """Return a digest of the names and types of all fields."""
    kinds = [FromFrontend, FromEngine, _Body, EngineConfig]
    schemas = msgspec.json.schema_components(kinds, schema_hook=lambda kind: {"type": kind.__name__})
    # Docstrings are not part of it: an interpreter may have left them out.
    plain = json.loads(json.dumps(schemas), object_hook=lambda item: {**item, "description": None})
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
