"""A scripted engine behind the real server: over a loopback socket where bytes matter, in-process elsewhere."""

from __future__ import annotations

import asyncio
import pickle  # noqa: TID251 - of its own objects
import threading
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import tokenizers

from oarlock.base.watched_reads import WatchedReads
from oarlock.engine.client import digest_of
from oarlock.engine.errors import EngineDeadError, QueueFullError, RequestError
from oarlock.engine.stats import EngineState, EngineStats, RequestHistory
from oarlock.engine.types import AdapterInfo, EngineInfo, FinishReason, Request, TokenEvent, TokenLogprobs
from oarlock.server.config.settings import Settings, make_settings
from oarlock.server.endpoints.app import create_app
from oarlock.server.endpoints.serving import connect_engine
from oarlock.server.http import openapi
from oarlock.server.http.listeners import bind, url_of
from oarlock.server.http.server_state import Phase, ServerState
from oarlock.server.http.uvicorn_server import HttpServer
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.server.observability.metrics import HttpCounters
from tests.contract.browsers import browser, expect, serve, window  # noqa: F401  (fixtures of the page's tests)
from tests.unit.server.llm import chat_templates as templates

DEMO = Path(__file__).resolve().parents[2] / "models" / "oarlock-demo"
INFO = EngineInfo(
    max_model_len=256,
    vocab_size=4096,
    num_blocks=65,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    tensor_parallel_size=2,
    device="cpu",
    dtype="float32",
    attention_backend="reference",
    architecture="Qwen2ForCausalLM",
    num_parameters=8_900_000,
    weight_bytes_per_rank=9_000_000,
    kv_bytes_per_token_per_rank=2048,
    kv_cache_dtype="int8",
    enable_prefix_caching=True,
    load_seconds=0.1,
    max_waiting_requests=512,
    max_waiting_tokens=1_000_000,
    hidden_size=4,
)


