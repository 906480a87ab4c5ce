"""Construction of a decoder rank's steps: with graphs on a CUDA device, operation by operation on other devices, with
pipeline stages, and for models whose steps graphs cannot contain.

All buffers and samplers are allocated here, before the free memory is measured.
"""

import logging
from collections.abc import Mapping

from oarlock.workers.attention.backend import AttentionBackend
from oarlock.workers.attention.forward_batch import BlockTables
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.kernels.triton import availability
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.protocol import table_width
from oarlock.workers.runner.buckets import logits_rows_at_once
from oarlock.workers.runner.device_sampling import DeviceSampling
from oarlock.workers.runner.device_steps import DeviceSteps
from oarlock.workers.runner.eager_steps import EagerSteps
from oarlock.workers.runner.step_inputs import Shape, StepInputs
from oarlock.workers.runner.trial_steps import TrialMemory
from oarlock.workers.sampling.device_sampler import DeviceSampler
from oarlock.workers.sampling.sampler import Sampler
from oarlock.workers.sampling.sharded_sampler import RowSampler, ShardSampler
from oarlock.workers.sampling.token_histories import DenseHistories, make_histories

logger = logging.getLogger("oarlock.runner")

Backends = Mapping[int, AttentionBackend]  # by the number of the group of pages

DecoderSteps = EagerSteps | DeviceSteps


def build_steps(
    config: WorkerConfig, model: RankModel, backends: Backends, stage: PipelineStage, *, answers: bool
) -> DecoderSteps:
    """Return the steps of a rank of `stage`. `answers`: whether this rank returns the outputs."""
    device, why_not_captured = model.placement.device, model.why_not_captured
    if stage.size > 1:
        layers = f"{model.stage.start}-{model.stage.stop - 1}"
        logger.info("event=stage number=%d of=%d layers=%s", stage.number, stage.size, layers)
        why_not_captured = "with pipeline stages every step is launched by itself"
    if device.type == "cuda" and why_not_captured is not None:
        logger.info("event=no_graphs reason=%r", why_not_captured)
    groups = TrialMemory.of(model.spec).pages_groups
    tables = BlockTables(config.max_num_seqs, table_width(config), config.block_size, device, groups)
    if availability.can_serve(device) and why_not_captured is None:
        return device_steps(config, model, backends, tables)
    return eager_steps(config, model, backends, tables, stage, answers=answers)


def eager_steps(
    config: WorkerConfig,
    model: RankModel,
    backends: Backends,
    tables: BlockTables,
    stage: PipelineStage,
    *,
    answers: bool,
) -> EagerSteps:
    """Return steps that are launched operation by operation. The last stage has a sampler."""
    assert config.max_model_len is not None, "preflight resolves the context length"
    sampler = None
    if stage.is_last:
        shard = model.vocab_start, model.vocab_local, model.spec.vocab_size
        histories = make_histories(model.placement.device, config.max_num_seqs, config.max_model_len, *shard)
        sampler = Sampler(model.placement.tp, *shard, histories)
    return EagerSteps(model, backends, tables, stage, sampler, answers=answers)


def device_steps(
    config: WorkerConfig,
    model: RankModel,
    backends: Backends,
    tables: BlockTables,
) -> DeviceSteps:
    """Allocate all memory that steps and graphs share, so that the rest of the device's memory can be measured."""
    assert config.max_model_len is not None, "preflight resolves the context length"
    tp, device, vocab_size = model.placement.tp, tables.tables.device, model.spec.vocab_size
    seqs = config.max_num_seqs
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
    memory, entries = TrialMemory.of(model.spec), len(tables.tables) * seqs * table_width(config)
    saves = rows if memory.has_states else 0
    states = seqs if memory.has_states else 0
    largest = Shape(rows, seqs, rows, entries, len(memory.pages_groups), states, saves, config.max_loras)
    return DeviceSteps(
        model,
        backends,
        StepInputs(tables, largest, sampled, vocab_size),
        DeviceSampling(sampler, histories, rows, tp, shards),
        rows_at_once=at_once,
        max_model_len=config.max_model_len,
    )
