"""The start and the end of a decoder on one rank: load it, size and allocate KV memory, test and time it.

Knows tensors. Does not know processes, channels or requests.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from oarlock.workers.attention.backend import LayerMemory
from oarlock.workers.config import NO_ATTENTION, StepCost, WorkerConfig, WorkerInfo
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.kernels.cpu.description import describe_kernels
from oarlock.workers.kv_tiers.rank_offload import RankOffload
from oarlock.workers.lora.adapter_slots import AdapterSlots
from oarlock.workers.lora.loaded_adapters import LoadedAdapters
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.runner.cuda_graphs import graph_maker
from oarlock.workers.runner.decoder_loading import attention_backends, describe, load_decoder
from oarlock.workers.runner.device import use_device
from oarlock.workers.runner.device_steps import DeviceSteps
from oarlock.workers.runner.graph_capture import bytes_of_graphs, capture, warm_up
from oarlock.workers.runner.group_sizes import LEAST_COUNTS
from oarlock.workers.runner.kv_room import MemoryMeter
from oarlock.workers.runner.layer_memory import allocate_memory
from oarlock.workers.runner.pooler import Pooler
from oarlock.workers.runner.rank_memory import RankMemory
from oarlock.workers.runner.reporting import log_device, worker_info
from oarlock.workers.runner.self_tests import try_out
from oarlock.workers.runner.step import StepRunner
from oarlock.workers.runner.step_building import DecoderSteps, build_steps
from oarlock.workers.runner.step_timing import time_model
from oarlock.workers.runner.trial_steps import TrialMemory, largest_step


class ModelRunner(StepRunner[DecoderSteps]):
    """Runner of a decoder on one rank: call `load`, then `allocate`, then `execute` any number of times."""

    adapters: LoadedAdapters | None = None  # set if LoRA adapters are served

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
        self.config, self.tp = config, tp
        self.stage = stage = stage or PipelineStage.solo()
        super().__init__(answers=stage.is_last and tp.rank == 0)
        self.device = use_device(config, (stage.number * tp.size + tp.rank) % config.ranks_per_node)
        self.description = describe(config, self.device, stage)
        self.spec = self.description.spec
        self.memory = RankMemory(config, self.spec, self.description.formats, stage, self.device, meter)
        self._graph_maker = graph_maker(self.device)
        self.kv_offload: RankOffload | None = None
        self.step_cost: StepCost | None = None
        self._adapter_slot_bytes = 0
        self._load_seconds = 0.0

    def load(self, on_progress: Callable[[float], None]) -> None:
        """Read this rank's slice of every weight, and build its steps.

        `on_progress` is called with the share read so far, also if it has not changed: each call is a sign of progress.
        """
        started, config, description = time.monotonic(), self.config, self.description
        with self.memory.needed_for("reading the weights"):
            self.model = model = load_decoder(description, config, self.tp, self.device, on_progress)
            if model.reference is not None:
                model.reference.prepare(lambda: on_progress(1.0))
            self.backends = attention_backends(model, config, fixes_order=description.fixes_order)
            self.steps = build_steps(config, model, self.backends, self.stage, answers=self.answers)
        if config.max_loras:
            assert isinstance(model, Decoder), "only described models have adapters"
            with self.memory.needed_for("taking memory for adapters"):
                slots = AdapterSlots(model, config.max_loras, config.max_lora_rank, config.lora_target_modules)
                self.adapters = LoadedAdapters(slots)
                self._adapter_slot_bytes = slots.num_bytes // config.max_loras
        if self.stage.is_last:
            self.pooler = Pooler(
                self.tp, answers=self.answers, compute_logits=model.compute_logits, vocab_start=model.vocab_start
            )
        self._load_seconds = time.monotonic() - started

    def num_blocks_that_fit(self) -> list[int]:
        """Return the numbers of KV blocks and slots of each memory group that fit. Raises `StartupError` if one
        sequence would not fit.

        If the device's memory can be measured, the largest step runs first: every rank must call this at the same
        point.
        """
        memory, steps = self.memory, self.steps
        if memory.meter is not None:
            with memory.needed_for("trying the largest step"):
                least = allocate_memory(self.model, self.backends, [LEAST_COUNTS] * len(self.model.groups))
                step = largest_step(self.config, self._kinds)
                memory.measure_step(partial(self._with_layers(self.model, least).execute, step))
            if isinstance(steps, DeviceSteps):
                with memory.needed_for("trying graphs"):
                    steps.memory, maker = least, self._graph_maker
                    memory.graph_bytes = bytes_of_graphs(steps, maker, self.config, self.backends, memory.meter)
        return memory.num_blocks_that_fit()

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Allocate the pages and slots, test the model, allocate host memory for KV blocks, and capture graphs.

        `num_blocks`: blocks or slots of each memory group. Every rank must call this at the same point.
        """
        config, memory, self.num_blocks = self.config, self.memory, list(num_blocks)
        memory.kv_bytes = memory.groups.bytes_of(self.num_blocks)
        with memory.needed_for("allocating KV memory"):
            self.layer_memory = allocate_memory(self.model, self.backends, self.num_blocks)
            self.steps.memory = self.layer_memory
        memory.check_room_left()
        with memory.needed_for("running trial steps"):
            runner = self._with_layers(self.model, self.layer_memory)
            slots = None if self.adapters is None else self.adapters.slots
            self.invariance, self.rank_invariance = try_out(
                runner, self.model, self.layer_memory, self.backends, config, self.num_blocks, slots
            )
        if config.offloads_kv:
            with memory.needed_for("taking host memory for KV blocks"):
                (backend,) = self.backends.values()  # preflight refuses several groups
                facts = {"backend": backend.name, "kernels": describe_kernels(self.device), "kv": str(backend.spec)}
                rank = self.stage.number * self.tp.size + self.tp.rank
                pages = [one.kv for one in self.layer_memory if one.kv is not None]
                self.kv_offload = RankOffload(config, pages, facts, rank)
        graphs = 0
        if isinstance(self.steps, DeviceSteps):
            with memory.needed_for("capturing graphs"):
                warm_up(self.execute, config, self._kinds)
                graphs = capture(self.steps, self._graph_maker, config, self.backends)
        if self.device.type == "cuda":
            log_device(self.device, self.tp, attention=self.attention_names, graphs=graphs)

    def time_steps(self) -> StepCost:
        """Measure the cost of steps in this stage.

        Every rank of the stage must call this at the same point, after `allocate` and before any request.
        """
        with self.memory.needed_for("timing a few steps"):
            self.step_cost = time_model(self._with_layers, self.model, self.layer_memory, self.config)
        return self.step_cost

    @property
    def _kinds(self) -> TrialMemory:
        return TrialMemory.of(self.spec)

    @property
    def attention_names(self) -> str:
        """The names of the attention backends in use."""
        return ", ".join(dict.fromkeys(backend.name for backend in self.backends.values())) or NO_ATTENTION

    def _with_layers(self, model: RankModel, memory: list[LayerMemory]) -> StepRunner[DecoderSteps]:
        """Return a runner of only the layers of `model` with their `memory`, in which no other stage takes part."""
        runner: StepRunner[DecoderSteps] = StepRunner(answers=self.answers)
        runner.steps = self.steps.with_layers(model, memory)
        return runner

    def info(self) -> WorkerInfo:
        """Return this rank's report to the engine. Valid after `allocate`."""
        description, spec, groups = self.description, self.spec, self.memory.groups
        return worker_info(
            self.config,
            spec,
            self.tp,
            self.device,
            self.invariance,
            self.rank_invariance,
            self._load_seconds,
            num_blocks=groups.joint_blocks(self.num_blocks),
            max_model_len=groups.fitted_length(self.num_blocks),
            groups=groups.infos(self.num_blocks),
            pipeline_parallel_size=self.stage.size,
            quantization=description.quantization,
            input_rounding=description.input_rounding,
            attention_backend=self.attention_names,
            active_parameters=spec.active_parameters if spec.has_experts else None,
            weight_bytes_per_rank=self.model.weight_bytes,
            kv_bytes_per_token_per_rank=groups.bytes_per_token,
            sliding_window=groups.longest_span,
            text_part_of=spec.wrapper,
            served_by=spec.served_by,
            is_replicated=self.tp.size > 1 and spec.is_replicated,
            step_cost=self.step_cost,
            adapter_slot_bytes=self._adapter_slot_bytes,
            kv_offload=None if self.kv_offload is None else self.kv_offload.info,
        )

    @property
    def runs_ahead(self) -> bool:
        """Whether steps continue to run after `launch` has returned."""
        return isinstance(self.steps, DeviceSteps)

    def bytes_of(self, step: StepMetadata) -> int:
        """Return the bytes that `step` takes in addition to this rank's memory; 0 if a graph runs it."""
        if not len(step.seq_lens):
            return 0
        is_replayed = isinstance(self.steps, DeviceSteps) and self.steps.replays(step)
        return 0 if is_replayed else self.memory.step.of(step)

    def close(self) -> None:
        """Free everything that must be freed before the process group is destroyed."""
        if self.kv_offload is not None:
            self.kv_offload.close()
        if self.adapters is not None:
            self.adapters.close()
        if isinstance(self.steps, DeviceSteps):
            self.steps.release()
