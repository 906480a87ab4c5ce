"""One rank's model, or its pipeline stage: load it, allocate KV memory, execute steps.

Knows tensors. Does not know processes, channels or requests.
"""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.base.host_memory import human_bytes
from oarlock.workers.attention.backend import LayerKV
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch, with_sampled
from oarlock.workers.attention.selector import choose
from oarlock.workers.attention.triton_backend import fixed_span
from oarlock.workers.config import StepCost, WorkerConfig, WorkerInfo
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.gguf_config import open_checkpoint
from oarlock.workers.kernels.cpu.in_use import kernels_in_use, log_kernels
from oarlock.workers.kernels.triton import availability
from oarlock.workers.kv_tiers.rank_offload import RankOffload
from oarlock.workers.layers.decoder_spec import layers_of_stage, matrices_of
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.hf_quantization import stored_quantization, weight_forms
from oarlock.workers.models.registry import read_spec
from oarlock.workers.protocol import StepMetadata, StepOutput, table_width
from oarlock.workers.quantization.fixed_order import FIXED_ORDER
from oarlock.workers.quantization.formats.checkpoint_forms import GGUFForms, input_rounding, served_forms
from oarlock.workers.runner.cuda_graphs import Calls, CudaGraphs, GraphMaker
from oarlock.workers.runner.device import StepMemory, free_bytes, largest_step, meter_of, use_device
from oarlock.workers.runner.device_steps import DeviceSteps, bytes_of_graphs, capture, device_steps
from oarlock.workers.runner.expert_kernel_selection import select_expert_kernels
from oarlock.workers.runner.invariance import check_batch_invariance, check_rank_invariance, one_of_each_kind
from oarlock.workers.runner.memory_needs import (
    MAX_LOGITS_ROWS,
    RESERVED_BLOCKS,
    MemoryMeter,
    blocks_that_fit,
    fitted_length,
    is_out_of_memory,
    out_of_memory,
    rank_weight_bytes,
    room_for_kv,
    weight_bytes_of_node,
)
from oarlock.workers.runner.pending_output import Launched, wait_for
from oarlock.workers.runner.pooler import Pooler
from oarlock.workers.runner.trial_steps import null_step, time_steps
from oarlock.workers.sampling.row_chunks import concatenate_outputs, empty_output, logits_rows
from oarlock.workers.sampling.sampler import Sampler, num_accepted
from oarlock.workers.sampling.token_histories import make_histories
from oarlock.workers.weights.gguf_reader import load_weights

logger = logging.getLogger("oarlock.runner")


