"""One rank's encoder: loads it, checks at start that texts do not affect each other, and runs steps of whole texts."""

import random
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oarlock.base.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.workers.config import WorkerConfig, WorkerInfo
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.gguf_config import open_checkpoint
from oarlock.workers.kernels.cpu.gemm import CppMatmul
from oarlock.workers.kernels.cpu.in_use import kernels_in_use, log_kernels
from oarlock.workers.models.encoders.encoder import Encoder
from oarlock.workers.models.encoders.registry import read_encoder
from oarlock.workers.protocol import StepMetadata, StepOutput, table_width
from oarlock.workers.runner.device import use_device
from oarlock.workers.runner.invariance import InvarianceResult, RankInvariance, check_sums
from oarlock.workers.runner.memory_needs import encoder_step_bytes, is_out_of_memory
from oarlock.workers.runner.pooler import Pooler, no_logits
from oarlock.workers.sampling.row_chunks import empty_output
from oarlock.workers.weights.gguf_reader import load_weights

_LENGTH = 48  # tokens of the text that is compared
_OTHERS = (1, 17, 48, 5)  # tokens of the other texts in the batch, half of them before it

# ids, positions, types (int64 [T] each) and lengths of the texts -> [T, hidden]
Hidden = Callable[[Tensor, Tensor, Tensor, list[int]], Tensor]


def check_alone_and_in_batch(hidden: Hidden, vocab_size: int, max_len: int, device: torch.device) -> InvarianceResult:
    """Check that texts of two lengths get the same bits by themselves and in a batch with others.

    Every rank must call this at the same point: layers all-reduce.
    """
    if device.type != "cpu":
        return InvarianceResult(False, f"on {device.type} the libraries choose kernels by the shape of the batch")
    started, draw = time.monotonic(), random.Random(0)

    def text(length: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(min(length, max_len))]

    def run(texts: list[list[int]]) -> list[Tensor]:
        lens = [len(one) for one in texts]
        ids = torch.tensor([token for one in texts for token in one])
        positions = torch.cat([torch.arange(length) for length in lens])
        with torch.inference_mode():
            return list(hidden(ids, positions, torch.zeros_like(ids), lens).split(lens))

    others = [text(length) for length in _OTHERS]
    for length in (_LENGTH, 1):
        own = text(length)
        (alone,) = run([own])
        among = run([*others[:2], own, *others[2:]])[2]
        if not torch.equal(alone, among):
            gap = float((alone.double() - among.double()).abs().max())
            return InvarianceResult(False, f"a text of {length} tokens among others differs by {gap:.1e} at most")
    spent = time.monotonic() - started
    return InvarianceResult(True, f"a text gave the same bits alone and among others ({spent:.2f} s)")


def check_sums_of_ranks(model: Encoder) -> RankInvariance:
    """Check the matmuls whose results are all-reduced. Every rank must call this at the same point.

    Nothing else can differ between numbers of ranks: attention is computed head by head, and everything else row by
    row.
    """
    layers = {layer.attention.reach: layer for layer in model.layers}.values()  # one layer of each kind
    outputs = [output for layer in layers for output in (layer.attention.output, layer.mlp.output)]
    by_kernels = all(isinstance(output.product, CppMatmul) for output in outputs)
    why_not = None if by_kernels else "products are computed by torch, in an order that depends on their shape"
    return check_sums(outputs, model.place, why_not)


