"""One rank's model: load it, allocate KV memory, execute steps.

Knows tensors, but nothing of processes, channels or requests.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workers.attention.backend import LayerKV
from workers.attention.forward_batch import ForwardBatch
from workers.attention.selector import choose
from workers.config import WorkerConfig, WorkerInfo
from workers.distributed.parallel_state import TensorParallel
from workers.kernels.cpu.in_use import kernels_in_use, log_kernels
from workers.layers.decoder_spec import tensor_shapes
from workers.layers.quantization.formats.form import Arithmetic
from workers.layers.quantization.formats.gguf import GGUFForms
from workers.models.decoder import Decoder
from workers.models.hf_quantization import stored_quantization, weight_forms
from workers.models.registry import read_config, read_spec
from workers.protocol import StepMetadata, StepOutput
from workers.sampling.sampler import Sampler
from workers.step_cost import StepCost
from workers.weights.dummy import DummyWeights
from workers.weights.open_checkpoint import open_checkpoint
from workers.weights.weight_source import weight_source
from workers.worker.batch_invariance import check_batch_invariance, one_of_each_kind
from workers.worker.kv_cache_size import available_kv_bytes, blocks_that_fit, free_bytes
from workers.worker.memory_needs import is_out_of_memory, out_of_memory
from workers.worker.rank_invariance import check_rank_invariance
from workers.worker.step_timing import null_step, time_steps

logger = logging.getLogger("oarlock.runner")

# Rows of logits computed at once. Scoring a prompt may need thousands of rows, 600 KB each with 152,000 ids.
MAX_LOGITS_ROWS = 128


class ModelRunner:
    """Call `load`, then `allocate`, then `execute` any number of times."""

    def __init__(self, config: WorkerConfig, tp: TensorParallel) -> None:
        """`config` must be resolved (see `workers.preflight`), and `use_cpus` have been called."""
        self.config = config
        self.tp = tp
        self.device = device_of(config, tp.rank)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.spec = read_spec(config.model_path, config.max_model_len, tied=config.tie_word_embeddings)
        directory = Path(config.model_path)
        self._checkpoint = None if config.load_format == "dummy" else open_checkpoint(directory)
        stored = stored_quantization(directory, read_config(directory))
        self.forms = weight_forms(config.quantization, stored, self._checkpoint)
        self._quantization = config.quantization if stored is None else stored.scheme.description
        if isinstance(self.forms, GGUFForms):
            self._quantization = self.forms.description
        self._load_seconds = 0.0
        self.step_cost: StepCost | None = None
        self.num_blocks: int | None = None
        self._sampled = torch.empty(0, dtype=torch.int64, device=self.device)  # [L], by the last step

    def load(self, on_progress: Callable[[float], None]) -> None:
        """Read this rank's slice of every weight.

        `on_progress` gets the share read so far, also when it has not changed: each call is a sign of progress.
        """
        started = time.monotonic()
        with self._memory_for("reading the weights"):
            self._load(on_progress)
        self._load_seconds = time.monotonic() - started

    def _load(self, on_progress: Callable[[float], None]) -> None:
        if self.device.type == "cpu" and self.tp.rank == 0:
            matrices = [
                name.removesuffix(".weight") for name, shape in tensor_shapes(self.spec).items() if len(shape) == 2
            ]
            arithmetic = {self.forms.form_of(module).arithmetic for module in matrices}
            log_kernels(self.dtype, Arithmetic.ROUNDED_INPUTS in arithmetic)
        done = 0.0

        def report(fraction: float) -> None:
            nonlocal done
            done = fraction
            on_progress(fraction)

        self.model = Decoder(self.spec, self.tp, self.dtype, self.device, self.forms)
        if self._checkpoint is None:
            self.model.load(DummyWeights(self.config.seed), report)
        else:
            with weight_source(
                self._checkpoint, check_finite=self.config.check_weights, on_read=lambda: on_progress(done)
            ) as weights:
                self.model.load(weights, report)
        self.kv_spec = self.model.kv_spec(self.config.block_size, self.device, self.config.kv_cache_dtype)
        self.backend = choose(self.kv_spec, self.config.attention_backend, logger.info)
        self.sampler = Sampler(self.tp, self.model.vocab_start, self.model.vocab_local, self.spec.vocab_size)

    def num_blocks_that_fit(self) -> int:
        """How many KV blocks this rank has room for. Raises `StartupError` when one sequence would not fit."""
        if self.config.num_kv_blocks is not None:
            return self.config.num_kv_blocks
        return blocks_that_fit(self.kv_spec, self.config, available_kv_bytes(self.config, self.device))

    def allocate(self, num_blocks: int) -> None:
        """Allocate the pages and run one small step, so that lazy initialisation does not delay the first request.

        Then measure whether numbers depend on the batch or on the number of ranks.
        """
        self.num_blocks = num_blocks
        block_size, max_len = self.config.block_size, self.config.max_model_len
        assert max_len is not None
        with self._memory_for("allocating KV memory"):
            self.kv = self.backend.allocate(num_blocks)
        with self._memory_for("trying the model out"), torch.inference_mode():
            self.execute(null_step(2, 2, 1, block_size))
            if self.tp.rank == 0:
                reason = self.model.why_not_prepared
                form = "one for each half" if reason is None else f"separate operations, as {reason}"
                logger.info("event=layers calls=%r", form)
            self.invariance = check_batch_invariance(
                self.model,
                self.kv,
                self.backend,
                num_blocks=num_blocks,
                block_size=block_size,
                max_len=max_len,
            )
            self.rank_invariance = check_rank_invariance(self.model, self.kv, self.backend)

    def time_steps(self) -> StepCost:
        """Measure what steps cost. Every rank must call this at the same point after `allocate`, before any request."""
        assert self.config.max_model_len is not None
        layers = one_of_each_kind(self.model)
        part, kv = self.model.with_layers(layers), [self.kv[layer] for layer in layers]
        with self._memory_for("timing a few steps"):
            self.step_cost = time_steps(
                self.execute,
                lambda step: self._execute(part, kv, step, None),
                len(layers) / self.spec.num_layers,
                self._largest_of_all,
                max_tokens=self.config.max_num_batched_tokens,
                max_model_len=self.config.max_model_len,
                block_size=self.config.block_size,
            )
        return self.step_cost

    @contextmanager
    def _memory_for(self, doing: str) -> Generator[None]:
        """Turn an allocator's out-of-memory error into a `StartupError` with the arithmetic."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            kv_bytes = None if self.num_blocks is None else self.num_blocks * self.kv_spec.bytes_per_block
            raise out_of_memory(self.config, self.spec, self.forms, doing, kv_bytes, free_bytes(self.device)) from error

    def _largest_of_all(self, number: float) -> float:
        mine = torch.tensor([number], dtype=torch.float64, device=self.device)
        return float(self.tp.all_gather(mine).max())

    def info(self) -> WorkerInfo:
        """What this rank reports to the engine. Valid after `allocate`."""
        config = self.config
        assert config.max_model_len is not None and self.num_blocks is not None
        return WorkerInfo(
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            vocab_size=self.spec.vocab_size,
            tensor_parallel_size=self.tp.size,
            device=self.device.type,
            dtype=config.dtype,
            quantization=self._quantization,
            attention_backend=self.backend.name,
            architecture=self.spec.architecture,
            num_parameters=self.model.num_parameters,
            weight_bytes_per_rank=self.model.weight_bytes,
            kv_bytes_per_token_per_rank=self.kv_spec.bytes_per_token,
            kv_cache_dtype=config.kv_cache_dtype,
            load_seconds=round(self._load_seconds, 3),
            sliding_window=self.spec.longest_window,
            kernels=kernels_in_use(self.device),
            batch_invariant=self.invariance.batch_invariant,
            batch_invariant_reason=self.invariance.reason,
            rank_invariant=self.rank_invariance.rank_invariant,
            rank_invariant_reason=self.rank_invariance.reason,
            step_cost=self.step_cost,
        )

    def execute(self, step: StepMetadata, await_masks: Callable[[], None] | None = None) -> StepOutput | None:
        """Run one step. Rank 0 returns the output, the others None; every rank makes the same collective calls.

        `await_masks` blocks until `step.mask_bits` is complete; without it, it already is.
        """
        return self._execute(self.model, self.kv, step, await_masks)

    @torch.inference_mode()
    def _execute(
        self, model: Decoder, kv: list[LayerKV], step: StepMetadata, await_masks: Callable[[], None] | None
    ) -> StepOutput | None:
        """`kv`: the pages of `model`'s layers."""
        if step.num_seqs == 0:
            return empty_output(step.step_id) if self.tp.rank == 0 else None
        batch = ForwardBatch.from_step(step, self.device)
        if (step.token_ids < 0).any():
            batch.token_ids = with_sampled(batch.token_ids, self._sampled)
        plan = self.backend.prepare(batch)
        hidden = model(batch, kv, self.backend, plan)  # [T, hidden_size]
        if batch.num_logits == 0:
            return empty_output(step.step_id) if self.tp.rank == 0 else None
        parts, sampled = [], []
        for start in range(0, batch.num_logits, MAX_LOGITS_ROWS):
            stop = min(start + MAX_LOGITS_ROWS, batch.num_logits)
            rows = hidden.index_select(0, batch.logits_indices[start:stop])
            logits = model.compute_logits(rows)  # float32 [L, vocab_local]
            if await_masks is not None:
                await_masks()
            tokens, part = self.sampler.sample(logits, logits_rows(step, start, stop))
            sampled.append(tokens)
            parts.append(part)
        self._sampled = torch.cat(sampled)
        outputs = [part for part in parts if part is not None]
        return concatenate_outputs(outputs) if outputs else None


