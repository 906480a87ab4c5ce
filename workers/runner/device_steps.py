"""Launch of steps on a device without waiting: plain decodes and small steps with prompts as graphs, others by
operation.

One copy brings a step to the device, and one copy brings its output back. In between the host reads nothing: sampled
tokens are inserted into the next step on the device. A decode is launched in two parts, the model and then sampling,
since masks may arrive after the step. The graph of a step with prompts has only the layers: any of its tokens may need
logits, so these are computed and sampled operation by operation. Sampled tokens are always stored at the same address,
from which the next step reads them. Knows the model, its pages and the samplers. Does not know requests or processes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, LayerKV
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.protocol import StepMetadata, StepOutput, empty_step, table_width
from oarlock.workers.runner.buckets import (
    MOST_PROMPTS,
    bucket_of,
    graph_sizes,
    logits_rows_at_once,
    prompt_bucket_of,
    prompt_sizes,
)
from oarlock.workers.runner.cuda_graphs import Graph, GraphMaker
from oarlock.workers.runner.device import graph_bytes
from oarlock.workers.runner.memory_needs import MemoryMeter
from oarlock.workers.runner.pending_output import Launched, wait_for
from oarlock.workers.runner.pooler import PooledOutput, Pooler
from oarlock.workers.runner.step_inputs import InputPlace, Layout, Shape, StagingBuffer, StepInputs
from oarlock.workers.runner.trial_steps import null_step
from oarlock.workers.sampling.columns import Variant
from oarlock.workers.sampling.device_sampler import (
    DeviceOutputs,
    DeviceSampler,
    output_of,
    output_sections,
)
from oarlock.workers.sampling.sharded_sampler import RowSampler, ShardSampler
from oarlock.workers.sampling.token_histories import DenseHistories


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose work for a step can be independent of values on the host."""

    def prepare_decode(self, batch: ForwardBatch) -> Any:
        """Return a plan for steps of one token per sequence, with contexts of up to `context_lens`. The plan stays
        valid while the tensors of `batch` change."""

    def prepare_prompts(self, batch: ForwardBatch, most: int) -> Any:
        """Return a plan as `prepare_decode` does, for queries of any lengths in `query_start_loc`. At most `most` of
        them are longer than one token."""


class StepSampling(Protocol):
    """Sampler of the rows of one step after another: `begin`, `sample` for each part of the rows in turn, `finish`."""

    sampled: Tensor  # integers [R] on the device, always the same tensor: tokens of the newest step, by row

    @property
    def variants(self) -> Sequence[Variant]:
        """Variants to capture, ordered so that each serves more steps than the previous."""

    def begin(self, step: StepMetadata) -> None:
        """Prepare for a step before it is sent to the device."""

    def sample(self, logits: Tensor, place: InputPlace, first: int, variant: Variant) -> None:
        """Sample rows `first` to `first + n` of the step in `place`.

        `logits`: float32 [n, vocab_local], of this rank. `variant`: at least the kernels that these rows need. The work
        depends only on the variant and on the number of rows. A collective call.
        """

    def finish(self, step: StepMetadata, place: InputPlace) -> Launched:
        """Return the output of the step."""


