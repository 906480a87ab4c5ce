"""Memory that `oarlock plan` predicts, beside the memory that ranks account for once they have loaded."""

from pathlib import Path
from typing import Any

import pytest

from oarlock.workers.attention.backend import LayerMemory
from oarlock.workers.capacity import Memory, capacity, work_of
from oarlock.workers.config import WorkerConfig
from oarlock.workers.preflight import open_model
from oarlock.workers.runner.model_runner import ModelRunner
from tests.golden.class_models import make_class
from tests.golden.tiny_models import FAMILIES, RECURRENT, make_tiny
from tests.parallel.class_ranks import ClassRunner, look_in_this_process
from tests.parallel.rank_threads import ThreadExecutor

LIMIT = 0.02  # weights are exact; the torch backend keeps one page of each layer in addition to the blocks
MEMORY = Memory("cpu", 64 << 30)
COMMON = {"device": "cpu", "dtype": "float32", "max_model_len": 256}


def within(planned: float, real: float, limit: float = LIMIT) -> bool:
    return abs(planned - real) <= limit * real


def bytes_of(memory: list[LayerMemory]) -> int:
    """The bytes of keys, values and recurrent states. Layers may share pages."""
    pages = [tensor for one in memory if one.kv is not None for tensor in (one.kv.k, one.kv.v)]
    states = [part for one in memory if one.states is not None for part in one.states.parts]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in pages + states}.values())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {"tensor_parallel_size": 2}) for family in FAMILIES + RECURRENT),
        ("qwen2", {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen2", {"tensor_parallel_size": 8}),  # more ranks than KV heads
        ("gemma3_text", {"pipeline_parallel_size": 3}),  # the stages have layers of one group each
        ("gemma4_text", {"tensor_parallel_size": 2}),
        ("mimo_v2_flash", {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}),  # keys are wider than values
        ("deepseek_v3", {"tensor_parallel_size": 2, "dtype": "bfloat16", "kv_cache_dtype": "int8", "max_loras": 2}),
        ("glm4_moe_lite", {"pipeline_parallel_size": 3, "quantization": "int8"}),
        ("qwen3_5_text", {"pipeline_parallel_size": 3, "dtype": "bfloat16"}),
        pytest.param(
            *("bailing_hybrid", {"pipeline_parallel_size": 3, "dtype": "bfloat16", "quantization": "int8"}),
            marks=pytest.mark.soak,
        ),
        ("nemotron_h", {"pipeline_parallel_size": 4}),  # the second and the last have no memory
        ("falcon_h1", {"tensor_parallel_size": 4, "dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("llama", {"pipeline_parallel_size": 2, "kv_cache_dtype": "int8"}),
        ("qwen2_moe", {"tensor_parallel_size": 2, "max_loras": 3, "dtype": "bfloat16", "quantization": "int8"}),
        ("qwen3", {"pipeline_parallel_size": 3, "kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
    ],
)
def test_ranks_match_the_plan(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    check(WorkerConfig(str(make_tiny(tmp_path, family)), **{**COMMON, **changes}))


@pytest.mark.parametrize("changes", [{}, {"quantization": "int8", "dtype": "bfloat16"}], ids=["float32", "int8"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model_type", ["nanochat", "deepseek_v3", "kimi_linear", "persimmon"])
def test_ranks_of_a_class_without_a_page_match_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, size: int, changes: dict[str, Any]
) -> None:
    """Dense, a mixture, recurrent, and one that every rank holds whole."""
    look_in_this_process(monkeypatch)
    model = str(make_class(tmp_path, model_type))
    changes = {**changes, "max_num_batched_tokens": 64, "model_impl": "transformers"}
    config = WorkerConfig(model, tensor_parallel_size=size, **{**COMMON, **changes})
    check(config, make=ClassRunner, limit=0.0)


def check(config: WorkerConfig, make: type[ModelRunner] = ModelRunner, limit: float = LIMIT) -> None:
    """Compare the plan for `config` with its ranks. Weights may differ by `limit`."""
    config = config.with_(num_threads=1, kv_cache_bytes=4 << 20, block_size=16)
    plan, real = capacity(open_model(config), {}, MEMORY), ThreadExecutor(config, make)
    weights = [rank.model.weight_bytes for rank in real.ranks]
    assert within(max(plan.weight_bytes), max(weights), limit), "weights of the rank with the most"
    assert within(sum(plan.weight_bytes) * config.tensor_parallel_size, sum(weights), limit), "weights of all ranks"
    slots = [0 if rank.adapters is None else rank.adapters.slots.num_bytes for rank in real.ranks]
    assert plan.config.adapter_bytes == real.config.adapter_bytes == max(slots), "slots for adapters"
    assert plan.num_blocks == real.info.num_blocks
    assert plan.counts == tuple(group.num_blocks for group in real.info.groups)
    assert plan.config.max_num_seqs == real.config.max_num_seqs
    assert within(plan.kv_bytes, max(bytes_of(rank.layer_memory) for rank in real.ranks)), "memory of sequences"
    assert plan.groups.bytes_per_token == max(rank.memory.groups.bytes_per_token for rank in real.ranks)
    slots = [
        sum(part[0].nbytes for one in rank.layer_memory if one.states for part in one.states.parts)
        for rank in real.ranks[:: config.tensor_parallel_size]
    ]
    assert [work.state_bytes for work in work_of(open_model(config), plan.config)] == slots
    assert plan.step_bytes == max(rank.memory.step.largest for rank in real.ranks)


def test_the_length_that_fits_is_of_all_stages(tmp_path: Path) -> None:
    """The first stage has only windows, and less room for each of their layers than the last for its others."""
    layers = {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2}
    model = str(make_tiny(tmp_path, "gemma3_text", sliding_window=200, **layers))
    config = WorkerConfig(model, device="cpu", dtype="float32", max_model_len=512, block_size=16, num_threads=1)
    config = config.with_(pipeline_parallel_size=2, kv_cache_bytes=400 << 10, fit_model_len=True)
    plan, real = capacity(open_model(config), {}, MEMORY), ThreadExecutor(config)
    first, last = real.info.groups
    assert plan.counts == (first.num_blocks, last.num_blocks) and first.num_blocks < last.num_blocks
    assert plan.config.max_model_len == real.info.max_model_len == 144
