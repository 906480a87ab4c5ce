"""The configuration of a rank, and the report of ranks after loading. Frozen, torch-free, sent between processes as
JSON.

Defaults of flags are in `server/config/model_options.py` and `option_groups.py`.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from oarlock.workers.kv_offload import KVOffloadInfo

TARGET_S = 3.0  # target for the largest step, for which running requests wait for their next token


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step in seconds on the slowest rank; the same values on every rank.

    Processors differ by a factor of a thousand for the same model, so the limits of a step are derived from it
    (`adapted` in `ranks/multiproc_executor.py`).
    """

    fixed_s: float  # every step
    token_s: float  # each token
    context_s: float  # each token and token of its context
    logits_s: float  # each row of logits
    experts_s: float = 0.0  # reading all experts of a MoE layer
    expert_share: float = 0.0  # fraction of the experts that one token has

    def seconds(self, tokens: int, *, context: int, rows: int = 1) -> float:
        """Return the seconds of a step of `tokens` with a context of up to `context` tokens each, and `rows` of
        logits."""
        of_tokens = tokens * (self.token_s + self.context_s * context)
        return self.fixed_s + self.expert_reads_s(tokens) + of_tokens + rows * self.logits_s

    def expert_reads_s(self, tokens: int) -> float:
        """Return the seconds of reading the experts of `tokens`. Tokens choose independently: an expert is read unless
        no token has chosen it."""
        return self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)

    def largest_step(self, fewest: int, most: int) -> int:
        """Return the tokens of the largest step that takes at most `TARGET_S`: `most`, halved until it does, but at
        least `fewest`.

        Halving makes slightly different measurements give the same result. This matters because the chunks of a prompt
        can change the last bits of results.
        """
        tokens = most
        while tokens > fewest and self.seconds(tokens, context=tokens // 2) > TARGET_S:
            tokens //= 2
        return max(tokens, fewest)

    def worst_step_s(self, tokens: int, max_model_len: int) -> float:
        """Return the seconds of a step in which every token has the longest context and needs logits."""
        return self.seconds(tokens, context=max_model_len, rows=tokens)


class OnProgress(Protocol):
    """Called with a phase of starting ("loading"), the fraction of it that is done, 0 to 1, and the cause of a wait."""

    def __call__(self, phase: str, fraction: float, detail: str = "", /) -> object: ...


MAX_TOKEN_VALUES = 1 << 21  # maximum values of token vectors that a step returns: 8 MiB to pass on before the next
MAX_POOLED_IDS = 64  # maximum ids that one sequence names to get their logits
LOADING_TIMEOUT_S = 300.0  # limit without progress of any rank; longer than compiling the kernels may take


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Configuration shared by all ranks of one tensor-parallel group.

    Fields that may be None or "auto" are resolved once, by `oarlock.workers.preflight.preflight`, before any rank
    starts; a rank only ever sees resolved values.
    """

    model_path: str  # local directory in the Hugging Face layout
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | bfloat16 | float16 | float32
    quantization: str = "none"  # none | int8 | int4, or the method of a quantised checkpoint
    dequantize: bool = False  # dequantise weights at load if their matmuls would round inputs
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1  # groups of neighbouring layers, each of `tensor_parallel_size` ranks
    enable_expert_parallel: bool = False  # ranks hold whole experts; else a part of each
    nnodes: int = 1  # hosts that the ranks are divided among
    data_parallel_size: int = 1  # replicas on this host, each with its own engine and ranks; other fields: per replica
    data_parallel_rank: int = 0  # index of these ranks' replica
    host_free_bytes: int | None = None  # memory before any replica was loaded; None: measured by the only replica
    model_impl: str = "auto"  # auto | oarlock (a described family) | transformers: whose code computes the model
    trust_remote_code: bool = False  # Python files of the checkpoint may be executed
    served_class: str | None = None  # resolved: encoded description of a class that transformers' code computes
    load_format: str = "auto"  # auto | safetensors | dummy
    tie_word_embeddings: bool | None = None  # None: from config.json, unless the stored head is another matrix
    seed: int = 0  # seed of dummy weights; sampling seeds come with each request
    max_model_len: int | None = None  # tokens; None: the length that the model was trained for
    fit_model_len: bool = False  # whether it may be lowered to fit the KV memory
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_speculative_tokens: int = 0  # drafts that may follow the newest token of a sequence in a step
    lower_step_size: bool = False  # whether max_num_batched_tokens may be lowered after timing: see `adapted`
    block_size: int = 32  # tokens in one KV block
    check_weights: bool = True  # refuse a checkpoint that contains NaN or infinity
    kv_cache_bytes: int | None = None  # bytes on one rank; None: measured
    kv_cache_dtype: str = "auto"  # auto | int8 | fp8 (or fp8_e4m3); auto is resolved to the dtype
    num_kv_blocks: int | None = None  # exact number, including the null block; None: from the memory
    kv_offload_bytes: int | None = None  # host memory of a rank for blocks outside the pool; resolved if a path is set
    kv_offload_path: str | None = None  # directory for files of these blocks
    kv_offload_disk_bytes: int | None = None  # limit of all files in it; None: half of the free space
    max_loras: int = 0  # LoRA adapters in one step, each in a slot of device memory; 0: none are served
    max_lora_rank: int = 16  # highest rank of an adapter, which sizes the slots
    max_cpu_loras: int | None = None  # adapters in host memory besides one that is being loaded; None: `max_loras`
    lora_target_modules: tuple[str, ...] | None = None  # last parts of the names of modules with slots; None: all
    lora_adapters: tuple[tuple[str, str], ...] = ()  # name and directory of each adapter that is served from the start
    adapter_slot_bytes: int = 0  # resolved: bytes of one slot on a rank, the most that a copy in host memory takes
    gpu_memory_utilization: float = 0.9
    num_threads: int | None = None  # CPU threads of one rank; None: a thread for each core that it gets
    cpu_affinity: str = "auto"  # auto | none | the CPUs of each rank: see `oarlock.workers.ranks.cpu_affinity`
    attention_backend: str = "auto"  # auto | cpp | torch | reference
    share_device: bool = False  # ranks may share CUDA devices (resolved: must), with all-reduces over the host
    enforce_eager: bool = False  # no graphs of decode steps; only CUDA devices have any
    batch_invariant: bool = False  # refuse to start unless results do not depend on other requests in the batch
    step_timeout_s: float = 120.0  # a step that takes longer is a hung rank
    raise_step_timeout: bool = False  # whether it may be raised after timing
    hidden_size: int = 0  # resolved: the model's; outputs may contain a vector of this size for each token
    pages_groups: int = 1  # resolved: memory groups of pages, each with its own block tables
    whole_texts: bool = False  # resolved: the model is an encoder, which computes each text within one step
    log_level: str = "INFO"  # level name of the logging module, for the engine and the ranks
    log_format: str = "text"  # text | json, for the same logs

    def __post_init__(self) -> None:
        """Make tuples of the lists that JSON has in place of tuples."""
        if self.lora_target_modules is not None:
            object.__setattr__(self, "lora_target_modules", tuple(self.lora_target_modules))
        object.__setattr__(self, "lora_adapters", tuple((name, directory) for name, directory in self.lora_adapters))

    @property
    def offloads_kv(self) -> bool:
        """Whether KV blocks are kept outside the pool."""
        return self.kv_offload_bytes is not None or self.kv_offload_path is not None

    @property
    def num_host_adapters(self) -> int:
        """Number of adapters that fit into host memory; 0: none are served. An adapter in a slot has its copy there.

        There is always room for one more than is in slots, so that an adapter can be loaded while all slots are used.
        """
        return 1 + max(self.max_loras, self.max_cpu_loras or 0) if self.max_loras else 0

    @property
    def adapter_bytes(self) -> int:
        """Bytes of all slots for adapters on a rank. Valid after `preflight`."""
        return self.max_loras * self.adapter_slot_bytes

    @property
    def adapter_copies_bytes(self) -> int:
        """Most bytes of a rank's copies of adapters in host memory. Valid after `preflight`."""
        return self.num_host_adapters * self.adapter_slot_bytes

    @property
    def ranks_per_node(self) -> int:
        """Number of a replica's ranks on each node, of all pipeline stages; on one host, all of its ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size // self.nnodes

    @property
    def ranks_on_host(self) -> int:
        """Number of ranks of all replicas on this host, which share its memory, cores and devices."""
        return self.ranks_per_node * self.data_parallel_size

    @property
    def first_on_host(self) -> int:
        """Index of this replica's first rank among the ranks of the host."""
        return self.ranks_per_node * self.data_parallel_rank

    def with_(self, **changes: Any) -> "WorkerConfig":
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "WorkerConfig":
        return WorkerConfig(**json.loads(text))


def max_token_vectors(hidden_size: int, longest: int = 0) -> int:
    """Return the largest number of tokens whose hidden states one step returns, in addition to one vector per sequence.
    `longest`: tokens of a text that cannot be divided among steps."""
    return max(1, longest, MAX_TOKEN_VALUES // max(1, hidden_size))


def max_pooled_values(config: WorkerConfig, hidden_size: int) -> int:
    """Return the largest number of float32 values that one step returns, in vectors and named logits."""
    longest = config.max_model_len or 0 if config.whole_texts else 0
    tokens = min(config.max_num_batched_tokens, max_token_vectors(hidden_size, longest))
    return config.max_num_seqs * max(hidden_size, MAX_POOLED_IDS) + tokens * hidden_size


@dataclass(frozen=True, slots=True)
class NodesConfig:
    """Settings with which this host, a node, finds the other hosts of the same model."""

    node_rank: int  # 0: the head, which also runs the frontend and the engine
    nnodes: int
    address: str  # name or IP address of the head
    port: int  # port of the store that all nodes reach
    interface: str | None  # network interface or its address, for all traffic between nodes; None: chosen by the route
    timeout_s: float = 300.0  # limit for all nodes to join
    launcher_store: str | None = None  # prefix of our keys in a store that the launcher keeps; None: the head keeps one


def window_blocks(span: int, step_tokens: int, block_size: int) -> int:
    """Return the most blocks that a sequence holds at a time if its queries see `span` tokens, and a step computes up
    to `step_tokens` of its tokens: these tokens may begin and end inside of a block."""
    return -(-(span + step_tokens) // block_size) + 1


NO_ATTENTION = "none"  # reported as the attention backend of layers without attention


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """Memory group of a model as the engine knows it: blocks of pages, or slots of recurrent state."""

    num_blocks: int  # blocks or slots, including number 0, which is never handed out
    bytes_per_block: int  # of a block or slot, on the rank with the most
    is_recurrent: bool = False  # True: slots
    span: int | None = None  # of pages: latest tokens that hold all keys which a query sees; None: all tokens


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Report of the ranks after loading, from which the engine sizes its pools of blocks and slots."""

    num_blocks: int  # block 0 is the null block, so num_blocks - 1 can be handed out
    block_size: int
    max_model_len: int
    vocab_size: int  # ids below this can be embedded and sampled
    tensor_parallel_size: int
    device: str
    dtype: str
    attention_backend: str
    architecture: str  # e.g. "Qwen2ForCausalLM"
    num_parameters: int  # parameters of the whole model, tied tensors counted once
    weight_bytes_per_rank: int
    kv_bytes_per_token_per_rank: int
    load_seconds: float
    quantization: str = "none"  # description of the weights
    active_parameters: int | None = None  # parameters that one token is computed with; None: all
    input_rounding: str | None = None  # activation quantisation of the matmuls, in a few words; None: there is none
    kv_cache_dtype: str = "auto"  # the dtype, int8 or fp8
    sliding_window: int | None = None  # tokens; longest window if all layers have one: earlier tokens are never read
    kernels: str = ""  # description of the kernels: see `oarlock.workers.kernels.cpu.description`
    batch_invariant: bool = False  # a request's results do not depend on its batch or on the chunks of its prompt
    batch_invariant_reason: str = "it was not tested"  # why not, or the measurement
    rank_invariant: bool = False  # the bits of results do not depend on the number of ranks; tested at the start
    rank_invariant_reason: str = "it was not tested"
    pipeline_parallel_size: int = 1
    step_cost: StepCost | None = None  # None: not measured
    kv_offload: KVOffloadInfo | None = None  # None: no KV blocks are kept outside the pool
    hidden_size: int = 0  # size of the vectors that requests may ask for
    whole_texts: bool = False  # an encoder: a step computes each text whole, and returns vectors, no tokens
    num_labels: int = 0  # labels of its classification head; 0: it has none
    text_part_of: str | None = None  # class of the multimodal model whose text part is served; None: a text model
    served_by: str = "oarlock"  # whose code computes the model: oarlock | transformers | checkpoint
    is_replicated: bool = False  # each of several ranks holds the weights of all layers
    groups: tuple[GroupInfo, ...] = ()  # memory groups, in the order of `table_groups`; (): one group of all blocks
    adapter_slot_bytes: int = 0  # device memory of each slot for a LoRA adapter on a rank

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "WorkerInfo":
        fields = json.loads(text)
        cost, offload = fields.pop("step_cost", None), fields.pop("kv_offload", None)
        groups = tuple(GroupInfo(**group) for group in fields.pop("groups", ()))
        return WorkerInfo(
            **fields,
            step_cost=None if cost is None else StepCost(**cost),
            kv_offload=None if offload is None else KVOffloadInfo(**offload),
            groups=groups,
        )
