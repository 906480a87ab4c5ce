"""Report of simulated ranks to the scheduler: for simulations, benchmarks and tests of the engine."""

from oarlock.engine.config import WorkerConfig
from oarlock.workers.config import WorkerInfo
from oarlock.workers.step_cost import StepCost

HIDDEN_SIZE = 2  # small: vectors mean nothing here


def replica_info(
    worker: WorkerConfig,
    num_blocks: int,
    vocab_size: int,
    *,
    sliding_window: int | None = None,
    step_cost: StepCost | None = None,
) -> WorkerInfo:
    """Make the `WorkerInfo` that ranks would report. Raises `ValueError` without `max_model_len`."""
    if worker.max_model_len is None:
        raise ValueError("a simulation has no model to read max_model_len from: set it")
    return WorkerInfo(
        num_blocks=num_blocks,
        block_size=worker.block_size,
        max_model_len=worker.max_model_len,
        vocab_size=vocab_size,
        tensor_parallel_size=worker.tensor_parallel_size,
        device="simulated",
        dtype="none",
        attention_backend="none",
        architecture="Simulated",
        num_parameters=0,
        weight_bytes_per_rank=0,
        kv_bytes_per_token_per_rank=0,
        load_seconds=0.0,
        sliding_window=sliding_window,
        step_cost=step_cost,
        hidden_size=HIDDEN_SIZE,
    )
