"""One rank's encoder: load it, then execute steps, each of which has its texts whole.

The counterpart of `ModelRunner`, without KV memory, graphs, sampling or pipeline stages. Blocks are numbers that the
engine counts with: as many as its largest batch of texts can take.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.config import WorkerConfig, WorkerInfo
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.workers.kernels.cpu.in_use import kernels_in_use, log_kernels
from oarlock.workers.models.encoders.encoder import Encoder
from oarlock.workers.models.encoders.registry import read_encoder
from oarlock.workers.protocol import StepMetadata, StepOutput, table_width
from oarlock.workers.runner.encoder.memory import step_bytes
from oarlock.workers.runner.encoder.trial import check_alone_and_in_company, check_sums_of_ranks
from oarlock.workers.runner.memory_needs import is_out_of_memory
from oarlock.workers.runner.pending_output import Computed, PendingOutput
from oarlock.workers.runner.pooling.pooler import Pooler, no_logits
from oarlock.workers.runner.rank_device import use_device
from oarlock.workers.sampling.row_chunks import empty_output
from oarlock.workers.weights.dummy import DummyWeights
from oarlock.workers.weights.open_checkpoint import open_checkpoint
from oarlock.workers.weights.weight_source import weight_source


class EncoderRunner:
    """Runs an encoder on one rank: call `load`, then `allocate`, then `execute` any number of times."""

    kv_offload = None
    runs_ahead = False

    def __init__(self, config: WorkerConfig, tp: TensorParallel) -> None:
        """`config` must be resolved (see `oarlock.workers.preflight`), and `use_cpus` have been called."""
        self.config = config
        self.tp = tp
        self.device = use_device(config, tp.rank % config.ranks_per_node)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._checkpoint = None if config.load_format == "dummy" else open_checkpoint(Path(config.model_path))
        self.spec = read_encoder(config.model_path, self._checkpoint)
        self._num_blocks, self._load_seconds = 0, 0.0

    def load(self, on_progress: Callable[[float], None]) -> None:
        """Loads the weights, as `ModelRunner.load` does."""
        started, done = time.monotonic(), 0.0
        if self.device.type == "cpu" and self.tp.rank == 0:
            log_kernels(self.dtype)

        def report(fraction: float) -> None:
            nonlocal done
            done = fraction
            on_progress(fraction)

        with self._memory_for("reading the weights"):
            self.model = Encoder(self.spec, self.tp, self.dtype, self.device)
            if self._checkpoint is None:
                self.model.load(DummyWeights(self.config.seed), report)
            else:
                with weight_source(
                    self._checkpoint, check_finite=self.config.check_weights, on_read=lambda: on_progress(done)
                ) as weights:
                    self.model.load(weights, report)
        classify = self.model.classify if self.spec.num_labels else None
        self.pooler = Pooler(self.tp, 0, answers=self.tp.rank == 0, classify=classify)
        self._load_seconds = time.monotonic() - started

    def num_blocks_that_fit(self) -> int:
        """Blocks for as many of the longest texts as may run at once, and the null block."""
        return self.config.max_num_seqs * table_width(self.config) + 1

    def allocate(self, num_blocks: int) -> None:
        """Compute a text alone and in a batch with others. Every rank must call this at the same point."""
        self._num_blocks = num_blocks
        assert self.config.max_model_len is not None
        with self._memory_for("trying the model out"):
            self.invariance = check_alone_and_in_company(
                self._hidden, self.spec.vocab_size, self.config.max_model_len, self.device
            )
            self.rank_invariance = check_sums_of_ranks(self.model)
        if self.config.batch_invariant:
            self.invariance.require()

    def time_steps(self) -> None:
        """Does nothing: an encoder's limits do not depend on the cost of steps, since no answers wait for prompts."""

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
        """Report of this rank to the engine. Valid after `allocate`."""
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
        """Bytes that `step` takes beside all that this rank holds."""
        return step_bytes(self.spec, self.tp.size, step.num_tokens)

    def close(self) -> None:
        """Does nothing: an encoder holds nothing that must be freed before the process group."""

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

    def launch(self, step: StepMetadata, await_masks: Callable[[], None] | None = None) -> PendingOutput:
        """Executes the step at once. Ignores `await_masks`: masks are for sampling, which an encoder does not do."""
        return Computed(self.execute(step))

    def _hidden(self, ids: Tensor, positions: Tensor, types: Tensor, lens: list[int]) -> Tensor:
        """int64 [T] each -> [T, hidden]."""
        return self.model(ids.to(self.device), positions.to(self.device), types.to(self.device), lens)


def _types(step: StepMetadata) -> Tensor:
    """Token types: which of its sequence's two texts each token belongs to, int64 [T]."""
    starts, types = step.query_start_loc.tolist(), torch.zeros(step.num_tokens, dtype=torch.int64)
    bounds = list(pairwise(starts))
    for seq, second in zip(step.pool_seqs.tolist(), step.pool_second.tolist(), strict=True):
        start, end = bounds[seq]
        if second:
            types[start + second : end] = 1
    return types
