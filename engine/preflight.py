"""Checks of a model before any rank starts: whether it can be served, its GGUF metadata, and its memory.

Torch-free. The engine repeats the checks when it starts.
"""

from oarlock.base.host_memory import free_host_bytes, human_bytes
from oarlock.base.json_files import check_file, is_there, read_json, read_table, read_text
from oarlock.engine.config import EngineConfig
from oarlock.engine.simulated_ranks import (
    Measured,
    Roofline,
    Speed,
    StepLoad,
    StepTime,
    decode_tokens_per_s,
    prompt_tokens_per_s,
)
from oarlock.workers.capacity import (
    Capacity,
    Memory,
    OpenModel,
    capacity,
    cpu_ops,
    expert_bytes,
    open_model,
    tensor_parallel_sizes,
    work_of,
)
from oarlock.workers.preflight import (
    DESCRIPTIONS,
    ENCODERS,
    GGUFModel,
    Settings,
    check_without_weights,
    hf_config,
    parts_of,
    read_header,
    weight_files,
)


def check_model(config: EngineConfig) -> None:
    """Raise `StartupError` unless the `DESCRIPTIONS` in `model_path` describe a model that `config` can serve."""
    check_without_weights(config.worker)