# Files of the page's tests that also run in Firefox in `make test-long`; the others do in `pytest -m every`.
IN_FIREFOX = ("test_web_page.py", "test_web_page_conversations.py", "test_web_page_markdown.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "browser" in metafunc.fixturenames:
        mark = pytest.mark.soak if metafunc.definition.path.name in IN_FIREFOX else pytest.mark.every
        browsers = ["chromium", pytest.param("firefox", marks=mark)]
        metafunc.parametrize("browser", browsers, indirect=True, scope="module")


@dataclass
class FakeEngine:
    """Answers every request with `reply`'s ids, one token per event, and records how each request ended."""

    reply: Callable[[Request], list[int]]
    eos: bool = True  # whether an end-of-sequence token follows the reply
    delay_s: float = 0.0  # before every event
    fail_after: int | None = None  # tokens before the engine reports an error
    blamed: str | None = None  # the field of the request that the error names
    missing: str | None = None  # what the error says was not available
    die_after: int | None = None  # tokens before the engine dies
    refuse: Exception | None = None
    pause_after: int | None = None  # tokens before the engine pauses
    info: EngineInfo = INFO
    number: int = 0
    is_alive: bool = True
    last_progress_age_s: float = 0.0
    exit_code: int | None = None
    death_cause: str | None = None
    scored_at_once: int | None = None  # prompt tokens whose logprobs come in one event; None: all
    requests: list[Request] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    resets: int = 0
    closed: bool = False
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: EngineStats = field(default_factory=EngineStats)
    live_state: EngineState | None = None
    num_asked: int = 0  # questions for it
    known: dict[int, RequestHistory] = field(default_factory=dict)
    adapters: dict[str, AdapterInfo] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)  # names, in the order of the calls
    num_adding: int = 0
    may_add: asyncio.Event = field(default_factory=asyncio.Event)  # loads of adapters wait for it, if it is replaced
    adapter_reads: WatchedReads = field(default_factory=WatchedReads)
    _next_id: int = 0

    def __post_init__(self) -> None:
        self.may_add.set()

    def new_request_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def choose(self, request: Request, rank: int | None = None) -> FakeEngine:
        return self

    @property
    def replicas(self) -> list[FakeEngine]:
        return [self]

    async def stats(self) -> EngineStats:
        return self.numbers

    async def state(self) -> EngineState | None:
        self.num_asked += 1
        return self.live_state

    async def histories(self, request_ids: Sequence[int]) -> list[RequestHistory]:
        return [self.known[request_id] for request_id in request_ids if request_id in self.known]

    async def reset_prefix_cache(self) -> int:
        self.resets += 1
        return 40

    async def add_adapter(self, name: str, directory: str) -> None:
        """Load an adapter, unless its weights are the word "broken"."""
        if not self.is_alive:
            raise EngineDeadError("rank 1 was killed")
        self.added.append(name)
        self.num_adding += 1
        try:
            await self.may_add.wait()
        finally:
            self.num_adding -= 1
        digest = await digest_of(name, directory, self.adapter_reads)
        if (Path(directory) / "adapter_model.safetensors").read_text() == "broken":
            message = f"The adapter {name!r} could not be loaded: its header is damaged"
            raise RequestError(message, "lora_path", "adapter_failed")
        self.adapters[name] = AdapterInfo(name, digest, directory, "ready", 0, 0)

    async def remove_adapter(self, name: str) -> int:
        if name not in self.adapters:
            raise RequestError(f"There is no adapter {name!r}.", "model", "adapter_not_found")
        del self.adapters[name]
        return 0

    async def list_adapters(self) -> list[AdapterInfo]:
        return [*self.adapters.values()]

    async def close(self, timeout: float) -> None:
        self.closed = True

    def die(self, exit_code: int = 5) -> None:
        self.is_alive, self.exit_code, self.death_cause = False, exit_code, "rank 1 was killed"
        self.resume.set()
        self.dead.set()

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        ended = False
        try:
            async for event in self._events(request):
                ended = event.finish_reason is not None
                if ended:
                    self.finished.append(request.request_id)
                yield event
        finally:
            if not ended:
                self.aborted.append(request.request_id)

    async def _vectors(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Send the numbers of `vectors_of` in two events, which may be slow, late, failing or missing."""
        numbers, half = vectors_of(request), len(request.prompt_token_ids) // 2
        await asyncio.sleep(self.delay_s)
        yield TokenEvent(request.request_id, pooled=numbers[:half], num_cached_tokens=half)
        if self.pause_after is not None:
            await self.resume.wait()
        if self.die_after is not None or not self.is_alive:
            raise EngineDeadError("rank 1 was killed")
        if self.fail_after is not None:
            failure = {"error": "not finite", "error_param": self.blamed, "error_code": self.missing}
            yield TokenEvent(request.request_id, finish_reason=FinishReason.ERROR, **failure)
            return
        last = {"pooled": numbers[half:], "num_cached_tokens": half}
        yield TokenEvent(request.request_id, finish_reason=FinishReason.STOP, **last)

    async def _events(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        if request.pooling is not None:
            async for event in self._vectors(request):
                yield event
            return
        params = request.params
        first = {"prompt_logprobs": _prompt_logprobs(request), "num_cached_tokens": len(request.prompt_token_ids) // 2}
        if self.scored_at_once is not None:
            scored = first["prompt_logprobs"]
            last = max(0, len(scored) - self.scored_at_once)
            for start in range(0, last, self.scored_at_once):
                part = scored[start : min(start + self.scored_at_once, last)]
                yield TokenEvent(request.request_id, **{**first, "prompt_logprobs": part})
            first["prompt_logprobs"] = scored[last:]
        if params.max_tokens == 0:
            yield TokenEvent(request.request_id, finish_reason=FinishReason.LENGTH, **first)
            return
        ids = self.reply(request)[: params.max_tokens]
        end = params.eos_token_ids[:1] if self.eos and len(ids) < params.max_tokens else ()
        tokens = [*ids, *end]
        for number, token_id in enumerate(tokens):
            await asyncio.sleep(self.delay_s)
            if self.pause_after is not None and number >= self.pause_after:
                await self.resume.wait()
            if self.die_after == number or not self.is_alive:
                raise EngineDeadError("rank 1 was killed")
            if self.fail_after == number:
                failure = {"error": "not finite", "error_param": self.blamed, "error_code": self.missing}
                yield TokenEvent(request.request_id, finish_reason=FinishReason.ERROR, **failure, **first)
                return
            reason = None
            if number == len(tokens) - 1:
                reason = FinishReason.STOP if end else FinishReason.LENGTH
            yield TokenEvent(
                request.request_id,
                (token_id,),
                logprobs=(_logprob(token_id, params.logprobs),) if params.logprobs is not None else (),
                finish_reason=reason,
                stop_token_id=token_id if reason is FinishReason.STOP else None,
                **(first if number == 0 else {}),
            )


def vectors_of(request: Request) -> array:
    """Vectors that the fake engine returns for a request: float32, `INFO.hidden_size` for each token."""
    assert request.pooling is not None
    ids = request.prompt_token_ids
    tokens = [[token % 7 + 0.5, -(token % 11) - 0.25, position / 8, 1.0] for position, token in enumerate(ids)]
    vectors = {"last": tokens[-1:], "cls": tokens[:1], "token": tokens}.get(request.pooling.kind)
    if request.pooling.kind == "logits":
        return array("f", [(ids[-1] + token) % 13 - 6.5 for token in request.pooling.token_ids])
    if vectors is None:
        vectors = [[sum(column) / len(ids) for column in zip(*tokens, strict=True)]]
    return array("f", [number for vector in vectors for number in vector])


def _logprob(token_id: int, top: int | None) -> TokenLogprobs:
    best = tuple((token_id + index, -0.5 - index) for index in range(top or 0))
    return TokenLogprobs(token_id, -0.5 if token_id % 7 else float("-inf"), 1, best)


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs, ...]:
    top = request.params.prompt_logprobs
    return () if top is None else tuple(_logprob(i, top) for i in request.prompt_token_ids[1:])


@pytest.fixture(scope="session", autouse=True)
def quick_copies() -> Iterator[None]:
    """Each stage copies the OpenAPI document, most of what it takes to make one: here in a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openapi, "copy", SimpleNamespace(deepcopy=lambda tree: pickle.loads(pickle.dumps(tree))))
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Iterator[Tokenizer]:
    loaded = Tokenizer.load(DEMO)
    yield loaded
    loaded.close()


