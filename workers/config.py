"""The configuration of a rank, and what ranks report after loading. Frozen, torch-free, sent between processes as JSON.

Defaults of flags are in `server/config/settings.py`.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from workers.step_cost import StepCost

# Called with a phase of starting ("loading") and the share of it that is done, 0 to 1.
OnProgress = Callable[[str, float], None]

LOADING_TIMEOUT_S = 300.0  # without progress of any rank; longer than compiling the kernels may take


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Configuration shared by all ranks of one tensor-parallel group.

    Fields that may be None or "auto" are resolved once, by `workers.preflight.preflight`, before any rank starts;
    a rank only ever sees resolved values.
    """

    model_path: str  # local directory in the Hugging Face layout
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | bfloat16 | float16 | float32
    quantization: str = "none"  # none | int8 | int4, or the method of a quantised checkpoint
    tensor_parallel_size: int = 1
    load_format: str = "auto"  # auto | safetensors | dummy
    tie_word_embeddings: bool | None = None  # None: as config.json says, unless the stored head is another matrix
    seed: int = 0  # of dummy weights only; sampling seeds come with each request
    max_model_len: int | None = None  # tokens; None: what the model was trained for
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    lower_step_size: bool = (
        False  # whether max_num_batched_tokens may be lowered after timing: see `workers.worker.step_limits`
    )
    block_size: int = 32  # tokens in one KV block
    check_weights: bool = True  # refuse a checkpoint that holds NaN or infinity
    kv_cache_bytes: int | None = None  # over all ranks' shards of one rank; None: measured
    kv_cache_dtype: str = "auto"  # auto | int8 | fp8 (or fp8_e4m3); auto is resolved to the dtype
    num_kv_blocks: int | None = None  # exactly so many, the null block included; None: what fits the memory
    gpu_memory_utilization: float = 0.9
    num_threads: int | None = None  # CPU threads of one rank; None: one for each core that it gets
    cpu_affinity: str = "auto"  # auto | none | the CPUs of each rank: see `workers.worker.cpu_affinity`
    attention_backend: str = "auto"  # auto | cpp | torch | reference
    step_timeout_s: float = 120.0  # a step that takes longer is a hung rank
    raise_step_timeout: bool = False  # whether it may be raised after timing
    log_level: str = "INFO"  # of the engine's and the ranks' logs, a name of the logging module

    def with_(self, **changes: Any) -> "WorkerConfig":
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "WorkerConfig":
        return WorkerConfig(**json.loads(text))


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the ranks report after loading; the engine sizes its KV block pool by it."""

    num_blocks: int  # block 0 is the null block, so num_blocks - 1 can be handed out
    block_size: int
    max_model_len: int
    vocab_size: int  # ids below this can be embedded and sampled
    tensor_parallel_size: int
    device: str
    dtype: str
    attention_backend: str
    architecture: str  # e.g. "Qwen2ForCausalLM"
    num_parameters: int  # of the whole model, tied tensors counted once
    weight_bytes_per_rank: int
    kv_bytes_per_token_per_rank: int
    load_seconds: float
    quantization: str = "none"  # of the weights, in a few words
    kv_cache_dtype: str = "auto"  # the dtype, int8 or fp8
    sliding_window: int | None = None  # tokens; the longest, if every layer has one: earlier tokens are never read
    kernels: str = ""  # what computes: see `workers.kernels.cpu.in_use`
    batch_invariant: bool = False  # a request's numbers do not depend on its batch or on how its prompt is cut
    batch_invariant_reason: str = "it was not tested"  # why not, or what was measured
    rank_invariant: bool = False  # its bits do not depend on the number of ranks; tried at the start
    rank_invariant_reason: str = "it was not tested"
    step_cost: StepCost | None = None  # None: not measured

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "WorkerInfo":
        fields = json.loads(text)
        cost = fields.pop("step_cost", None)
        return WorkerInfo(**fields, step_cost=None if cost is None else StepCost(**cost))