def with_sampled(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """`token_ids`, int64 [T], with -1 - r replaced by entry r of `sampled`, int64 [L]. Waits for no device."""
    return torch.where(token_ids < 0, sampled[(-1 - token_ids).clamp(min=0)], token_ids)


def device_of(config: WorkerConfig, rank: int) -> torch.device:
    """The device of `rank`: its own GPU, or the CPU."""
    return torch.device("cuda", rank) if config.device == "cuda" else torch.device("cpu")


def logits_rows(step: StepMetadata, start: int, stop: int) -> StepMetadata:
    """The same step with logits rows `start` to `stop` only."""
    if start == 0 and stop == len(step.logits_indices):
        return step
    cut = {
        name: getattr(step, name)[start:stop]
        for name in (
            "logits_indices",
            "target_ids",
            "sample_positions",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seeds",
            "num_logprobs",
        )
    }
    first, last = np.searchsorted(step.bias_rows, (start, stop))
    first_penalty, last_penalty = np.searchsorted(step.penalty_rows, (start, stop))
    first_mask, last_mask = np.searchsorted(step.mask_rows, (start, stop))
    history = step.history_starts[first_penalty : last_penalty + 1]
    return dataclasses.replace(
        step,
        **cut,
        bias_rows=step.bias_rows[first:last] - start,
        bias_ids=step.bias_ids[first:last],
        bias_values=step.bias_values[first:last],
        penalty_rows=step.penalty_rows[first_penalty:last_penalty] - start,
        repetition=step.repetition[first_penalty:last_penalty],
        frequency=step.frequency[first_penalty:last_penalty],
        presence=step.presence[first_penalty:last_penalty],
        history_starts=history - history[0],
        history_ids=step.history_ids[history[0] : history[-1]],
        history_counts=step.history_counts[history[0] : history[-1]],
        mask_rows=step.mask_rows[first_mask:last_mask] - start,
        mask_bits=step.mask_bits[first_mask:last_mask],
    )


def empty_output(step_id: int) -> StepOutput:
    """The output of a step without rows of logits."""
    return StepOutput(step_id=step_id, token_ids=np.empty(0, np.int32), finite=np.empty(0, np.uint8))


def concatenate_outputs(parts: list[StepOutput]) -> StepOutput:
    """One output from those of consecutive chunks of rows. Chunks with fewer top logprobs are padded with id -1."""
    if len(parts) == 1:
        return parts[0]
    width = max(-1 if part.top_ids is None else part.top_ids.shape[1] for part in parts)
    token_ids = np.concatenate([part.token_ids for part in parts])
    finite = np.concatenate([part.finite for part in parts])
    if width < 0:
        return StepOutput(parts[0].step_id, token_ids, finite)
    rows = len(token_ids)
    logprobs = np.zeros(rows, np.float32)
    ranks = np.zeros(rows, np.int32)
    top_ids = np.full((rows, width), -1, np.int32)
    top_logprobs = np.full((rows, width), -np.inf, np.float32)
    start = 0
    for part in parts:
        here = slice(start, start + len(part.token_ids))
        start = here.stop
        if part.logprobs is None or part.ranks is None or part.top_ids is None or part.top_logprobs is None:
            continue  # no row of this chunk has logprobs
        columns = part.top_ids.shape[1]
        logprobs[here], ranks[here] = part.logprobs, part.ranks
        top_ids[here, :columns], top_logprobs[here, :columns] = part.top_ids, part.top_logprobs
    return StepOutput(parts[0].step_id, token_ids, finite, logprobs, ranks, top_ids, top_logprobs)
