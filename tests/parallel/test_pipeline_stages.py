"""Pipeline stages give equal bits in any number, and each stage reads and keeps only its layers.

Ranks are threads, which pass hidden states through queues; `test_pipeline_ranks.py` starts processes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.engine.config import SpeculativeConfig
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import Executor
from oarlock.workers.gguf_config import hf_config
from oarlock.workers.layers.decoder_spec import tensor_shapes
from oarlock.workers.model_files.gguf_model import GGUFModel
from oarlock.workers.runner.memory_needs import MAX_LOGITS_ROWS, rank_weight_bytes
from oarlock.workers.weights.reader import WeightReader
from tests.golden.gguf_writer import q4_k_m, write_gguf
from tests.golden.quantised import CASES as QUANTISED
from tests.golden.quantised import write
from tests.golden.tiny_models import make_tiny
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.test_pipeline_depth import KINDS, LATE_KINDS, POISONED, Alternating, requests_of
from tests.unit.workers.kernel_levels import NO_KERNELS

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")

SHAPE: dict[str, Any] = {
    "vocab_size": 331,
    "head_dim": 32,
    "num_hidden_layers": 5,  # which no number of stages divides
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 17},
    "gemma3_text": {
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "sliding_window": 9,
    },
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 32},
    "phi3": {"hidden_size": 128},
    "qwen3": {},
    "qwen2_moe": {"decoder_sparse_step": 1},
    # Its table of positions ends with the context.
    "gpt2": {
        "hidden_size": 128,
        "head_dim": None,
        "n_inner": 128,
        "num_key_value_heads": None,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    "phi": {"hidden_size": 128},
    "deepseek_v3": {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16},
    # Stages of one layer have no pages, or no states.
    "kimi_linear": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "mlp_layer_types": ["dense", *["sparse"] * 4],
        "layer_types": [
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ],
    },
}
WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": False}  # in whole blocks
STORED = ("gptq-4-64-asym", "integers-channel", "fp8-block", "gguf")  # as other programs round weights
# family or way of storing, dtype, quantisation, KV cache, tensor-parallel size, stages
CASES = [
    ("llama", "bfloat16", "none", "auto", 1, (2, 4)),
    pytest.param("llama", "float32", "none", "auto", 2, (2,), marks=pytest.mark.soak),
    ("qwen2", "float32", "none", "auto", 1, (3,)),
    ("qwen2", "bfloat16", "int8", "int8", 1, (2,)),
    pytest.param("qwen2", "bfloat16", "int8", "int8", 2, (2,), marks=pytest.mark.soak),
    ("mistral", "bfloat16", "none", "auto", 1, (2,)),
    ("gemma3_text", "bfloat16", "int4", "auto", 1, (5,)),
    ("qwen2_moe", "bfloat16", "none", "auto", 1, (2,)),
    ("gpt2", "bfloat16", "none", "auto", 1, (3,)),
    pytest.param("gemma2", "float32", "none", "auto", 1, (3,), marks=pytest.mark.soak),
    pytest.param("phi", "bfloat16", "int8", "auto", 2, (2,), marks=pytest.mark.soak),
    pytest.param("phi3", "bfloat16", "none", "auto", 1, (2,), marks=pytest.mark.soak),
    pytest.param("qwen3", "bfloat16", "none", "auto", 1, (3,), marks=pytest.mark.soak),
    pytest.param("deepseek_v3", "bfloat16", "int8", "int8", 2, (2,), marks=pytest.mark.soak),
    pytest.param("kimi_linear", "bfloat16", "none", "fp8", 1, (2, 5), marks=pytest.mark.soak),
    *(pytest.param(name, "bfloat16", "none", "auto", 1, (2,), marks=pytest.mark.soak) for name in STORED),
]


class Checkpoints(dict[str, Path]):
    """By family, or by the way in which the weights are stored; made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        if name in CHECKPOINTS:
            self[name] = make_tiny(folder, name, **SHAPE | CHECKPOINTS[name])
        elif name == "gguf":
            file = write_gguf(make_tiny(folder, "llama", **WIDE), folder / "model.gguf", q4_k_m)
            (folder / "config.json").write_text(json.dumps(hf_config(GGUFModel.open(file))))
            self[name] = folder
        else:
            self[name] = write(make_tiny(folder, "qwen2", **WIDE), folder, QUANTISED[name]).path
        return self[name]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def config_of(path: Path, dtype: str, quantization: str, cache: str, ranks: int, stages: int) -> WorkerConfig:
    return WorkerConfig(
        str(path),
        device="cpu",
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=cache,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        num_speculative_tokens=0 if "kimi" in path.name else 4,  # states cannot be rolled back
        block_size=16,
        num_kv_blocks=100,
        num_threads=1,
    )


