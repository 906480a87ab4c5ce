"""Starts generations on a running engine, and knows those that are open. Knows nothing of HTTP or JSON."""

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

from oarlock.engine.types import POOLS, PoolingParams, Request
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
    ) -> None:
        """`strict_max_tokens`: a token limit beyond the context is refused, not lowered. `pooler`: what the model is
        served for; None: texts."""
        self.engine = engine
        self.pooler = pooler or PoolerConfig()
        self.input_processor = InputProcessor(engine, tokenizer, generation_config, strict_max_tokens=strict_max_tokens)
        # Held while the prompt of a request that yields is made: beside others one at a time, so that the tokenizer's
        # threads are for those who wait.
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
        has_place: bool = False,
        data_parallel_rank: int | None = None,
    ) -> Generation:
        """Run a request's choices. `key_label`: of the API key it came with, which shares the engine with others.

        `has_place`: a full queue does not refuse it, because the caller bounds how many there are at a time; it yields
        to requests that have none. `data_parallel_rank`: the replica that generates it; None: the one that is best.
        """
        generation = Generation(
            self.engine,
            processed.choices,
            processed.num_prompts,
            self._closed,
            self.admission_queue,
            processed.timeout_s,
            processed.spent_s,
            key_label,
            has_place=has_place,
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
        has_place: bool = False,
        data_parallel_rank: int | None = None,
        second_texts: Sequence[int] = (),
    ) -> Pooling:
        """Run `prompts`, token ids each, for their vectors: one request, whose `outputs()` are in their order.

        `second_texts`: of an encoder that compares two texts, where the second begins in each prompt.

        The engine checks each when it comes: `RequestError` where it can never run. `timeout_s`: of all together, of
        which `spent_s` have passed. The other arguments are those of `start`.
        """
        choices = []
        for index, prompt in enumerate(prompts):
            ids = array("i", prompt)  # they may wait for long, and take a ninth of the memory of a tuple
            own = replace(pooling, second_text=second_texts[index]) if second_texts else pooling
            request = Request(self.engine.new_request_id(), ids, POOLS, priority, cache_salt, pooling=own)
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
            has_place=has_place,
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
    ) -> PooledOutput:
        """The vectors of one prompt. Cancelling the call aborts the request; raises what `Pooling.outputs` raises."""
        running = self.start_pooling(
            [prompt_token_ids],
            pooling,
            key_label,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
        )
        try:
            return (await running.outputs())[0]
        finally:
            running.close()

    def fail_all(self, error: BaseException) -> None:
        """End every open generation with an error."""
        for generation in list(self.open):
            generation.fail(error)

    def abort(self, request_id: str) -> int:
        """End the open generations with this id, given as the header's or the answer's. Returns how many there were."""
        wanted = {request_id, request_id.removeprefix("cmpl-"), request_id.removeprefix("chatcmpl-")}
        return sum(generation.abort() for generation in list(self.open) if generation.request_id in wanted)

    def abort_all(self) -> int:
        """End every open generation with the text it has so far. Returns how many there were."""
        return sum(generation.abort() for generation in list(self.open))

    def _closed(self, generation: Generation) -> None:
        self.open.discard(generation)
        for callback in self.on_finish:
            callback(generation)
