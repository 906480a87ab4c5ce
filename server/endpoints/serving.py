"""The common base of the endpoints: settings, the server's state, its engine, and the reading of bodies."""

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from starlette.requests import Request

from oarlock.engine.errors import EngineError, RequestError
from oarlock.engine.stats import EngineStats
from oarlock.engine.types import EngineInfo
from oarlock.server.config.settings import Settings
from oarlock.server.errors import HttpError, ModelNotFoundError
from oarlock.server.http.body_cost import cost_of
from oarlock.server.http.body_memory import HeldMemory, held_by
from oarlock.server.http.ignored_parameters import refuse, with_ignored
from oarlock.server.http.request_body import ignored_parameters, parse_any, read_json
from oarlock.server.http.request_record import RequestRecord, label_of
from oarlock.server.http.server_sent_events import until_disconnect
from oarlock.server.http.server_state import ServerState
from oarlock.server.hub.adapter_path import AdapterPaths
from oarlock.server.hub.model_path import names_model, served_names
from oarlock.server.llm.adapters import ServedAdapter, ServedAdapters
from oarlock.server.llm.async_llm import AsyncLLM
from oarlock.server.llm.generation import Engine, Generation, Replica
from oarlock.server.llm.generation_config import GenerationConfig
from oarlock.server.llm.pooler_config import PoolerConfig
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.server.observability.logs import event, logger
from oarlock.server.observability.metrics import HttpCounters, exposition
from oarlock.server.schemas.strict_model import MAX_TIMEOUT_S, MEDIA, StrictModel
from oarlock.server.version import VERSION
from oarlock.workers.catalogue import code_limits

STATS_TIMEOUT_S = 2.0
_BodyT = TypeVar("_BodyT", bound=StrictModel)
_log = logger("requests")