def start(*arguments) -> ThreadExecutor:
    return ThreadExecutor(config_of(*arguments))


def run(
    executor: Executor, kinds: Sequence[dict], num_blocks: int = 100, drafts: SpeculativeConfig | None = None
) -> tuple[dict[int, Answer], DirectEngine]:
    engine = DirectEngine(
        executor, num_blocks=num_blocks, enable_prefix_caching=True, pipeline_depth=None, speculative=drafts
    )
    requests = [
        replace(
            one,
            prompt_token_ids=tuple(token for token in one.prompt_token_ids if token != POISONED),
            params=replace(one.params, max_tokens=one.params.max_tokens + 20),
        )
        for one in requests_of(tuple(kinds), 12)
    ]
    matchers = {request.request_id: Alternating() for request in requests if request.params.grammar is not None}
    return engine.run(requests, arrives_at=lambda number: number // 2, matchers=matchers), engine


@pytest.mark.parametrize(("family", "dtype", "quantization", "cache", "ranks", "sizes"), CASES)
def test_every_answer_has_the_bits_of_one_stage(
    checkpoints: dict[str, Path],
    family: str,
    dtype: str,
    quantization: str,
    cache: str,
    ranks: int,
    sizes: tuple[int, ...],
) -> None:
    """Prompts in chunks, shared beginnings, penalties, biases, grammars and preemptions among them."""
    form = dtype, quantization, cache, ranks
    one = start(checkpoints[family], *form, 1)
    expected, _ = run(one, (*KINDS, *LATE_KINDS), 5)
    assert one.info.batch_invariant
    one.close()
    preemptions = 0
    for stages in sizes:
        staged = start(checkpoints[family], *form, stages)
        got, engine = run(staged, (*KINDS, *LATE_KINDS), 5)
        staged.close()
        preemptions += engine.scheduler.stats.num_preemptions
        assert staged.info.batch_invariant and staged.info.rank_invariant
        assert {number for number in expected if got[number] != expected[number]} == set(), stages
        assert engine.num_ahead > engine.num_steps / 3
    assert preemptions > 0 or family in ("mistral", "gemma2", "gemma3_text")  # windows give blocks back


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe"])
def test_drafts_change_no_bit(checkpoints: dict[str, Path], family: str) -> None:
    """Few ids are allowed, so that lookups find something."""
    kinds = ({}, {"logprobs": 2}, {"temperature": 0.7}, {"frequency_penalty": 0.3})
    kinds = tuple(kind | {"allowed_token_ids": (5, 9, 13)} for kind in kinds)
    form = "bfloat16", "none", "auto", 1
    one, two = start(checkpoints[family], *form, 1), start(checkpoints[family], *form, 2)
    expected, _ = run(one, kinds)
    got, engine = run(two, kinds, drafts=SpeculativeConfig(4, 3, 1))
    assert got == expected
    assert engine.scheduler.stats.num_accepted_draft_tokens > 20


def test_each_stage_holds_its_part(checkpoints: dict[str, Path]) -> None:
    form = "bfloat16", "none", "auto", 1
    whole, staged = start(checkpoints["llama"], *form, 1), start(checkpoints["llama"], *form, 3)
    models, model = [rank.model for rank in staged.ranks], whole.ranks[0].model
    assert [list(part.stage) for part in models] == [[0, 1], [2, 3], [4]]
    assert sum(part.weight_bytes for part in models) == model.weight_bytes
    for part, rank in zip(models, staged.ranks, strict=True):
        needed = rank_weight_bytes(staged.config, rank.spec, rank.description.formats, rank.stage.number)
        assert needed == pytest.approx(part.weight_bytes, rel=0.01)
    assert [len(rank.layer_memory) for rank in staged.ranks] == [2, 2, 1]
    assert staged.info.kv_bytes_per_token_per_rank * 5 == whole.info.kv_bytes_per_token_per_rank * 2
    assert staged.info.weight_bytes_per_rank == max(part.weight_bytes for part in models)
    assert (staged.info.pipeline_parallel_size, staged.info.tensor_parallel_size) == (3, 1)


def test_memory_for_logits_is_kept_by_the_last_stage_alone(checkpoints: dict[str, Path]) -> None:
    staged = start(checkpoints["llama"], "bfloat16", "none", "auto", 1, 3)
    first, middle, last = (rank.memory.step.largest for rank in staged.ranks)
    rows = min(staged.config.max_num_batched_tokens, MAX_LOGITS_ROWS)
    assert first == middle == last - 4 * SHAPE["vocab_size"] * rows


def test_a_tied_head_is_held_by_the_first_and_the_last_stage(checkpoints: dict[str, Path]) -> None:
    staged = start(checkpoints["qwen2"], "bfloat16", "none", "auto", 1, 3)
    first, middle, last = (rank.model for rank in staged.ranks)
    assert first.weight_bytes - middle.weight_bytes == first.embedding.weight_bytes
    assert last.weight_bytes > middle.weight_bytes / 2 + last.head.weight_bytes
    assert [len(part.layers) for part in (first, middle, last)] == [2, 2, 1]


class Reads(WeightReader):
    """Notes the names that it reads, by thread."""

    names: ClassVar[dict[int, set[str]]] = {}

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        self.names.setdefault(get_ident(), set()).add(name)
        super().take(name, into, shape=shape, dim=dim, start=start)


def test_a_stage_reads_no_tensor_of_another(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reads, "names", {})
    monkeypatch.setattr("oarlock.workers.weights.gguf_reader.WeightReader", Reads)
    staged = start(checkpoints["qwen2"], "float32", "none", "auto", 1, 3)
    spec = staged.ranks[0].spec
    read = sorted(map(sorted, Reads.names.values()))
    assert read == sorted(sorted(tensor_shapes(spec, rank.description.layers)) for rank in staged.ranks)
    assert sum(map(len, read)) == len(tensor_shapes(spec)) + 1  # the embedding twice


def test_a_tensor_that_no_stage_knows_is_refused(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "llama", **SHAPE)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.self_attn.unknown.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(StartupError, match="unknown"):
        start(path, "float32", "none", "auto", 1, 2)


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> Callable[[str], dict[int, Answer]]:
    """Answers of one stage by family."""
    return cache(lambda family: run(start(checkpoints[family], "bfloat16", "none", "auto", 1, 1), KINDS)[0])


@pytest.mark.parametrize(
    ("family", "ranks", "stage"),
    [
        *(("qwen2", 1, stage) for stage in range(3)),
        pytest.param("qwen2", 2, 1, marks=pytest.mark.soak),
        *(pytest.param("kimi_linear", 1, stage, marks=pytest.mark.soak) for stage in (1, 2)),
    ],
)
def test_steps_refused_by_one_stage_are_refused_by_all_and_tokens_stay_the_same(
    checkpoints: dict[str, Path],
    expected: Callable[[str], dict[int, Answer]],
    family: str,
    ranks: int,
    stage: int,
) -> None:
    """Every fifth step has no memory in one stage; the others run it or not, and forget it, also in the states that
    they have written."""
    staged = start(checkpoints[family], "bfloat16", "none", "auto", ranks, 3)
    staged.refuse(lambda number, step: number == stage and step.step_id % 5 == 3)
    got, engine = run(staged, KINDS)
    of_one = expected(family)
    assert {number for number in of_one if got[number] != of_one[number]} == set()
    assert engine.num_refused > 10