class DeviceSteps:
    """Launcher of a rank's steps on a CUDA device.

    Set `kv`, optionally call `capture`, then call `launch` any number of times, then `release`.
    """

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        inputs: StepInputs,
        sampling: StepSampling,
        pooler: Pooler,
        *,
        rows_at_once: int,
        max_model_len: int,
    ) -> None:
        """Allocate the logits. `rows_at_once`: rows of logits that are computed together, at least the largest
        bucket."""
        self._model, self._backend = model, backend
        self.kv: list[LayerKV] = []  # pages of all layers, once they are allocated
        self._inputs, self._sampling, self._pooler = inputs, sampling, pooler
        self._max_model_len = max_model_len
        device = sampling.sampled.device
        self._logits = torch.empty((rows_at_once, model.vocab_local), dtype=torch.float32, device=device)
        self._graphs: dict[int, Graph] = {}
        self._prompt_graphs: dict[int, Graph] = {}
        # [T, hidden_size] of the largest prompt graph; all prompt graphs write to it
        self._hidden = torch.empty(0, device=device)
        self._sampling_graphs: dict[tuple[int, Variant], Graph] = {}
        self._sizes: list[int] = []  # sizes of the graphs, ascending
        self._prompt_sizes: list[int] = []
        self._maker: GraphMaker | None = None

    @torch.inference_mode()
    def capture(self, maker: GraphMaker, sizes: Sequence[int], prompts: Sequence[int] = ()) -> int:
        """Capture more graphs, of `prompts` tokens and of `sizes` sequences, the largest first; return the number of
        graphs.

        Every rank must call this at the same point.
        """
        self._maker = maker
        for size in sorted(prompts, reverse=True):
            place = self._inputs.stage(empty_step(0), prompts=size)
            if size > len(self._hidden):
                spec, dtype = self._model.spec, self._model.place.dtype
                self._hidden = torch.empty((size, spec.hidden_size), dtype=dtype, device=self._logits.device)
            self._prompt_graphs[size] = maker.capture(self._prompts(place))
        self._prompt_sizes = sorted(self._prompt_graphs)
        for size in sorted(sizes, reverse=True):
            place = self._inputs.stage(empty_step(0), size)
            self._graphs[size] = maker.capture(self._decode(place))
            for variant in self._sampling.variants:
                work = partial(self._sampling.sample, self._logits[:size], place, 0, variant)
                self._sampling_graphs[size, variant] = maker.capture(work)
        self._sizes = sorted(self._graphs)
        return len(self._graphs) + len(self._sampling_graphs) + len(self._prompt_graphs)

    @torch.inference_mode()
    def launch(
        self,
        step: StepMetadata,
        await_masks: Callable[[], None] | None = None,
        layers: tuple[Decoder, list[LayerKV]] | None = None,
    ) -> Launched:
        """Start a step of at least one sequence. Every rank makes the same collective calls.

        `await_masks` blocks until `step.mask_bits` is complete. `step` is not read after the return. With `layers`,
        only these layers run, on their pages and without a graph.
        """
        self._sampling.begin(step)
        bucket = bucket_of(step, self._sizes) if self._sizes and layers is None else None
        prompts = prompt_bucket_of(step, self._prompt_sizes) if bucket is None and layers is None else None
        place = self._inputs.stage(step, bucket, prompts)
        if bucket is not None:
            self._graphs[bucket].replay()
            self._await(step, await_masks)
            self._sample_bucket(bucket, place, Variant.of(step))
        else:
            model, kv = layers or (self._model, self.kv)
            if prompts is not None:
                self._prompt_graphs[prompts].replay()
                hidden = self._hidden[: step.num_tokens]
            else:
                hidden = self._compute(step, place, model, kv)
            self._sample_rows(step, place, await_masks, model, hidden)
            if len(step.pool_seqs):
                pooled = self._pooler(step, hidden, model.compute_logits)
                return PooledOutput(self._sampling.finish(step, place), pooled)
        return self._sampling.finish(step, place)

    def replays(self, step: StepMetadata) -> bool:
        """Return whether a graph runs the model of `step`, which then allocates nothing."""
        return bucket_of(step, self._sizes) is not None if self._sizes else False

    def release(self) -> None:
        """Destroy the graphs, before the process group is destroyed. Others may be captured afterwards."""
        for graphs in (self._graphs, self._sampling_graphs, self._prompt_graphs):
            graphs.clear()
        self._sizes, self._prompt_sizes = [], []
        if self._maker is not None:
            self._maker.release()

    def _await(self, step: StepMetadata, await_masks: Callable[[], None] | None) -> None:
        if await_masks is not None:
            await_masks()
        self._inputs.stage_masks(step)

    def _decode(self, place: InputPlace) -> Callable[[], None]:
        """Return the work of a plain decode, from the step in `place` to its logits."""
        size = place.shape.seqs
        ones, bounds = [1] * size, [self._max_model_len] * size
        plan = None
        if isinstance(self._backend, CapturableBackend):
            plan = self._backend.prepare_decode(place.batch(ones, bounds, self._sampling.sampled))

        def work() -> None:
            if plan is None:  # a host device, whose lengths can be read
                batch = place.batch(ones, place.tensors["seq_lens"].tolist(), self._sampling.sampled)
                hidden = self._model(batch, self.kv, self._backend, self._backend.prepare(batch))
            else:
                batch = place.batch(ones, bounds, self._sampling.sampled)
                hidden = self._model(batch, self.kv, self._backend, plan)
            self._logits[:size].copy_(self._model.compute_logits(hidden))

        return work

    def _prompts(self, place: InputPlace) -> Callable[[], None]:
        """Return the work of any step with the number of tokens of `place`, up to its hidden states."""
        tokens, seqs, _, _ = place.shape
        bounds, plan = [self._max_model_len] * seqs, None
        if isinstance(self._backend, CapturableBackend):
            most = min(MOST_PROMPTS + 1, seqs)  # padding may be one more long query
            batch = place.batch([tokens] + [0] * (seqs - 1), bounds, self._sampling.sampled)
            plan = self._backend.prepare_prompts(batch, most)

        def work() -> None:
            if plan is None:  # a host device, whose lengths can be read
                batch = _without_padding(place, self._sampling.sampled)
                hidden = self._model(batch, self.kv, self._backend, self._backend.prepare(batch))
            else:
                batch = place.batch([tokens] + [0] * (seqs - 1), bounds, self._sampling.sampled)
                hidden = self._model(batch, self.kv, self._backend, plan)
            self._hidden[:tokens].copy_(hidden)

        return work

    def _sample_bucket(self, bucket: int, place: InputPlace, wanted: Variant) -> None:
        for variant in self._sampling.variants:
            if variant.serves(wanted):
                self._sampling_graphs[bucket, variant].replay()
                return
        self._sampling.sample(self._logits[:bucket], place, 0, wanted)

    def _compute(self, step: StepMetadata, place: InputPlace, model: Decoder, kv: list[LayerKV]) -> Tensor:
        """Return the hidden states of a step of any kind, computed operation by operation: [T, hidden_size]."""
        starts = step.query_start_loc
        batch = place.batch((starts[1:] - starts[:-1]).tolist(), step.seq_lens.tolist(), self._sampling.sampled)
        return model(batch, kv, self._backend, self._backend.prepare(batch))

    def _sample_rows(
        self,
        step: StepMetadata,
        place: InputPlace,
        await_masks: Callable[[], None] | None,
        model: Decoder,
        hidden: Tensor,
    ) -> None:
        """Compute logits and samples of a step of any kind, operation by operation. `hidden`: [T, hidden_size]."""
        variant, wanted = Variant.of(step), place.tensors["logits_indices"]
        for first in range(0, len(wanted), len(self._logits)):
            indices = wanted[first : first + len(self._logits)]
            self._logits[: len(indices)].copy_(model.compute_logits(hidden.index_select(0, indices)))
            if first == 0:
                self._await(step, await_masks)
            self._sampling.sample(self._logits[: len(indices)], place, first, variant)