class OpenAIServing:
    """Base class of the endpoints. Routes that neither generate nor tokenize use it as it is."""

    state_name: ClassVar[str] = "serving"  # name in `app.state` of the application's only object of this class

    def __init__(self, settings: Settings, state: ServerState, counters: HttpCounters) -> None:
        self.settings = settings
        self.state = state
        self.counters = counters
        self.model_names = served_names(settings)
        self._last_stats: dict[int, EngineStats] = {}  # replica number -> its last statistics
        self._metrics_page: asyncio.Task[bytes] | None = None

    @classmethod
    def of(cls, request: Request) -> Self:
        """Return the object of this class that serves the request's application."""
        return getattr(request.app.state, cls.state_name)

    @property
    def async_llm(self) -> AsyncLLM:
        """The connected engine's interface. Raises `HttpError` (503) before the model is loaded."""
        async_llm = self.state.async_llm
        if async_llm is None:
            raise HttpError(503, "The server is not ready.", code="server_loading")
        return async_llm

    @property
    def tokenizer(self) -> Tokenizer:
        return self.async_llm.input_processor.tokenizer

    @property
    def info(self) -> EngineInfo:
        return self.async_llm.engine.info

    @property
    def max_len(self) -> int:
        """Largest number of tokens of a prompt and its completion together."""
        return self.async_llm.input_processor.max_len

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Values of the model's generation config for parameters that a request leaves out; empty before it is read."""
        async_llm = self.state.async_llm
        return async_llm.input_processor.generation_config.sampling if async_llm else {}

    def fingerprint(self, model: str | None = None) -> str:
        """Return a fingerprint that changes with everything that may change the computed values of a response.

        `model`: the name from `check_model`, if it may be the name of an adapter.
        """
        text = f"{VERSION} {self.info.numbers_digest} {self.tokenizer.digest}"
        adapter = None if model is None or self._adapters is None else self._adapters.loaded(model)
        if adapter is not None:
            text += f" {adapter.digest}"
        return "fp_" + hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    async def check_model(self, name: str | None) -> str:
        """Return the name of the model, or of an adapter, to echo back. Raises `ModelNotFoundError`."""
        if name is None:
            return self.model_names[0]
        if self._is_model(name) or await self.adapter(name) is not None:
            return name
        adapters = self._adapters
        if adapters is None:
            raise ModelNotFoundError(name, self.model_names)
        if self.settings.ignore_model_case:
            for adapter in await adapters.available():
                if adapter.name.casefold() == name.casefold():
                    return adapter.name
        raise adapters.not_found(name)

    async def adapter(self, name: str) -> ServedAdapter | None:
        """Return the LoRA adapter of this name, which may not be loaded yet; None if there is none."""
        return None if self._adapters is None or self._is_model(name) else await self._adapters.find(name)

    async def use_adapter(self, name: str, record: RequestRecord | None = None) -> str | None:
        """Wait until the adapter that `check_model` returned is loaded, and return its name; None for the model itself.

        `record`: gets the times of this wait. Raises the errors of `ServedAdapters.use`.
        """
        if self._adapters is None or self._is_model(name):
            return None
        with nullcontext() if record is None else record.awaiting(name):
            return await self._adapters.use(name)

    @property
    def _adapters(self) -> ServedAdapters | None:
        return None if self.state.async_llm is None else self.state.async_llm.adapters

    def _is_model(self, name: str) -> bool:
        """Return whether this is a name of the model itself."""
        return names_model(self.settings, name)

    def _time_limit(self, header: str | None, seconds: float | None) -> float | None:
        """Return the shortest time limit of field, header and operator in seconds; None: no limit."""
        limits = [seconds, self.settings.request_timeout]
        if header is not None:
            limits.append(_seconds(header))
        return min((limit for limit in limits if limit is not None), default=None)

    def _chosen_replica(self, request: Request) -> int | None:
        """Return the number of the replica that a header names, or None for the best replica. Raises `RequestError`."""
        return _rank(request.headers.get("x-data-parallel-rank"), self.info.data_parallel_size)

    async def read(self, request: Request, *schemas: type[_BodyT]) -> tuple[_BodyT, dict[str, str]]:
        """Return the checked body, and the headers that every response to it carries.

        If there are two schemas, the second is for conversations. Raises `RequestError`.
        """
        try:
            return await self._read(request, *schemas)
        except RequestError as error:
            raise self.with_reason(error) from None

    def with_reason(self, error: RequestError) -> RequestError:
        """Return `error`; if it is about media, for which the model has a part that is not served, with that reason."""
        async_llm = self.state.async_llm
        words, _ = MEDIA.get(error.code or "", (None, ()))
        if words is None or async_llm is None or async_llm.engine.info.text_part_of is None:
            return error
        reason = f"This server serves the text part of {self.model_names[0]}; {words} not supported."
        return RequestError(f"{error.message} {reason}", error.param, error.code)

    async def _read(self, request: Request, *schemas: type[_BodyT]) -> tuple[_BodyT, dict[str, str]]:
        is_strict = self.settings.strict_parameters
        held = self.held_by(request)
        content = await read_json(request, self.settings.max_body_size, held)
        cost = cost_of(content)
        if cost.takes_long:
            reading = self.state.large_bodies.read(schemas, content, is_strict)
            body, ignored, num_bytes = await until_disconnect(request, reading)
            held.resize(num_bytes)
        else:
            held.add(cost.num_bytes)

            def parsed() -> tuple[_BodyT, list[str]]:
                body = parse_any(schemas, content)
                return body, ignored_parameters(body, is_strict)

            body, ignored = await self.state.parsing_turns.run(len(content), parsed)
        return body, self.reported(request, ignored, {})

    def held_by(self, request: Request) -> HeldMemory:
        """Return the memory that `request` holds. The middleware releases it when the request ends."""
        return held_by(request.scope, self.state.body_memory, label_of(request.scope))

    def reported(self, request: Request, ignored: Sequence[str], headers: dict[str, str]) -> dict[str, str]:
        """Report parameters that have no effect, and return `headers` with their names. Raises as `report` does."""
        self.report(ignored, label_of(request.scope), request.headers.get("user-agent"))
        return with_ignored(headers, ignored)

    def report(self, ignored: Sequence[str], label: str | None, agent: str | None = None) -> None:
        """Count and log parameters that have no effect. Raises `RequestError` with `--strict-parameters`.

        `label`: label of the API key. `agent`: the header User-Agent.
        """
        if self.settings.strict_parameters:
            refuse(ignored)
        self.counters.ignored_parameters += len(ignored)
        self.state.ignored_parameters.report(ignored, label, agent)

    async def engine_numbers(self) -> tuple[list[EngineStats], EngineInfo | None]:
        """Return the statistics of each replica, and the engine's description or None.

        If a replica does not respond in time, its last known statistics are returned.
        """
        async_llm = self.state.async_llm
        if async_llm is None:
            return [EngineStats()], None
        return list(await asyncio.gather(*map(self._stats_of, async_llm.engine.replicas))), async_llm.engine.info

    async def metrics_page(self) -> bytes:
        """Return the body of `/metrics`. Requests that arrive while it is being made share the same body."""
        task = self._metrics_page
        if task is None or task.done():
            task = self._metrics_page = asyncio.create_task(self._make_metrics_page(), name="metrics")
        return await asyncio.shield(task)  # a client that leaves must not cancel the shared task

    async def _make_metrics_page(self) -> bytes:
        replicas, info = await self.engine_numbers()
        prefix = self.settings.metrics_prefix
        return exposition(replicas, info, self.counters, self.model_names[0], prefix)

    async def _stats_of(self, replica: Replica) -> EngineStats:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                self._last_stats[replica.number] = await replica.stats()
        except (TimeoutError, EngineError) as error:
            _log.warning(event("statistics_stale", engine=replica.number, cause=type(error).__name__))
        return self._last_stats.get(replica.number) or EngineStats()