class ModelRunner:
    """Runner of a decoder on one rank: call `load`, then `allocate`, then `execute` any number of times."""

    def __init__(
        self,
        config: WorkerConfig,
        tp: TensorParallel,
        meter: MemoryMeter | None = None,
        stage: PipelineStage | None = None,
    ) -> None:
        """Read the model's description.

        `config` must be resolved (see `oarlock.workers.preflight`), and `use_cpus` must have been called. `tp`: the
        ranks of `stage`, which is None if it is the only stage. `meter`: replaces the device's own meter.
        """
        self.config = config
        self.tp = tp
        self.stage = stage = stage or PipelineStage.solo()
        self.answers = stage.is_last and tp.rank == 0
        self.device = use_device(config, (stage.number * tp.size + tp.rank) % config.ranks_per_node)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.spec = read_spec(config.model_path, config.max_model_len, tied=config.tie_word_embeddings)
        self.layers = layers_of_stage(self.spec.num_layers, stage.number, stage.size)
        directory = Path(config.model_path)
        self._checkpoint = None if config.load_format == "dummy" else open_checkpoint(directory)
        stored = stored_quantization(directory, read_config(directory))
        stored_forms = weight_forms(config.quantization, stored, self._checkpoint)
        self.forms = served_forms(stored_forms, config.device, dequantize=config.dequantize)
        self._fixes_order = config.batch_invariant and availability.can_serve(self.device)
        if self._fixes_order:
            self.forms = FIXED_ORDER
        self._quantization = config.quantization if stored is None else stored.scheme.description
        if isinstance(stored_forms, GGUFForms):
            self._quantization = stored_forms.description
        if config.dequantize:
            self._quantization += ", dequantised at load"
        self._input_rounding = input_rounding(self.forms, matrices_of(self.spec), self.device.type)
        self._meter = meter or meter_of(self.device)
        self.step_memory = StepMemory(config, self.spec, has_head=stage.is_last)
        self.step_cost: StepCost | None = None
        self.num_blocks: int | None = None
        self._tables = BlockTables(config.max_num_seqs, table_width(config), self.device)
        self._sampled = torch.empty(0, dtype=torch.int64, device=self.device)  # integers [L], sampled by the last step
        self._device_steps: DeviceSteps | None = None  # None: steps are finished when `launch` returns
        self._graph_maker: GraphMaker = CudaGraphs() if self.device.type == "cuda" else Calls()
        self.kv_offload: RankOffload | None = None
        self._load_seconds, self._graph_bytes = 0.0, 0  # known after `load`, before KV memory is allocated

    def load(self, on_progress: Callable[[float], None]) -> None:
        """Read this rank's slice of every weight.

        `on_progress` is called with the share read so far, also if it has not changed: each call is a sign of progress.
        """
        started = time.monotonic()
        with self._memory_for("reading the weights"):
            self._load(on_progress)
        self._load_seconds = time.monotonic() - started

    def _load(self, on_progress: Callable[[float], None]) -> None:
        if self.device.type == "cpu" and self.tp.rank == 0:
            log_kernels(self.dtype, self._input_rounding is not None)

        self.model = Decoder(
            self.spec, self.tp, self.dtype, self.device, self.forms, self.layers,
            deals_experts=self.config.enable_expert_parallel,
        )  # fmt: skip
        load_weights(
            self.model.load,
            self._checkpoint,
            seed=self.config.seed,
            check_finite=self.config.check_weights,
            on_progress=on_progress,
        )
        if self.device.type == "cuda" and self.spec.has_experts:
            with torch.inference_mode():
                select_expert_kernels(self.model, self.config.max_num_batched_tokens)
        assert self.config.max_model_len is not None
        span = fixed_span(self.config.max_model_len) if self._fixes_order else None
        self.kv_spec = replace(
            self.model.kv_spec(self.config.block_size, self.device, self.config.kv_cache_dtype), fixed_span=span
        )
        self.backend = choose(self.kv_spec, self.config.attention_backend, logger.info)
        if self.stage.size > 1:
            layers = f"{self.layers.start}-{self.layers.stop - 1}"
            logger.info("event=stage number=%d of=%d layers=%s", self.stage.number, self.stage.size, layers)
            if self.device.type == "cuda":
                logger.info("event=no_graphs reason=%r", "with pipeline stages every step is launched by itself")
        self.pooler = Pooler(self.tp, self.model.vocab_start, answers=self.answers)
        if availability.can_serve(self.device) and self.stage.size == 1:
            self._device_steps = device_steps(self.config, self.model, self.backend, self.tp, self._tables, self.pooler)
        elif self.stage.is_last:
            shard = self.model.vocab_start, self.model.vocab_local, self.spec.vocab_size
            rows = make_histories(self.device, self.config.max_num_seqs, self.config.max_model_len, *shard)
            self.sampler = Sampler(self.tp, *shard, rows)

    def num_blocks_that_fit(self) -> int:
        """Return the number of KV blocks that fit. Raises `StartupError` if one sequence would not fit.

        If the device's memory can be measured, the largest step runs first: every rank must call this at the same
        point.
        """
        if self._meter is not None:
            with self._memory_for("trying the largest step"):
                kv, step = self.backend.allocate(RESERVED_BLOCKS), largest_step(self.config)
                peak = self._meter.peak_of(lambda: self._execute(self.model, kv, step))
            self.step_memory = StepMemory(self.config, self.spec, peak, has_head=self.stage.is_last)
            if (steps := self._device_steps) is not None:
                with self._memory_for("trying graphs"):
                    steps.kv, maker = kv, self._graph_maker
                    self._graph_bytes = bytes_of_graphs(steps, maker, self.config, self.backend, self._meter)
        if self.config.num_kv_blocks is not None:
            return self.config.num_kv_blocks
        weights = weight_bytes_of_node(self.config, self.spec, self.config.dtype, self.forms)
        room = room_for_kv(self.config, self._meter, self.step_memory.largest, self._graph_bytes, weights)
        num_blocks = blocks_that_fit(self.kv_spec.shape, self.config, room)
        logger.info(
            "event=memory step_bytes=%d measured=%s graph_bytes=%d kv_bytes=%d room=%r",
            self.step_memory.largest,
            self._meter is not None,
            self._graph_bytes,
            num_blocks * self.kv_spec.bytes_per_block,
            f"{room.source} {human_bytes(room.available)}",
        )
        return num_blocks

    def allocate(self, num_blocks: int) -> None:
        """Allocate the pages and run one small step, so that lazy initialisation does not delay the first request.

        Then check whether results depend on the batch or on the number of ranks.
        """
        self.num_blocks, block_size, max_len = num_blocks, self.config.block_size, self.config.max_model_len
        assert max_len is not None
        with self._memory_for("allocating KV memory"):
            self.kv = self.backend.allocate(num_blocks)
        if self._device_steps is not None:
            self._device_steps.kv = self.kv
        if self._meter is not None and self._meter.free_bytes() < self.step_memory.largest + self._graph_bytes:
            raise self._out_of_memory("leaving room for a step and graphs")
        with self._memory_for("trying the model out"), torch.inference_mode():
            self._execute(self.model, self.kv, null_step(2, 2, 1, block_size))
            if self.tp.rank == 0:
                reason = self.model.why_not_prepared
                form = "one for all layers" if reason is None else f"separate operations, as {reason}"
                logger.info("event=layers calls=%r", form)
            self.invariance = check_batch_invariance(
                self.model,
                self.kv,
                self.backend,
                num_blocks=num_blocks,
                block_size=block_size,
                max_len=max_len,
                span=min(self.kv_spec.fixed_span or 0, self.config.max_num_batched_tokens),
                is_asked=self.config.batch_invariant,
            )
            if self.config.batch_invariant:
                self.invariance.require()
            self.rank_invariance = check_rank_invariance(self.model, self.kv, self.backend)
        if self.config.offloads_kv:
            with self._memory_for("taking host memory for KV blocks"):
                facts = {"backend": self.backend.name, "kernels": kernels_in_use(self.device), "kv": str(self.kv_spec)}
                rank = self.stage.number * self.tp.size + self.tp.rank
                self.kv_offload = RankOffload(self.config, self.kv, facts, rank)
        graphs = 0
        if self._device_steps is not None:
            with self._memory_for("capturing graphs"):
                graphs = capture(self._device_steps, self._graph_maker, self.config, self.backend)
        if self.device.type == "cuda":
            logger.info(
                "event=device index=%d name=%r free=%r attention=%s graphs=%d sums=%r",
                self.device.index,
                kernels_in_use(self.device),
                human_bytes(free_bytes(self.device)),
                self.backend.name,
                graphs,
                self.tp.sums_by if self.tp.size > 1 else "no other rank",
            )

    def time_steps(self) -> StepCost:
        """Measure the cost of steps in this stage.

        Every rank of the stage must call this at the same point, after `allocate` and before any request.
        """
        assert self.config.max_model_len is not None
        layers = one_of_each_kind(self.model)
        part, kv = self.model.with_layers(layers), [self.kv[layer] for layer in layers]
        with self._memory_for("timing a few steps"):
            self.step_cost = time_steps(
                lambda step: self._execute(self.model, self.kv, step),
                lambda step: self._execute(part, kv, step),
                len(layers) / len(self.layers),
                self._largest_of_all,
                max_tokens=self.config.max_num_batched_tokens,
                max_model_len=self.config.max_model_len,
                block_size=self.config.block_size,
                vocab_size=self.spec.vocab_size,
                expert_share=self.spec.expert_share,
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
            raise self._out_of_memory(doing) from error

    def _out_of_memory(self, doing: str) -> StartupError:
        kv_bytes = self.num_blocks and self.num_blocks * self.kv_spec.bytes_per_block
        free = free_bytes(self.device) if self._meter is None else self._meter.free_bytes()
        measured = None if self._meter is None else self.step_memory.largest
        config, weights = self.config, rank_weight_bytes(self.config, self.spec, self.forms, self.stage.number)
        return out_of_memory(config, self.spec, weights, doing, kv_bytes, free, measured, self._graph_bytes)

    def _largest_of_all(self, number: float) -> float:
        return float(self.tp.all_gather(torch.tensor([number], dtype=torch.float64, device=self.device)).max())

    def info(self) -> WorkerInfo:
        """Return this rank's report to the engine. Valid after `allocate`."""
        config, num_blocks = self.config, self.num_blocks
        assert config.max_model_len is not None and num_blocks is not None
        return WorkerInfo(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=fitted_length(config, num_blocks),
            vocab_size=self.spec.vocab_size,
            tensor_parallel_size=self.tp.size,
            pipeline_parallel_size=self.stage.size,
            device=self.device.type,
            dtype=config.dtype,
            quantization=self._quantization,
            input_rounding=self._input_rounding,
            attention_backend=self.backend.name,
            architecture=self.spec.architecture,
            num_parameters=self.model.num_parameters,
            active_parameters=self.spec.active_parameters if self.spec.has_experts else None,
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
            kv_offload=None if self.kv_offload is None else self.kv_offload.info,
            hidden_size=self.spec.hidden_size,
        )

    @property
    def runs_ahead(self) -> bool:
        """Whether steps continue to run after `launch` has returned."""
        return self._device_steps is not None

    def bytes_of(self, step: StepMetadata) -> int:
        """Return the bytes that `step` takes in addition to this rank's memory; 0 if a graph runs it."""
        if not len(step.seq_lens):
            return 0
        is_replayed = self._device_steps is not None and self._device_steps.replays(step)
        return 0 if is_replayed else self.step_memory.of(step)

    def close(self) -> None:
        """Free everything that must be freed before the process group is destroyed."""
        if self.kv_offload is not None:
            self.kv_offload.close()
        if self._device_steps is not None:
            self._device_steps.release()

    def execute(self, step: StepMetadata, await_masks: Callable[[], None] | None = None) -> StepOutput | None:
        """Run one step. Rank 0 returns the output, the others None; every rank makes the same collective calls.

        `await_masks` blocks until `step.mask_bits` is complete; None if it is complete already.
        """
        return wait_for(self.launch(step, await_masks))

    def launch(self, step: StepMetadata, await_masks: Callable[[], None] | None = None) -> Launched:
        """Start one step, like `execute`; on the CPU it is finished on return. `step` is not read afterwards.

        At most two launched steps may have outputs that were not waited for. Hidden states come from the previous
        pipeline stage and go to the next. Raises `StepRefusedError` if an earlier stage has refused the step.
        """
        if not len(step.seq_lens):
            return empty_output(step.step_id) if self.answers else None
        if self._device_steps is not None:
            return self._device_steps.launch(step, await_masks)
        return self._execute(self.model, self.kv, step, await_masks, in_pipeline=True)

    @torch.inference_mode()
    def _execute(
        self,
        model: Decoder,
        kv: list[LayerKV],
        step: StepMetadata,
        await_masks: Callable[[], None] | None = None,
        *,
        in_pipeline: bool = False,
    ) -> StepOutput | None:
        """Compute a step. `kv`: the pages of `model`'s layers. Other pipeline stages take part only if
        `in_pipeline`."""
        if self._device_steps is not None:
            return wait_for(self._device_steps.launch(step, await_masks, (model, kv)))
        if len(step.table_blocks):
            self._tables.write(step)
        batch = ForwardBatch.from_step(step, self._tables)
        if step.is_ahead and (step.token_ids < 0).any():
            batch.token_ids = with_sampled(batch.token_ids, self._sampled)
        plan = self.backend.prepare(batch)
        if self.stage.is_first:
            hidden = None
        elif in_pipeline:
            hidden = self.stage.receive(step.num_tokens, self.spec.hidden_size, self.dtype, self.device)
        else:
            hidden = model.stand_in(batch.token_ids)
        hidden = model(batch, kv, self.backend, plan, hidden)  # [T, hidden_size]
        if self.stage.is_last:
            output = self._sample(model, hidden, batch, step, await_masks)
            pooled = self.pooler(step, hidden, model.compute_logits) if len(step.pool_seqs) else None
            return output if output is None or pooled is None else pooled.add_to(output)
        if in_pipeline:
            self.stage.send(hidden)
        return None

    def _sample(
        self,
        model: Decoder,
        hidden: Tensor,
        batch: ForwardBatch,
        step: StepMetadata,
        await_masks: Callable[[], None] | None,
    ) -> StepOutput | None:
        """Return the output of `step` on the rank that returns outputs, None on the others.

        `hidden`: [T, hidden_size], after the final norm.
        """
        if len(step.history_rows):
            self.sampler.histories.write(step)
        if batch.num_logits == 0:
            return empty_output(step.step_id) if self.answers else None
        parts, sampled = [], []
        for start in range(0, batch.num_logits, MAX_LOGITS_ROWS):
            stop = min(start + MAX_LOGITS_ROWS, batch.num_logits)
            # ascending and unique: if there are T indices, they are all tokens
            indices = batch.logits_indices[start:stop]
            rows = hidden if len(indices) == len(hidden) else hidden.index_select(0, indices)
            logits = model.compute_logits(rows)  # float32 [L, vocab_local]
            if await_masks is not None and len(step.mask_rows):
                await_masks()
            is_whole = stop - start == batch.num_logits
            tokens, part = self.sampler.sample(logits, step if is_whole else logits_rows(step, start, stop))
            sampled.append(tokens)
            if part is not None:
                parts.append(part)
        self._sampled = sampled[0] if len(sampled) == 1 else torch.cat(sampled)
        accepted = num_accepted(step, self._sampled) if len(step.num_drafts) else None
        if len(step.penalty_rows):
            self.sampler.histories.add(step, self._sampled, accepted)
        if not self.answers:
            return None
        output = parts[0] if len(parts) == 1 else concatenate_outputs(parts)
        output.num_accepted = None if accepted is None else accepted.cpu().numpy()
        return output