def _without_padding(place: InputPlace, sampled: Tensor) -> ForwardBatch:
    """Return the step in `place`, on the host, without sequences that have no tokens."""
    starts, lengths = place.tensors["query_start_loc"], place.tensors["seq_lens"]
    queries = [count for count in starts.diff().tolist() if count]
    seqs = len(queries)
    batch = place.batch(queries, lengths[:seqs].tolist(), sampled)
    return replace(batch, query_start_loc=starts[: seqs + 1], seq_lens=lengths[:seqs], rows=batch.rows[:seqs])


# Variants to capture, each with the kernels of the previous and one more. With several ranks, also `_PROCESSED`: bias,
# penalties and masks without filters.
_VARIANTS = (
    Variant(),
    Variant(random=True),
    Variant(random=True, filtered=True),
    Variant(random=True, filtered=True, processed=True),
    Variant(random=True, filtered=True, processed=True, logprobs=True),
)
_PROCESSED = Variant(random=True, processed=True)
_ALWAYS = 2  # output sections that are always copied; the others hold logprobs


class DeviceSampling:
    """`StepSampling` by a `DeviceSampler` on one rank.

    With several ranks, rows are sampled from each rank's part of the logits if that is enough (`ShardSampler`).
    Otherwise the rows are divided among the ranks, and each rank samples from all logits of its rows (`RowSampler`).
    """

    def __init__(
        self,
        sampler: DeviceSampler | RowSampler,
        histories: DenseHistories,
        most_rows: int,
        tp: TensorParallel,
        shards: ShardSampler | None = None,
    ) -> None:
        """Allocate the outputs. `most_rows`: largest number of rows of logits in a step, including scored rows.
        `shards`: the sampler from parts of logits if there are several ranks."""
        self._sampler, self._shards, self._histories, self._tp = sampler, shards, histories, tp
        self.variants = _VARIANTS if shards is None else (*_VARIANTS[:2], _PROCESSED, *_VARIANTS[2:])
        largest = Layout(output_sections(most_rows))
        self._staging = StagingBuffer(largest.num_bytes, histories.seen.device)
        self.sampled: Tensor = largest.tensors(self._staging.on_device)["tokens"]  # int32 [most_rows]

    def begin(self, step: StepMetadata) -> None:
        """Write the histories that `step` brings, as `StepSampling` describes."""
        self._histories.write(step)

    def sample(self, logits: Tensor, place: InputPlace, first: int, variant: Variant) -> None:
        """Sample rows and count their tokens, as `StepSampling` describes."""
        rows = place.shape.logits
        outputs = DeviceOutputs(**Layout(output_sections(rows)).tensors(self._staging.on_device))
        if self._shards is not None and self._shards.serves(variant):
            self._shards.sample(logits, place.columns, outputs, variant, first)
        else:
            self._sampler.sample(logits, place.columns, outputs, variant, first)
        if variant.processed and first + len(logits) == rows:
            self._sampler.count(place.columns, outputs, rows)

    def finish(self, step: StepMetadata, place: InputPlace) -> Launched:
        """Start the copy of the results to the host, as `StepSampling` describes."""
        if self._tp.rank:
            return None
        found = output_sections(place.shape.logits)
        copied = found if Variant.of(step).logprobs else found[:_ALWAYS]
        return _DeviceOutput(_kept(step), Layout(found), self._staging.to_host(Layout(copied).num_bytes))


