"""Runs a `Decoder` over pages as the engine would, without an engine: the harness of the golden tests.

Ranks are threads that meet at a barrier, so that whole models run at any tensor-parallel size in one process and the
sums over ranks are real. Block ids are dealt in a shuffled order: nothing may rely on pages lying side by side.
"""

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, KVSpec
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.attention.rows_by_slot import NO_ADAPTER, RowsBySlot
from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.gguf_config import open_checkpoint
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.hf_quantization import stored_quantization, weight_formats
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.models.registry import read_spec
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.quantization.formats.checkpoint_formats import served_formats
from oarlock.workers.recurrent.states import NULL_SLOT
from oarlock.workers.runner.layer_memory import allocate_memory
from oarlock.workers.runner.trial_steps import SequenceChunk, TrialMemory, greedy_step
from oarlock.workers.weights.gguf_reader import weight_source
from oarlock.workers.weights.source import WeightSource

BLOCK_SIZE = 8
NUM_BLOCKS = 256
_CPU = torch.device("cpu")

Result = TypeVar("Result")


class RankThreads:
    """Barrier and slots that the ranks of one thread group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Tensor | None] = [None] * size


class ThreadRank(TensorParallel):
    """A rank whose peers are threads. Adds in the same tree as real ranks do."""

    def __init__(self, rank: int, threads: RankThreads) -> None:
        super().__init__(rank, threads.size)
        self._threads = threads

    def _exchange(self, x: Tensor) -> list[Tensor]:
        threads = self._threads
        threads.slots[self.rank] = x.clone()
        threads.barrier.wait()
        parts = [part for part in threads.slots if part is not None]
        threads.barrier.wait()
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return tree_sum(self._exchange(x))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x))

    def all_to_all(self, x: Tensor) -> Tensor:
        return self.all_gather(x)[:, self.rank]


def on_ranks(size: int, work: Callable[[TensorParallel], Result]) -> list[Result]:
    """`work` on every rank at once; its results in rank order."""
    if size == 1:
        with torch.inference_mode():
            return [work(TensorParallel.solo())]
    group = RankThreads(size)
    results: list[Result | None] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(ThreadRank(rank, group))
        except BaseException as error:
            errors.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [result for result in results if result is not None]


def load_decoder(
    path: Path,
    tp: TensorParallel,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    quantization: str = "none",
    *,
    dequantize: bool = False,
    distributes_experts: bool = False,
    device: torch.device = _CPU,
    changed: Callable[[WeightSource], WeightSource] = lambda weights: weights,
) -> Decoder:
    """Load a model. `changed`: returns the source that the layers read, from that of the checkpoint."""
    spec = read_spec(str(path), max_model_len)
    checkpoint = open_checkpoint(path, spec.names)
    formats = weight_formats(quantization, stored_quantization(path, read_config(path)), checkpoint)
    formats = served_formats(formats, device.type, dequantize=dequantize)
    decoder = Decoder(spec, tp, dtype, device, formats, distributes_experts=distributes_experts)
    with weight_source(checkpoint, check_finite=True, on_read=lambda: None) as weights:
        decoder.load(changed(weights), lambda share: None)
    return decoder


class PagedRun:
    """One decoder with its KV pages, fed step by step."""

    def __init__(self, decoder: RankModel, backend: Callable[[KVSpec], AttentionBackend] = ReferenceBackend) -> None:
        self.decoder, self.device = decoder, decoder.placement.device
        self.backends = {spec.group: backend(spec) for spec in decoder.kv_specs(BLOCK_SIZE)}
        self.memory = allocate_memory(decoder, self.backends, [NUM_BLOCKS] * len(decoder.groups))
        self.kinds = TrialMemory.of(decoder.spec)
        self.free = list(range(1, NUM_BLOCKS))
        random.Random(0).shuffle(self.free)
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.slots: dict[int, int] = {}  # slot of each sequence's newest recurrent state

    def step(self, work: dict[int, Sequence[int]], slots: dict[int, int] | None = None) -> dict[int, Tensor]:
        """Feed each sequence its next tokens -> the logits of all of them, whole vocabulary: float32 [n, vocab].

        `slots`: the slot of each sequence's adapter, if it has one.
        """
        step = self._metadata(work)
        tables = BlockTables.of_step(step, BLOCK_SIZE, self.device, self.kinds.pages_groups)
        batch = ForwardBatch.from_step(step, tables)
        if slots is not None:
            of_sequences = np.array([slots.get(seq, NO_ADAPTER) for seq in work], np.int32)
            batch.adapters = RowsBySlot.of_sequences(of_sequences, step.query_start_loc, self.device)
        plans = {group: backend.prepare(batch) for group, backend in self.backends.items()}
        hidden = self.decoder(batch, self.memory, self.backends, plans)
        local = self.decoder.compute_logits(hidden, batch.adapters)[: step.num_tokens]  # [T, vocab_local]
        gathered = self.decoder.placement.tp.all_gather(local)  # [ranks, T, vocab_local]
        logits = gathered.transpose(0, 1).flatten(1)  # [T, padded vocabulary]
        vocab = self.decoder.spec.vocab_size
        assert torch.isneginf(logits[:, vocab:]).all()
        return dict(zip(work, logits[:, :vocab].split([len(tokens) for tokens in work.values()]), strict=True))

    def _metadata(self, work: dict[int, Sequence[int]]) -> StepMetadata:
        chunks = []
        for seq, tokens in work.items():
            start = self.lengths.get(seq, 0)
            self.lengths[seq] = start + len(tokens)
            blocks = self.blocks.setdefault(seq, [])
            while len(blocks) * BLOCK_SIZE < self.lengths[seq]:
                blocks.append(self.free.pop())
            # Two slots for each sequence, which are read and written in turn.
            before, slots = self.slots.get(seq, NULL_SLOT), (1 + 2 * seq, 2 + 2 * seq)
            self.slots[seq] = slots[before == slots[0]]
            chunks.append(SequenceChunk(tokens, start, blocks, 0, before, self.slots[seq]))
        rows = range(sum(map(len, work.values())))
        return greedy_step(chunks, BLOCK_SIZE, rows, step_id=1, memory=self.kinds)


def greedy(run: PagedRun, prompts: dict[int, list[int]], count: int) -> dict[int, list[int]]:
    """`count` greedy tokens for every prompt, all in one batch, one token per step after the first."""
    outputs: dict[int, list[int]] = {seq: [] for seq in prompts}
    work: dict[int, Sequence[int]] = dict(prompts)
    for _ in range(count):
        logits = run.step(work)
        for seq, rows in logits.items():
            outputs[seq].append(int(rows[-1].argmax()))
        work = {seq: tokens[-1:] for seq, tokens in outputs.items()}
    return outputs
