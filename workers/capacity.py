"""Plan of a model's memory and work per rank on a machine that need not be present: `oarlock plan`. Torch-free.

Uses the same size computations as `workers/preflight.py` and the ranks. Reads `config.json` and the headers of the
weight files; allocates nothing. Does not know speeds: `RankWork` has the amounts to read and to compute.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from oarlock.base.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.base.host_memory import human_bytes
from oarlock.workers.checks.adapters import without_experts
from oarlock.workers.checks.class_limits import check_class
from oarlock.workers.checks.limits import check_limits, check_parallel
from oarlock.workers.config import WorkerConfig, max_pooled_values
from oarlock.workers.distributed.shm_ring import RingLayout
from oarlock.workers.layers.decoder_spec import DecoderSpec, slices_of
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.sharding import LARGEST_TP, shard_experts
from oarlock.workers.layers.tensor_spec import Sharding
from oarlock.workers.model_files.checkpoint import EMBEDDING
from oarlock.workers.platform.dtypes import ITEM_BYTES
from oarlock.workers.platform.processor import features
from oarlock.workers.preflight import OpenModel, formats_on, open_model, with_lengths_and_types
from oarlock.workers.quantization.formats.weight_format import WeightFormats
from oarlock.workers.ranks.cpu_affinity import with_cpus
from oarlock.workers.runner.group_sizes import GroupSizes, with_sequences_that_fit
from oarlock.workers.runner.kv_room import KVRoom, room_given, room_on_device, room_on_host
from oarlock.workers.runner.memory_needs import (
    CUDA_BYTES,
    largest_step_bytes,
    loaded_bytes_of_node,
    rank_shapes,
    rank_tensors,
    rank_weight_bytes,
    sampling_bytes,
)

# 32-bit multiplications and additions of a core per cycle, and the factor for narrower dtypes.
_CORE_OPS = (("avx512f", 64), ("avx2", 32), ("asimd", 16))
_NARROW = {
    "bfloat16": (("amx_bf16", 16), ("avx512_bf16", 2), ("bf16", 2)),
    "int8": (("amx_int8", 32), ("avx512_vnni", 4)),
}
_CYCLES_PER_S = 2.5e9  # used if the system does not report a frequency


# Host memory for a rank's process, and for a server's other processes: Python, torch and their first allocations.
CPU_RANK_BYTES, CPU_SERVER_BYTES = 320 << 20, 400 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of each CUDA device, or of an idle host, in bytes."""

    device: str  # cpu | cuda
    total_bytes: int
    has_vectors: bool = False  # whether ranks return vectors, through shared memory of the host