class _DeviceOutput:
    """Output of a step that the device may still compute."""

    def __init__(self, step: StepMetadata, layout: Layout, copied: Callable[[], np.ndarray]) -> None:
        self._step, self._layout, self._copied = step, layout, copied

    def wait(self) -> StepOutput:
        return output_of(self._step, self._layout.arrays(self._copied()))


def _kept(step: StepMetadata) -> StepMetadata:
    """Return `step` with copies of the arrays that its output needs: they may be overwritten before the output is
    ready."""
    names = ("token_ids", "query_start_loc", "logits_indices", "target_ids", "num_logprobs", "num_drafts")
    return replace(step, **{name: getattr(step, name).copy() for name in names})


logger = logging.getLogger("oarlock.runner")


def device_steps(
    config: WorkerConfig,
    model: Decoder,
    backend: AttentionBackend,
    tp: TensorParallel,
    tables: BlockTables,
    pooler: Pooler,
) -> DeviceSteps:
    """Allocate all memory that steps and graphs share, so that the rest of the device's memory can be measured."""
    assert config.max_model_len is not None
    seqs, device, vocab_size = config.max_num_seqs, tables.tables.device, model.spec.vocab_size
    rows = max(seqs, config.max_num_batched_tokens)
    sampled = seqs * (1 + config.num_speculative_tokens)
    at_once = logits_rows_at_once(config)
    histories, local = DenseHistories(seqs, 0, vocab_size, device), model.vocab_local
    sampler: DeviceSampler | RowSampler
    shards = None
    if tp.size == 1:
        sampler = DeviceSampler(vocab_size, at_once, histories, device)
        sampler.warm_up(local)
    else:
        sampler = RowSampler(tp, vocab_size, local, at_once, histories)
        sampler.warm_up()
        own = max(0, min(local, vocab_size - model.vocab_start))  # ids of this rank's shard that are in the vocabulary
        shards = ShardSampler(model.vocab_start, own, at_once, histories, device, tp.all_gather)
        shards.warm_up(local)
    return DeviceSteps(
        model,
        backend,
        StepInputs(tables, Shape(rows, seqs, rows, seqs * table_width(config)), sampled, vocab_size),
        DeviceSampling(sampler, histories, rows, tp, shards),
        pooler,
        rows_at_once=at_once,
        max_model_len=config.max_model_len,
    )


