"""Self-tests of a decoder at start: a first small step, the comparison of a class with its own code, then the checks of
batch invariance and rank invariance."""

import logging
from collections.abc import Mapping, Sequence

import torch

from oarlock.workers.attention.backend import AttentionBackend, LayerMemory
from oarlock.workers.config import WorkerConfig
from oarlock.workers.lora.adapter_slots import AdapterSlots
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.runner.class_self_test import check_class
from oarlock.workers.runner.invariance import (
    InvarianceResult,
    RankInvariance,
    check_batch_invariance,
    check_rank_invariance,
)
from oarlock.workers.runner.step import StepRunner
from oarlock.workers.runner.trial_steps import TrialMemory, null_step

logger = logging.getLogger("oarlock.runner")


@torch.inference_mode()
def try_out(
    runner: StepRunner,
    model: RankModel,
    memory: list[LayerMemory],
    backends: Mapping[int, AttentionBackend],
    config: WorkerConfig,
    num_blocks: Sequence[int],
    slots: AdapterSlots | None = None,
) -> tuple[InvarianceResult, RankInvariance]:
    """Run one step of `model` by `runner`, so that lazy initialisation does not delay the first request, then check
    whether results depend on the batch or on the number of ranks.

    Every rank must call this at the same point. It overwrites the first blocks and slots of `memory`, which has
    `num_blocks` of each group. `slots`: of adapters, if these are served; empty before and after. Raises `StartupError`
    if other code than ours computes the model wrong, or if `--batch-invariant` is set and results depend on the batch.
    """
    assert config.max_model_len is not None, "preflight resolves the context length"
    runner.execute(null_step(2, 2, 1, config.block_size, memory=TrialMemory.of(model.spec)))
    if model.placement.tp.rank == 0:
        reason = model.why_not_prepared
        if reason is None:
            logger.info("event=fused_decoder_on")
        else:
            logger.info("event=fused_decoder_off reason=%r", reason)
    if model.reference is not None:
        check_class(model, model.reference, memory, backends, config, num_blocks)
    span = max((backend.spec.fixed_span or 0 for backend in backends.values()), default=0)
    invariance = check_batch_invariance(
        model,
        memory,
        backends,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_len=config.max_model_len,
        span=min(span, config.max_num_batched_tokens),
        is_asked=config.batch_invariant,
        slots=slots,
    )
    if config.batch_invariant:
        invariance.require()
    return invariance, check_rank_invariance(model, memory, backends)
