"""Memory that `oarlock plan` predicts, beside the memory that ranks account for once they have loaded."""

from pathlib import Path
from typing import Any

import pytest

from oarlock.workers.capacity import Memory, capacity
from oarlock.workers.config import WorkerConfig
from oarlock.workers.preflight import open_model
from tests.golden.tiny_models import FAMILIES, make_tiny
from tests.parallel.rank_threads import ThreadExecutor

LIMIT = 0.03
MEMORY = Memory("cpu", 64 << 30)


def within(planned: float, real: float) -> bool:
    return abs(planned - real) <= LIMIT * real


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {"tensor_parallel_size": 2}) for family in FAMILIES),
        ("qwen2", {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen2", {"tensor_parallel_size": 8}),  # more ranks than KV heads
        ("gemma3_text", {"pipeline_parallel_size": 3}),  # the stages have layers of one group each
        ("llama", {"pipeline_parallel_size": 2, "kv_cache_dtype": "int8"}),
        ("qwen3", {"pipeline_parallel_size": 3, "kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
    ],
)
def test_ranks_match_the_plan(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = str(make_tiny(tmp_path, family))
    config = WorkerConfig(model, **{"device": "cpu", "dtype": "float32", "max_model_len": 256, **changes})
    config = config.with_(num_threads=1, kv_cache_bytes=4 << 20, block_size=16)
    plan, real = capacity(open_model(config), {}, MEMORY), ThreadExecutor(config)
    weights = [rank.model.weight_bytes for rank in real.ranks]
    assert within(max(plan.weight_bytes), max(weights)), "weights of the rank with the most"
    assert within(sum(plan.weight_bytes) * config.tensor_parallel_size, sum(weights)), "weights of all ranks"
    assert plan.num_blocks == real.info.num_blocks
    assert plan.counts == tuple(group.num_blocks for group in real.info.groups)
    taken = [
        sum(pages.nbytes for one in rank.layer_memory if one.kv for pages in (one.kv.k, one.kv.v))
        for rank in real.ranks
    ]
    assert plan.config.pipeline_parallel_size > 1 or within(plan.kv_bytes, max(taken)), "keys and values of a rank"
    assert plan.groups.bytes_per_token == max(rank.memory.groups.bytes_per_token for rank in real.ranks)
    assert plan.step_bytes == max(rank.memory.step.largest for rank in real.ranks)