def _rank(text: str | None, num_replicas: int) -> int | None:
    """Return the value of the header that names a replica. Raises `RequestError`."""
    if text is None or (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < num_replicas):
        return None if text is None else int(text)
    names = f"a number from 0 to {num_replicas - 1}" if num_replicas > 1 else "0, as there is one replica"
    message = f"The header X-data-parallel-rank must be {names}. Correct it, or leave it out."
    raise RequestError(message, "X-data-parallel-rank")


def _seconds(text: str) -> float:
    """Return the value of the header that limits a request's time. Raises `RequestError`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:  # this is also true for NaN
        message = f"The header X-Request-Timeout must be a number of seconds above 0 and at most {MAX_TIMEOUT_S}."
        raise RequestError(message, "X-Request-Timeout")
    return seconds


def connect_engine(
    settings: Settings,
    state: ServerState,
    counters: HttpCounters,
    engine: Engine,
    tokenizer: Tokenizer,
    generation_config: GenerationConfig | None = None,
    pooler: PoolerConfig | None = None,
) -> AsyncLLM:
    """Fill in `state.async_llm` and return it. Requests are still refused until the state's phase is ready."""
    adapters = None
    if engine.info.max_loras:
        is_model = partial(names_model, settings)
        adapters = ServedAdapters(engine, served_names(settings), AdapterPaths(settings), is_model)
    strict = settings.strict_max_tokens
    async_llm = AsyncLLM(
        engine, tokenizer, generation_config, strict_max_tokens=strict, pooler=pooler, adapters=adapters
    )
    async_llm.on_finish.append(counters.finish)
    if settings.enable_log_requests:
        async_llm.on_finish.append(_log_generation)
    state.async_llm = async_llm
    return async_llm


def served_by(info: EngineInfo) -> dict[str, str | None]:
    """Return the fields of a model card about the code that computes the model, and the costs of it if it is not our
    own."""
    is_own = info.served_by == "oarlock"
    note = None if is_own else code_limits(is_replicated=info.is_replicated)
    return {"served_by": info.served_by, "served_by_note": note}


def _log_generation(generation: Generation) -> None:
    """Log the one line of a request. It never contains the request's text."""
    now = time.monotonic()
    first = generation.first_token_at
    reasons = ",".join(choice.finish_reason or "abort" for choice in generation.choices[:8])
    fields: dict[str, Any] = {
        "request_id": generation.request_id,
        "adapter": generation.choices[0].request.adapter,
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "completion_tokens": generation.completion_tokens,
        "choices": len(generation.choices),
        "ttft_s": None if first is None else first - generation.arrival,
        "total_s": now - generation.arrival,
        "finish": reasons,
        "client": generation.client or None,
    }
    _log.info(event("request_done", **fields))
