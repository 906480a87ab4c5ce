"""Start of generations on a running engine, and the set of open generations. Knows nothing of HTTP or JSON."""

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

from oarlock.engine.errors import RequestError
from oarlock.engine.types import POOLS, PoolingParams, Request
from oarlock.server.llm.adapters import UNLOADED, ServedAdapters
from oarlock.server.llm.admission_queue import AdmissionQueue
from oarlock.server.llm.generation import Engine, Generation, PooledChoice, PooledOutput, Pooling
from oarlock.server.llm.generation_config import GenerationConfig
from oarlock.server.llm.input_processor import InputProcessor, ProcessedRequest
from oarlock.server.llm.pooler_config import PoolerConfig
from oarlock.server.llm.tokenizer import Tokenizer


class AsyncLLM:
    """One engine with its tokenizer, for the endpoints and for the offline `LLM`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        generation_config: GenerationConfig | None = None,
        *,
        strict_max_tokens: bool = False,
        pooler: PoolerConfig | None = None,
        adapters: ServedAdapters | None = None,
    ) -> None:
        """`strict_max_tokens`: refuse a token limit beyond the context instead of lowering it. `pooler`: the pooling
        task that the model is served for; None: text generation. `adapters`: LoRA adapters of `engine`; None: no
        adapters are served.
        """
        self.engine = engine
        self.adapters = adapters
        if adapters is not None:
            adapters.on_unload.append(self._fail_requests_of)
        self.pooler = pooler or PoolerConfig()
        self.input_processor = InputProcessor(engine, tokenizer, generation_config, strict_max_tokens=strict_max_tokens)
        # Held while the prompt of a batch request is made. The batch runner replaces it with a semaphore, so that one
        # such prompt is made at a time and the tokenizer's threads stay free for interactive requests.
        self.one_prompt: AbstractAsyncContextManager[object] = nullcontext()
        self.open: set[Generation] = set()
        self.on_finish: list[Callable[[Generation], None]] = []
        info = engine.info
        size = info.data_parallel_size
        limits = (info.max_num_seqs, info.max_waiting_requests, info.max_waiting_tokens)
        self.admission_queue = AdmissionQueue(*(size * limit for limit in limits), num_replicas=size)

    def start(
        self,
        processed: ProcessedRequest,
        key_label: str | None = None,
        *,
        is_background: bool = False,
        data_parallel_rank: int | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Run a request's choices. `key_label`: label of its API key, which determines its share of the engine.

        `is_background`: all other requests go first, and a full queue must accept it, because the caller limits the
        number of such requests. `data_parallel_rank`: the replica that generates it; None: the best replica. `adapter`:
        name of a loaded LoRA adapter.
        """
        if adapter is not None:
            for choice in processed.choices:
                choice.request = replace(choice.request, adapter=adapter)
        generation = Generation(
            self.engine,
            processed.choices,
            processed.num_prompts,
            self._closed,
            self.admission_queue,
            processed.timeout_s,
            processed.spent_s,
            key_label,
            is_background=is_background,
            data_parallel_rank=data_parallel_rank,
        )
        self.open.add(generation)
        return generation

    def start_pooling(
        self,
        prompts: Sequence[tuple[int, ...]],
        pooling: PoolingParams,
        key_label: str | None = None,
        *,
        priority: int = 0,
        cache_salt: bytes = b"",
        timeout_s: float | None = None,
        spent_s: float = 0.0,
        is_background: bool = False,
        data_parallel_rank: int | None = None,
        second_texts: Sequence[int] = (),
        adapter: str | None = None,
    ) -> Pooling:
        """Run `prompts` (token ids of each) for their vectors, as one request whose `outputs()` are in the same order.

        `second_texts`: for an encoder that compares two texts, the start of the second text in each prompt.

        The engine checks each prompt when it arrives: `RequestError` if it can never run. `timeout_s`: limit for all
        prompts together, of which `spent_s` have passed. The other arguments are the same as in `start`.
        """
        choices = []
        for index, prompt in enumerate(prompts):
            ids = array("i", prompt)  # prompts may wait for long; an array takes a ninth of the memory of a tuple
            own = replace(pooling, second_text=second_texts[index]) if second_texts else pooling
            number = self.engine.new_request_id()
            request = Request(number, ids, POOLS, priority, cache_salt, pooling=own, adapter=adapter)
            choices.append(PooledChoice(index, request, self.engine.info.hidden_size))
        running = Pooling(
            self.engine,
            choices,
            len(choices),
            self._closed,
            self.admission_queue,
            timeout_s,
            spent_s,
            key_label,
            is_background=is_background,
            data_parallel_rank=data_parallel_rank,
        )
        self.open.add(running)
        return running

    async def pool(
        self,
        prompt_token_ids: tuple[int, ...],
        pooling: PoolingParams,
        key_label: str | None = None,
        *,
        priority: int = 0,
        cache_salt: bytes = b"",
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> PooledOutput:
        """Return the vectors of one prompt. Raises the errors of `Pooling.outputs`.

        Cancelling the call aborts the request.
        """
        running = self.start_pooling(
            [prompt_token_ids],
            pooling,
            key_label,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            adapter=adapter,
        )
        try:
            return (await running.outputs())[0]
        finally:
            running.close()

    def fail_all(self, error: BaseException) -> None:
        """End every open generation with an error."""
        for generation in list(self.open):
            generation.fail(error)

    def _fail_requests_of(self, adapter: str) -> None:
        """End the requests of an unloaded adapter that the engine has not received yet; it has ended all others."""
        message = f"The adapter '{adapter}' was unloaded before this request was complete."
        for generation in list(self.open):
            if generation.adapter == adapter:
                generation.fail(RequestError(message, "model", UNLOADED))

    def abort(self, request_id: str) -> int:
        """End the open generations with this id, from the request header or the response. Return their number."""
        wanted = {request_id, request_id.removeprefix("cmpl-"), request_id.removeprefix("chatcmpl-")}
        return sum(generation.abort() for generation in list(self.open) if generation.request_id in wanted)

    def abort_all(self) -> int:
        """End every open generation with the text it has so far. Return their number."""
        return sum(generation.abort() for generation in list(self.open))

    def _closed(self, generation: Generation) -> None:
        self.open.discard(generation)
        for callback in self.on_finish:
            callback(generation)