class EncoderRunner:
    """Runner of an encoder on one rank: call `load`, then `allocate`, then `execute` any number of times."""

    kv_offload = None
    runs_ahead = False

    def __init__(self, config: WorkerConfig, tp: TensorParallel) -> None:
        """Read the encoder's description.

        `config` must be resolved (see `oarlock.workers.preflight`), and `use_cpus` must have been called.
        """
        self.config = config
        self.tp = tp
        self.device = use_device(config, tp.rank % config.ranks_per_node)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._checkpoint = None if config.load_format == "dummy" else open_checkpoint(Path(config.model_path))
        self.spec = read_encoder(config.model_path, self._checkpoint)
        self._num_blocks, self._load_seconds = 0, 0.0

    def load(self, on_progress: Callable[[float], None]) -> None:
        """Load the weights, as `ModelRunner.load` does."""
        started = time.monotonic()
        if self.device.type == "cpu" and self.tp.rank == 0:
            log_kernels(self.dtype)

        with self._memory_for("reading the weights"):
            self.model = Encoder(self.spec, self.tp, self.dtype, self.device)
            load_weights(
                self.model.load,
                self._checkpoint,
                seed=self.config.seed,
                check_finite=self.config.check_weights,
                on_progress=on_progress,
            )
        classify = self.model.classify if self.spec.num_labels else None
        self.pooler = Pooler(self.tp, 0, answers=self.tp.rank == 0, classify=classify)
        self._load_seconds = time.monotonic() - started

    def num_blocks_that_fit(self) -> int:
        """Return the blocks for `max_num_seqs` texts of the greatest length, and the null block."""
        return self.config.max_num_seqs * table_width(self.config) + 1

    def allocate(self, num_blocks: int) -> None:
        """Compare a text by itself and in a batch with others. Every rank must call this at the same point."""
        self._num_blocks = num_blocks
        assert self.config.max_model_len is not None
        with self._memory_for("trying the model out"):
            self.invariance = check_alone_and_in_batch(
                self._hidden, self.spec.vocab_size, self.config.max_model_len, self.device
            )
            self.rank_invariance = check_sums_of_ranks(self.model)
        if self.config.batch_invariant:
            self.invariance.require()

    def time_steps(self) -> None:
        """Do nothing: an encoder's limits do not depend on the cost of steps, since no completions wait for prompts."""

    @contextmanager
    def _memory_for(self, doing: str) -> Generator[None]:
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise StartupError(
                f"Not enough memory for {doing} of this encoder: {error}.",
                "Free memory, use a smaller model, or lower --max-num-batched-tokens.",
                EXIT_OUT_OF_MEMORY,
            ) from error

    def info(self) -> WorkerInfo:
        """Return this rank's report to the engine. Valid after `allocate`."""
        config, spec = self.config, self.spec
        assert config.max_model_len is not None
        return WorkerInfo(
            num_blocks=self._num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            vocab_size=spec.vocab_size,
            tensor_parallel_size=self.tp.size,
            device=self.device.type,
            dtype=config.dtype,
            attention_backend="torch",
            architecture=spec.architecture,
            num_parameters=spec.num_parameters,
            weight_bytes_per_rank=self.model.weight_bytes,
            kv_bytes_per_token_per_rank=0,
            kv_cache_dtype=config.kv_cache_dtype,
            load_seconds=round(self._load_seconds, 3),
            kernels=kernels_in_use(self.device),
            batch_invariant=self.invariance.batch_invariant,
            batch_invariant_reason=self.invariance.reason,
            rank_invariant=self.rank_invariance.rank_invariant,
            rank_invariant_reason=self.rank_invariance.reason,
            hidden_size=spec.hidden_size,
            whole_texts=True,
            num_labels=spec.num_labels,
        )

    def bytes_of(self, step: StepMetadata) -> int:
        """Return the bytes that `step` takes in addition to this rank's memory."""
        return encoder_step_bytes(self.spec, self.tp.size, step.num_tokens)

    def close(self) -> None:
        """Do nothing: an encoder holds nothing that must be freed before the process group."""

    def execute(self, step: StepMetadata) -> StepOutput | None:
        """Run one step. Rank 0 returns the output, the others None; every rank makes the same collective calls."""
        if step.num_seqs == 0:
            return empty_output(step.step_id) if self.tp.rank == 0 else None
        counts = np.diff(step.query_start_loc)
        assert (counts == step.seq_lens).all(), "texts are not divided among steps"
        ids, positions = (torch.from_numpy(x.astype(np.int64)) for x in (step.token_ids, step.positions))
        types = _types(step)
        with torch.inference_mode():
            hidden = self._hidden(ids, positions, types, counts.tolist())
            pooled = self.pooler(step, hidden, no_logits)
        return None if pooled is None else pooled.add_to(empty_output(step.step_id))

    def launch(self, step: StepMetadata, await_masks: Callable[[], None] | None = None) -> StepOutput | None:
        """Execute the step at once. Ignores `await_masks`: masks are for sampling, which an encoder does not do."""
        return self.execute(step)

    def _hidden(self, ids: Tensor, positions: Tensor, types: Tensor, lens: list[int]) -> Tensor:
        """Return the hidden states of tokens, int64 [T] each: [T, hidden]."""
        return self.model(ids.to(self.device), positions.to(self.device), types.to(self.device), lens)


def _types(step: StepMetadata) -> Tensor:
    """Return the token types, int64 [T]: 1 for tokens of a sequence's second text, else 0."""
    starts, types = step.query_start_loc.tolist(), torch.zeros(step.num_tokens, dtype=torch.int64)
    bounds = list(pairwise(starts))
    for seq, second in zip(step.pool_seqs.tolist(), step.pool_second.tolist(), strict=True):
        start, end = bounds[seq]
        if second:
            types[start + second : end] = 1
    return types
