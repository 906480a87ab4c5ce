"""Assembles the `DeviceSteps` of a rank on a CUDA device, captures its graphs, and measures their memory."""

import logging
import time

from oarlock.workers.attention.backend import AttentionBackend
from oarlock.workers.attention.block_tables import BlockTables
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.protocol import table_width
from oarlock.workers.runner.cuda_graphs.buckets import graph_sizes, logits_rows_at_once
from oarlock.workers.runner.cuda_graphs.device_sampling import DeviceSampling
from oarlock.workers.runner.cuda_graphs.device_steps import CapturableBackend, DeviceSteps
from oarlock.workers.runner.cuda_graphs.graphs import GraphMaker
from oarlock.workers.runner.cuda_graphs.inputs import Shape, StepInputs
from oarlock.workers.runner.memory.graph_memory import graph_bytes
from oarlock.workers.runner.memory.meter import MemoryMeter
from oarlock.workers.runner.pooling.pooler import Pooler
from oarlock.workers.sampling.dense_histories import DenseHistories
from oarlock.workers.sampling.device_sampler import DeviceSampler

logger = logging.getLogger("oarlock.runner")


def device_steps(
    config: WorkerConfig,
    model: Decoder,
    backend: AttentionBackend,
    tp: TensorParallel,
    tables: BlockTables,
    pooler: Pooler,
) -> DeviceSteps:
    """Allocates all memory that steps and graphs share, so that the rest of the device can be measured."""
    assert config.max_model_len is not None
    seqs, device, vocab_size = config.max_num_seqs, tables.tables.device, model.spec.vocab_size
    rows = max(seqs, config.max_num_batched_tokens)
    sampled = seqs * (1 + config.num_speculative_tokens)
    at_once = logits_rows_at_once(config)
    histories = DenseHistories(seqs, 0, vocab_size, device)
    sampler = DeviceSampler(vocab_size, at_once, histories, device)
    sampler.warm_up(tp.size * model.vocab_local)
    return DeviceSteps(
        model,
        backend,
        tp,
        StepInputs(tables, Shape(rows, seqs, rows, seqs * table_width(config)), sampled, vocab_size),
        DeviceSampling(sampler, rows, device, answers=tp.rank == 0),
        pooler,
        rows_at_once=at_once,
        max_model_len=config.max_model_len,
    )


def capture(
    steps: DeviceSteps, maker: GraphMaker, config: WorkerConfig, backend: AttentionBackend, rank: int = 0
) -> None:
    """Capture the graphs of a rank, unless it cannot or must not have any."""
    reason, sizes, begun = _why_none(config, backend), graph_sizes(config), time.monotonic()
    if reason is not None:
        logger.info("event=no_graphs reason=%r", reason)
        return
    count = steps.capture(maker, sizes)
    if rank == 0:
        seconds = time.monotonic() - begun
        logger.info("event=graphs_captured count=%d largest=%d seconds=%.1f", count, sizes[-1], seconds)


def bytes_of_graphs(
    steps: DeviceSteps, maker: GraphMaker, config: WorkerConfig, backend: AttentionBackend, meter: MemoryMeter
) -> int:
    """Bytes that `capture` will take from the device. Captures some graphs, and destroys them: every rank must call
    this at the same point."""
    if _why_none(config, backend) is not None:
        return 0
    return graph_bytes(lambda size: steps.capture(maker, [size]), steps.release, graph_sizes(config), meter)


def _why_none(config: WorkerConfig, backend: AttentionBackend) -> str | None:
    """The reason why a rank has no graphs; None if it has."""
    if config.enforce_eager:
        return "--enforce-eager"
    if not isinstance(backend, CapturableBackend):
        return f"attention backend {backend.name} reads lengths on the host"
    return None