@dataclass(frozen=True, slots=True)
class Capacity:
    """KV blocks and memory of one replica. The pipeline stage with the least room limits its blocks."""

    config: WorkerConfig  # all values resolved
    groups: GroupSizes  # memory groups of the limiting rank
    counts: tuple[int, ...]  # KV blocks and slots of each group, including number 0; (): the model does not fit
    refusal: StartupError | None = None  # why it does not fit
    missing_bytes: int = 0  # bytes that the device or the host lacks
    weight_bytes: tuple[int, ...] = ()  # bytes of a rank, by stage
    step_bytes: int = 0  # maximum over ranks, without weights and KV memory
    other_bytes: int = 0  # maximum over ranks, for libraries, graphs and sampling
    vector_bytes: int = 0  # bytes of the host's shared memory for the outputs of steps

    @property
    def num_blocks(self) -> int:
        """KV blocks that limit whole sequences, including the null block; 0: the model does not fit."""
        return self.groups.joint_blocks(self.counts) if self.refusal is None else 0

    @property
    def num_slots(self) -> int:
        """Slots of recurrent state, without the null slot; 0: the model has no recurrent layers, or does not fit."""
        pairs = zip(self.groups.groups, self.counts, strict=False)
        return next((count - 1 for group, count in pairs if group.is_recurrent), 0)

    @property
    def kv_tokens(self) -> int:
        return max(0, self.num_blocks - 1) * self.config.block_size

    @property
    def kv_bytes(self) -> int:
        """Memory of keys, values and recurrent state of the limiting rank, in bytes."""
        return self.groups.bytes_of(self.counts) if self.refusal is None else 0

    @property
    def least_kv_mib(self) -> int:
        """Memory of one sequence of the longest context on the limiting rank, in MiB, rounded up."""
        assert self.config.max_model_len is not None
        return -(-self.groups.bytes_of_sequence(self.config.max_model_len) // 2**20)

    def users(self, context: int) -> int:
        """Return the number of sequences of `context` tokens that fit at once; 0 if `context` exceeds the longest
        context."""
        assert self.config.max_model_len is not None
        if context > self.config.max_model_len:
            return 0
        return self.groups.sequences(self.counts, context) if self.refusal is None else 0


def at_size(model: OpenModel, tensor_parallel_size: int) -> OpenModel:
    """Return the model as this many ranks hold it. Raises `StartupError` if they cannot.

    A description holds for every size; a class without one needs another look, which takes seconds.
    """
    if model.spec.class_tensors is None or tensor_parallel_size == model.config.tensor_parallel_size:
        return model
    return open_model(model.config.with_(tensor_parallel_size=tensor_parallel_size))


def tensor_parallel_sizes(model: OpenModel, most: int) -> list[int]:
    """Return the numbers of ranks up to `most` that this model's layers can be divided among."""
    sizes = model.spec.tp_sizes
    if model.spec.class_tensors is not None:
        sizes = [1 << power for power in range(LARGEST_TP.bit_length())]
    return [size for size in sizes if size <= most and divides(model, size, 1)]


def divides(model: OpenModel, tensor_parallel_size: int, pipeline_parallel_size: int) -> bool:
    """Return whether the model can be divided into stages of this many ranks."""
    sizes = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
    config = model.config.with_(**sizes)
    try:
        if model.spec.class_tensors is not None:
            check_class(config, model.spec, is_quantised=False)
        check_parallel(config, at_size(model, tensor_parallel_size).spec)
    except StartupError:
        return False
    return True


def capacity(model: OpenModel, changes: Mapping[str, Any], memory: Memory) -> Capacity:
    """Return the capacity of each replica, with `changes` to the model's configuration. Replicas share the `memory` of
    a host; on CUDA each rank has a device with it. Raises `StartupError` for a configuration that no memory could
    serve."""
    config = model.config.with_(**changes)
    check_limits(config)
    model = at_size(model, config.tensor_parallel_size)
    check_parallel(config, model.spec)
    config = with_lengths_and_types(model._replace(config=config), memory.device)
    spec, formats = model.spec, formats_on(model._replace(config=config), config.device)
    stages = range(config.pipeline_parallel_size)
    weights = tuple(rank_weight_bytes(config, spec, formats, stage) for stage in stages)
    steps = tuple(largest_step_bytes(config, spec, has_head=stage == stages[-1]) for stage in stages)
    given = config.kv_cache_bytes or 0
    vectors = _vector_bytes(config, spec) if memory.has_vectors else 0
    if memory.device == "cuda":
        total, others = memory.total_bytes, [CUDA_BYTES] * len(stages)
        others[-1] += sampling_bytes(config, spec)
        usable = total if given else int(total * config.gpu_memory_utilization)
        used = [config.adapter_bytes + sum(parts) for parts in zip(weights, others, strict=True)]
        rooms = [room_on_device(config, total, each, step) for each, step in zip(used, steps, strict=True)]
        short = [max(0, each + step + given - usable) for each, step in zip(used, steps, strict=True)]
    else:
        others = [CPU_RANK_BYTES]
        left = memory.total_bytes - CPU_SERVER_BYTES - config.ranks_on_host * CPU_RANK_BYTES
        left -= config.data_parallel_size * (loaded_bytes_of_node(config, spec, formats) + vectors)
        rooms = [room_on_host(config, max(0, left))] * len(stages)
        reserved = (given + config.adapter_copies_bytes) * config.ranks_on_host
        short = [max(0, reserved - left)] * len(stages)
    if given:
        rooms = [room_given(config)] * len(rooms)
    config = with_sequences_that_fit(config, spec, min(rooms))
    each = [
        _held(config, GroupSizes.of(config, spec, stage), room, lack)
        for stage, room, lack in zip(stages, rooms, short, strict=True)
    ]
    least = min(each, key=lambda held: (held.num_blocks, -held.missing_bytes))
    if all(held.counts for held in each):  # stages agree on the fewest blocks of each group
        counts = tuple(min(of_group) for of_group in zip(*(held.counts for held in each), strict=True))
        config = least.config.with_(max_model_len=least.groups.fitted_length(counts))
        least = replace(least, counts=counts, config=config)
    return replace(least, weight_bytes=weights, step_bytes=max(steps), other_bytes=max(others), vector_bytes=vectors)


class SmallerSlots(NamedTuple):
    """Slots for adapters without memory for experts."""

    targets: tuple[str, ...]  # for `--lora-target-modules`
    slot_bytes: int  # of one slot on a rank


def smaller_slots(model: OpenModel, config: WorkerConfig) -> SmallerSlots | None:
    """Return the slots that adapters of all other modules need, if experts take most of a slot. `config`: from a
    `Capacity`."""
    spec = at_size(model, config.tensor_parallel_size).spec
    fewer = without_experts(config, spec, formats_on(model._replace(config=config), config.device))
    if fewer is None or fewer.lora_target_modules is None:
        return None
    return SmallerSlots(fewer.lora_target_modules, fewer.adapter_slot_bytes)


def _vector_bytes(config: WorkerConfig, spec: DecoderSpec) -> int:
    """Return the bytes of the ring of vectors from the answering rank: each slot holds the vectors of one step."""
    values = 4 * max_pooled_values(config, spec.hidden_size)
    return RingLayout.holding(values, 1, config.pipeline_parallel_size).num_slots * values


def _held(config: WorkerConfig, groups: GroupSizes, room: KVRoom, short: int) -> Capacity:
    """Return the capacity of one rank with `room` for pages and slots. `short`: bytes lacking before there is any."""
    assert config.max_model_len is not None
    least = groups.bytes_of_sequence(config.max_model_len)
    if short:
        parts = ["weights", *(["adapters"] if config.max_loras else [])]
        parts += ["--kv-cache-memory"] if config.kv_cache_bytes else []
        what = f"The {' and '.join(parts)} need"
        refusal = StartupError(
            f"{what} {human_bytes(short)} more memory than is available.",
            "Use more or larger devices, or smaller weights.",
            EXIT_OUT_OF_MEMORY,
        )
        return Capacity(config, groups, (), refusal, short + (0 if config.kv_cache_bytes else least))
    try:
        counts = groups.counts_that_fit(room)
        return Capacity(config.with_(max_model_len=groups.fitted_length(counts)), groups, tuple(counts))
    except StartupError as error:
        return Capacity(config, groups, (), error, least - room.available)


@dataclass(frozen=True, slots=True)
class RankWork:
    """Cost of a step on one rank of a pipeline stage: bytes to read and operations to compute."""

    weight_bytes: int  # read by every step
    kv_bytes: int  # read for each token of context of each sequence
    token_ops: float  # multiplications and additions for each token
    row_ops: float  # operations for each row of logits
    pair_ops: float  # operations for each token and token of its context
    sum_bytes: int  # exchanged with the other ranks of the stage for each token, in `num_sums` all-reduces
    num_sums: int
    pass_bytes: int  # sent to the next stage for each token
    expert_bytes: int = 0  # of routed experts, of which a step reads those that its tokens choose
    expert_share: float = 0.0  # fraction of the experts that one token has
    state_bytes: int = 0  # of recurrent state, read and written for each sequence


def work_of(model: OpenModel, config: WorkerConfig) -> tuple[RankWork, ...]:
    """Return the cost of a step on one rank of each pipeline stage. `config`: from a `Capacity`."""
    model = at_size(model, config.tensor_parallel_size)
    spec, stages = model.spec, config.pipeline_parallel_size
    formats = formats_on(model._replace(config=config), config.device)
    return tuple(_work(spec, formats, config, stage, stages) for stage in range(stages))


def _work(spec: DecoderSpec, formats: WeightFormats, config: WorkerConfig, stage: int, stages: int) -> RankWork:
    size, item = config.tensor_parallel_size, ITEM_BYTES[config.dtype]
    layers = spec.layers_of_stage(stage, stages)
    branches = [branch for layer in layers for branch in spec.layers[layer].branches]
    multiplied = sum(
        math.prod(shape) * tensor.used
        for tensor, shape in rank_shapes(config, spec, formats, stage)
        if tensor.is_matrix and tensor.sharding is not Sharding.VOCABULARY
    )
    is_last, head = stage == stages - 1, spec.vocab_size * spec.hidden_size
    held = list(rank_tensors(config, spec, formats, stage))
    experts = [(tensor.used, bytes_of) for tensor, bytes_of in held if tensor.expert is not None]
    expert_bytes = sum(bytes_of for _, bytes_of in experts)
    read = sum(bytes_of for _, bytes_of in held) - expert_bytes
    if stage == 0 and not (spec.tie_word_embeddings and is_last):  # an embedding that is not the head is read by rows
        weight_format = formats.of_head.format_of(EMBEDDING.removesuffix(".weight"))
        read -= weight_format.weight_bytes(spec.vocab_size, spec.hidden_size, item) // size
    read -= sum(bytes_of for tensor, bytes_of in held if tensor.is_table or not tensor.used)  # read by rows as well
    groups = GroupSizes.of(config, spec, stage)
    return RankWork(
        weight_bytes=read,
        expert_bytes=expert_bytes,
        expert_share=max((used for used, _ in experts), default=0.0),
        kv_bytes=groups.bytes_per_token,
        state_bytes=groups.slot_bytes,
        token_ops=2 * multiplied,
        row_ops=2 * head / size if is_last else 0.0,
        pair_ops=sum(branch.sublayer.pair_ops for branch in branches) / size,
        sum_bytes=len(branches) * spec.hidden_size * item if size > 1 else 0,
        num_sums=len(branches) if size > 1 else 0,
        pass_bytes=0 if is_last else spec.hidden_size * item,
    )


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """Bytes of routed experts on the rank of a stage that has, or reads, the most of them."""

    held: int
    read_by: Mapping[int, int]  # tokens of a step -> bytes read, on average over routings


_DRAWS = 200  # routings


def expert_bytes(model: OpenModel, config: WorkerConfig, *, whole: bool, tokens: Sequence[int]) -> ExpertBytes:
    """Return the bytes of a rank's experts, each cut along its width, or `whole`. If they are cut, all ranks read equal
    parts of the experts of the step's `tokens`; if whole, a step waits for the rank that reads the most. Routing is
    assumed to be uniform."""
    config = config.with_(enable_expert_parallel=whole)
    held = max(work_of(model, config), key=lambda work: work.expert_bytes)
    spec, size = model.spec, config.tensor_parallel_size
    if not whole:
        share = held.expert_share
        return ExpertBytes(
            held.expert_bytes, {n: round(held.expert_bytes * (1.0 - (1.0 - share) ** n)) for n in tokens}
        )
    mixture = max((one for one in spec.sublayers if isinstance(one, ExpertsSpec)), key=lambda one: one.experts)
    slices = slices_of(spec, formats_on(model._replace(config=config), config.device)) if config.device == "cpu" else 1
    first = shard_experts(mixture.experts, 0, size, slices).count
    draw, read = random.Random(0), {}
    for count in tokens:
        most = 0
        for _ in range(_DRAWS):
            chosen = {e for _ in range(count) for e in draw.sample(range(mixture.choices), mixture.router.top_k)}
            held_by = Counter(expert // first for expert in chosen if expert < mixture.experts)
            most += max(held_by.values(), default=0)
        read[count] = round(held.expert_bytes / first * most / _DRAWS)
    return ExpertBytes(held.expert_bytes, read)


def cpu_ops(config: WorkerConfig) -> float:
    """Return the nominal multiplications and additions per second of this host's cores, in the dtype of `config`'s
    computations, over all ranks."""
    flags = features()
    width = next((ops for name, ops in _CORE_OPS if name in flags), 8)
    kind = config.dtype if config.quantization == "none" or config.dequantize else "int8"
    times = next((times for name, times in _NARROW.get(kind, ()) if name in flags), 1)
    threads = with_cpus(config, "cpu").num_threads or 1
    return width * times * threads * config.ranks_on_host * _cycles_per_s()


def _cycles_per_s() -> float:
    import psutil  # ranks read this file without psutil

    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    return 1e6 * (frequency.max or frequency.current) if frequency else _CYCLES_PER_S
