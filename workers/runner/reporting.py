"""Reports of a rank that has started: `WorkerInfo` for the engine, and the log line of a CUDA device."""

import logging
from typing import Any

import torch

from oarlock.base.host_memory import human_bytes
from oarlock.workers.config import WorkerConfig, WorkerInfo
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu.description import describe_kernels
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.encoders.encoder_spec import EncoderSpec
from oarlock.workers.runner.device import free_bytes
from oarlock.workers.runner.invariance import InvarianceResult, RankInvariance

logger = logging.getLogger("oarlock.runner")


def worker_info(
    config: WorkerConfig,
    spec: DecoderSpec | EncoderSpec,
    tp: TensorParallel,
    device: torch.device,
    invariance: InvarianceResult,
    rank_invariance: RankInvariance,
    load_seconds: float,
    **of_kind: Any,
) -> WorkerInfo:
    """Return a rank's report to the engine. `of_kind`: the fields that differ between kinds of models."""
    return WorkerInfo(
        block_size=config.block_size,
        vocab_size=spec.vocab_size,
        tensor_parallel_size=tp.size,
        device=device.type,
        dtype=config.dtype,
        architecture=spec.architecture,
        num_parameters=spec.num_parameters,
        kv_cache_dtype=config.kv_cache_dtype,
        load_seconds=round(load_seconds, 3),
        kernels=describe_kernels(device),
        batch_invariant=invariance.batch_invariant,
        batch_invariant_reason=invariance.reason,
        rank_invariant=rank_invariance.rank_invariant,
        rank_invariant_reason=rank_invariance.reason,
        hidden_size=spec.hidden_size,
        **of_kind,
    )


def log_device(device: torch.device, tp: TensorParallel, *, attention: str, graphs: int) -> None:
    """Log the state of a CUDA device on which a rank is ready."""
    logger.info(
        "event=device index=%d name=%r free=%r attention=%s graphs=%d sums=%r",
        device.index,
        describe_kernels(device),
        human_bytes(free_bytes(device)),
        attention,
        graphs,
        tp.all_reduce_method if tp.size > 1 else "no other rank",
    )