def warm_up_sizes(most: int) -> list[int]:
    """Return numbers of tokens, up to `most`, for which every variant of each kernel is compiled: they depend on powers
    of 2."""
    return [*(size for size in (2**power for power in range(1, 32)) if size < most), most]


def warm_up(steps: DeviceSteps, config: WorkerConfig) -> None:
    """Run steps without graphs, so that no kernel is compiled while requests wait. Every rank must call this at the
    same point."""
    assert config.max_model_len is not None
    for tokens in warm_up_sizes(min(config.max_num_batched_tokens, config.max_model_len)):
        wait_for(steps.launch(null_step(tokens, tokens, 1, config.block_size)))


def capture(steps: DeviceSteps, maker: GraphMaker, config: WorkerConfig, backend: AttentionBackend) -> int:
    """Warm up, and capture the graphs of a rank if it can and may have graphs. Return the number of graphs."""
    warm_up(steps, config)
    reason, sizes, begun = _why_none(config, backend), graph_sizes(config), time.monotonic()
    if reason is not None:
        logger.info("event=no_graphs reason=%r", reason)
        return 0
    prompts = prompt_sizes(config)
    count = steps.capture(maker, sizes, prompts)
    seconds = time.monotonic() - begun
    logger.info(
        "event=graphs_captured count=%d largest=%d prompt_tokens=%d seconds=%.1f",
        count, sizes[-1], max(prompts, default=0), seconds,
    )  # fmt: skip
    return count


def bytes_of_graphs(
    steps: DeviceSteps, maker: GraphMaker, config: WorkerConfig, backend: AttentionBackend, meter: MemoryMeter
) -> int:
    """Return the bytes that `capture` will take from the device.

    Captures some graphs and destroys them, so every rank must call this at the same point.
    """
    if _why_none(config, backend) is not None:
        return 0
    kinds = [
        [partial(steps.capture, maker, (), [size]) for size in reversed(prompt_sizes(config))],
        [partial(steps.capture, maker, [size]) for size in reversed(graph_sizes(config))],
    ]
    return graph_bytes(kinds, steps.release, meter)


def _why_none(config: WorkerConfig, backend: AttentionBackend) -> str | None:
    """Return the reason why a rank has no graphs, or None if it has."""
    if config.enforce_eager:
        return "--enforce-eager"
    if not isinstance(backend, CapturableBackend):
        return f"attention backend {backend.name} reads lengths on the host"
    return None
