"""A running engine with the server's endpoints, without HTTP: it refuses and returns the same as the server.

`run_requests` processes a file of requests with it.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from oarlock.base.errors import StartupError
from oarlock.engine.errors import EngineDeadError, RequestError
from oarlock.engine.replicas import start_engine
from oarlock.server.config.settings import Settings
from oarlock.server.endpoints.batches.batch import BatchEndpoints, BatchRun
from oarlock.server.endpoints.batches.batch_file import OutputFile, RequestFile
from oarlock.server.endpoints.batches.key_shares import FairLimiter, KeyLimiter
from oarlock.server.endpoints.chat.serving import OpenAIServingChatCompletion
from oarlock.server.endpoints.completions import OpenAIServingCompletion
from oarlock.server.endpoints.pooling.scoring import OpenAIServingScoring
from oarlock.server.endpoints.pooling.serving import OpenAIServingEmbedding
from oarlock.server.endpoints.responses.serving import OpenAIServingResponses
from oarlock.server.endpoints.serving import connect_engine
from oarlock.server.http.server_state import ServerState
from oarlock.server.hub.adapter_path import find_start_adapters
from oarlock.server.hub.transfer import in_words
from oarlock.server.launch.child_process import engine_processes
from oarlock.server.launch.supervisor import RunningEngine
from oarlock.server.llm.generation_config import GenerationConfig
from oarlock.server.llm.pooler_config import PoolerConfig
from oarlock.server.llm.tokenizer import Tokenizer, find_files
from oarlock.server.observability.metrics import HttpCounters
from oarlock.server.offline.inputs import LoRARequest
from oarlock.workers.config import OnProgress

_CLOSE_S = 10.0
_REPORT_S = 1.0
_EXIT_WORKER_DIED = 5
Report = Callable[[str, float, str], None]  # phase, fraction, detail


class OfflineEngine:
    """One engine and its endpoints, on the event loop that started it."""

    def __init__(
        self,
        settings: Settings,
        engine: RunningEngine,
        tokenizer: Tokenizer,
        generation_config: GenerationConfig,
        pooler: PoolerConfig,
    ) -> None:
        self._state = state = ServerState()
        self._counters = counters = HttpCounters()
        self._adapters: dict[str, LoRARequest] = {}  # name -> the request that loaded the adapter
        self._loading = asyncio.Lock()
        self.engine = engine
        self.tokenizer = tokenizer
        self.async_llm = connect_engine(settings, state, counters, engine, tokenizer, generation_config, pooler)
        self.completions = OpenAIServingCompletion(settings, state, counters)
        self.chat_completions = OpenAIServingChatCompletion(settings, state, counters)
        alone = replace(settings, response_store=0)  # no later request could continue a response
        responses = OpenAIServingResponses(alone, state, counters)
        self.embeddings = OpenAIServingEmbedding(settings, state, counters)
        self.scoring = OpenAIServingScoring(settings, state, counters)
        self.endpoints = BatchEndpoints(self.completions, self.chat_completions, responses, self.embeddings)

    @staticmethod
    async def start(settings: Settings, on_progress: OnProgress) -> "OfflineEngine":
        """Load the model. Raises `StartupError`. The engine ends with the thread that called this."""
        # The engine and its ranks import their libraries while the tokenizer is read here.
        processes = engine_processes(settings)
        try:
            files = await find_files(settings, on_progress)
            generation_config = GenerationConfig.load(files.model, settings.generation_config)
            pooler = PoolerConfig.load(files.model, settings.runner, settings.classifier_from_token)
            tokenizer = await asyncio.to_thread(files.load_tokenizer)
            pooler = pooler.loaded(tokenizer)
            config = settings.engine_config(files.model, tokenizer_path=files.tokenizer)
            adapters = await find_start_adapters(settings, on_progress)
            known = tuple((found.module.name, found.directory) for found in adapters)
            config = replace(config, writes_text=pooler.generates, worker=config.worker.with_(lora_adapters=known))
            engine = await start_engine(config, on_progress, processes=processes)
        finally:
            for process in processes:
                process.discard()
        started = OfflineEngine(settings, engine, tokenizer, generation_config, pooler)
        try:
            if started.async_llm.adapters is not None:
                await started.async_llm.adapters.load_at_start(adapters, on_progress)
        except BaseException:
            await started.close()
            raise
        return started

    @property
    def generation_tokens(self) -> int:
        """Number of tokens generated for all requests that have ended."""
        return self._counters.generation_tokens

    @property
    def num_at_once(self) -> int:
        """Number of concurrent requests that keeps every row of every replica busy, with the same number waiting."""
        info = self.engine.info
        return 2 * info.data_parallel_size * info.max_num_seqs

    async def load_adapters(self, requests: Iterable[LoRARequest | None]) -> list[str | None]:
        """Load adapters that were not used before, and return the model names of `requests`; None: no adapter.

        Raises `RequestError`.
        """
        given = list(requests)
        async with self._loading:
            for request in filter(None, dict.fromkeys(given)):
                await self._load(request)
        return [None if request is None else request.lora_name for request in given]

    async def _load(self, request: LoRARequest) -> None:
        name, number, path = request.lora_name, request.lora_int_id, request.lora_path
        adapters, known = self.async_llm.adapters, self._adapters.get(name)
        if adapters is None:
            raise _refused(f"the adapter {name!r}, but LoRA is off. Add enable_lora=True to LLM.")
        owner = next((one.lora_name for one in self._adapters.values() if one.lora_int_id == number), name)
        if owner != name:
            raise _refused(f"lora_int_id {number} for {name!r}, but it belongs to {owner!r}. Use another number.")
        is_same = known is None or known.lora_int_id == number
        if not is_same or (known is not None and known.lora_path != path and not request.load_inplace):
            raise _refused(f"another adapter with the name {name!r}, which is in use. Use another name.")
        if known is not None and not request.load_inplace:
            return
        served = await adapters.find(name)
        if served is not None and served.root == path and not request.load_inplace:
            await adapters.use(name)  # an option of `LLM` names the adapter, too
        else:
            await adapters.load(name, path, in_place=request.load_inplace)
        self._adapters[name] = request

    async def close(self) -> None:
        """Stop the engine and its ranks."""
        try:
            await self.engine.close(_CLOSE_S)
        finally:
            self._state.large_bodies.close()
            self.tokenizer.close()


def _refused(what: str) -> RequestError:
    return RequestError(f"lora_request has {what}", "lora_request")


async def run_requests(engine: OfflineEngine, requests: RequestFile, results: OutputFile, report: Report) -> None:
    """Process all requests. Raises `StartupError` if the engine dies or the disk is full; earlier results are kept."""
    progress = asyncio.create_task(_report(engine, requests, results, report))
    try:
        with ThreadPoolExecutor(1, "batch") as disk:
            limiter = KeyLimiter(FairLimiter(engine.num_at_once), None)
            run = BatchRun(engine.endpoints.respond, requests, results, disk, limiter)
            await run.run()
    except EngineDeadError as error:
        raise StartupError(
            f"The engine has stopped: {error}. {results.num_done} of {len(requests)} requests are complete.",
            "See the lines above for the reason, if there is one. Repeat the command to continue.",
            _EXIT_WORKER_DIED,
        ) from None
    except OSError as error:
        raise StartupError(
            f"The responses cannot be written: {error.strerror}. {results.num_done} of {len(requests)} "
            "requests are complete.",
            "Free some space, and repeat the command to continue.",
        ) from None
    finally:
        progress.cancel()


async def _report(engine: OfflineEngine, requests: RequestFile, results: OutputFile, report: Report) -> None:
    begun, done_before = time.monotonic(), results.num_done
    while True:
        await asyncio.sleep(_REPORT_S)
        done, total = results.num_done, len(requests)
        took = time.monotonic() - begun
        words = f"{done} of {total} requests"
        if results.num_failed:
            words += f", {results.num_failed} failed"
        words += f", {engine.generation_tokens / took:.0f} tokens/s"
        if done > done_before:
            words += f", {in_words((total - done) * took / (done - done_before))} left"
        report("answering", done / total, words)
