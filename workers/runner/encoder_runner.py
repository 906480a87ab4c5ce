"""The start and the end of an encoder on one rank: load it, and test that texts do not affect each other."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from oarlock.base.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.workers.config import WorkerConfig, WorkerInfo
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.gguf_config import open_checkpoint
from oarlock.workers.kernels.cpu.description import log_kernels
from oarlock.workers.models.encoders.encoder import Encoder
from oarlock.workers.models.encoders.registry import read_encoder
from oarlock.workers.protocol import StepMetadata, table_width
from oarlock.workers.runner.device import use_device
from oarlock.workers.runner.encoder_invariance import check_alone_and_in_batch, check_sums_of_ranks
from oarlock.workers.runner.encoder_steps import EncoderSteps
from oarlock.workers.runner.memory_needs import encoder_step_bytes, out_of_memory_as
from oarlock.workers.runner.pooler import Pooler
from oarlock.workers.runner.reporting import worker_info
from oarlock.workers.runner.step import StepRunner
from oarlock.workers.weights.gguf_reader import load_weights


class EncoderRunner(StepRunner[EncoderSteps]):
    """Runner of an encoder on one rank: call `load`, then `allocate`, then `execute` any number of times."""

    kv_offload = None
    runs_ahead = False
    adapters = None  # no encoder has LoRA adapters

    def __init__(self, config: WorkerConfig, tp: TensorParallel) -> None:
        """Read the encoder's description.

        `config` must be resolved (see `oarlock.workers.preflight`), and `use_cpus` must have been called.
        """
        super().__init__(answers=tp.rank == 0)
        self.config, self.tp = config, tp
        self.device = use_device(config, tp.rank % config.ranks_per_node)
        self._checkpoint = None if config.load_format == "dummy" else open_checkpoint(Path(config.model_path))
        self.spec = read_encoder(config.model_path, self._checkpoint)
        self._num_blocks, self._load_seconds = 0, 0.0

    def load(self, on_progress: Callable[[float], None]) -> None:
        """Load the weights, as `ModelRunner.load` does."""
        started, dtype = time.monotonic(), getattr(torch, self.config.dtype)
        if self.device.type == "cpu" and self.tp.rank == 0:
            log_kernels(dtype)
        with self._memory_for("reading the weights"):
            self.model = Encoder(self.spec, self.tp, dtype, self.device)
            load_weights(
                self.model.load,
                self._checkpoint,
                seed=self.config.seed,
                check_finite=self.config.check_weights,
                on_progress=on_progress,
            )
        self.steps = EncoderSteps(self.model, self.device, answers=self.answers)
        classify = self.model.classify if self.spec.num_labels else None
        self.pooler = Pooler(self.tp, answers=self.answers, classify=classify)
        self._load_seconds = time.monotonic() - started

    def num_blocks_that_fit(self) -> list[int]:
        """Return the blocks for `max_num_seqs` texts of the greatest length, and the null block."""
        return [self.config.max_num_seqs * table_width(self.config) + 1]

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Compare a text by itself and in a batch with others. Every rank must call this at the same point."""
        (self._num_blocks,) = num_blocks
        assert self.config.max_model_len is not None
        with self._memory_for("running trial steps"):
            self.invariance = check_alone_and_in_batch(
                self.steps.hidden, self.spec.vocab_size, self.config.max_model_len, self.device
            )
            self.rank_invariance = check_sums_of_ranks(self.model)
        if self.config.batch_invariant:
            self.invariance.require()

    def time_steps(self) -> None:
        """Do nothing: an encoder's limits do not depend on the cost of steps, since no completions wait for prompts."""

    def _memory_for(self, activity: str) -> AbstractContextManager[None]:
        return out_of_memory_as(
            lambda error: StartupError(
                f"Not enough memory for {activity} of this encoder: {error}.",
                "Free memory, use a smaller model, or lower --max-num-batched-tokens.",
                EXIT_OUT_OF_MEMORY,
            )
        )

    def info(self) -> WorkerInfo:
        """Return this rank's report to the engine. Valid after `allocate`."""
        assert self.config.max_model_len is not None
        return worker_info(
            self.config,
            self.spec,
            self.tp,
            self.device,
            self.invariance,
            self.rank_invariance,
            self._load_seconds,
            num_blocks=self._num_blocks,
            max_model_len=self.config.max_model_len,
            attention_backend="torch",
            weight_bytes_per_rank=self.model.weight_bytes,
            kv_bytes_per_token_per_rank=0,
            whole_texts=True,
            num_labels=self.spec.num_labels,
        )

    def bytes_of(self, step: StepMetadata) -> int:
        """Return the bytes that `step` takes in addition to this rank's memory."""
        return encoder_step_bytes(self.spec, self.tp.size, step.num_tokens)

    def close(self) -> None:
        """Do nothing: an encoder holds nothing that must be freed before the process group."""