@dataclass
class Stage:
    """A ready application around one fake engine."""

    engine: FakeEngine
    settings: Settings
    state: ServerState
    counters: HttpCounters
    app: object

    def client(self, **options: object) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=True)  # type: ignore[arg-type]
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", **options)  # type: ignore[arg-type]


@pytest.fixture
def make_stage(tokenizer: Tokenizer) -> Iterator[Callable[..., Stage]]:
    """`make_stage("text", option=…)`: an engine that answers every prompt with this text."""
    states: list[ServerState] = []

    def make(reply: str | Callable[[Request], list[int]] = "Hello, wörld! 😀", **options: object) -> Stage:
        engine_options = {name: options.pop(name) for name in list(options) if name in FakeEngine.__dataclass_fields__}
        generation_config, pooler = options.pop("generation_config", None), options.pop("pooler", None)
        settings = make_settings({"served_model_name": ("demo", "alias/with/slash"), **options})
        ids = tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else None
        engine = FakeEngine(reply if ids is None else lambda request: ids, **engine_options)  # type: ignore[arg-type]
        state, counters = ServerState(), HttpCounters()
        app = create_app(settings, state, counters)
        connect_engine(settings, state, counters, engine, tokenizer, generation_config, pooler)  # type: ignore[arg-type]
        state.heartbeat, state.phase = engine, Phase.READY
        states.append(state)
        return Stage(engine, settings, state, counters, app)

    yield make
    for state in states:
        state.large_bodies.close()


def chat_tokenizer(source, special=()):
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in special])
    return Tokenizer(backend, {"chat_template": source, "bos_token": "", "eos_token": "<|im_end|>"})


@pytest.fixture
def chat(make_stage):
    """`chat(reply, template, special=…)`: a stage whose model has that template and answers with `reply`."""
    loaded = []

    def make(reply, source=templates.QWEN, special=(), **options):
        tokenizer = chat_tokenizer(source, special)
        loaded.append(tokenizer)
        ids = tokenizer.encode(reply, add_special_tokens=False)
        stage = make_stage(lambda request: ids, **options)
        stage.state.async_llm.input_processor.tokenizer = tokenizer
        return stage

    yield make
    for tokenizer in loaded:
        tokenizer.close()


@dataclass
class Running:
    """A stage served over a real socket, from a separate thread."""

    stage: Stage
    url: str
    port: int
    stop: Callable[[], None]


@pytest.fixture
def make_server(make_stage: Callable[..., Stage]) -> Iterator[Callable[..., Running]]:
    """`make_server("text", …)`: `make_stage`, listening on a loopback port."""
    running: list[Callable[[], None]] = []

    def make(
        *args: object,
        loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
        max_connections: int | None = None,
        port: int = 0,
        around: Callable[[object], object] = lambda app: app,
        **options: object,
    ) -> Running:
        """Start a server. `around`: wraps the application, as a proxy would."""
        listener = bind("127.0.0.1", port)
        stage = make_stage(*args, **options)
        server = HttpServer(around(stage.app), listener, max_connections)  # type: ignore[arg-type]

        def run() -> None:
            with asyncio.Runner(loop_factory=loop) as runner:
                runner.run(server.run_until_stopped())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        wait_for(lambda: server.started)

        def stop() -> None:
            server.should_exit = True
            thread.join(60)

        running.append(stop)
        return Running(stage, url_of(listener), listener.getsockname()[1], stop)

    yield make
    for stop in running:
        stop()


def wait_for(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    """Wait until `condition` holds. The limit only keeps a broken test from hanging."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition never came true")
        time.sleep(0.005)


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., None]:
    return wait_for


@pytest.fixture
def queue_full() -> QueueFullError:
    return QueueFullError("The queue is full (512 requests).", 2.4)
