"""Weights rounded to 4 bits at load: how they are rounded, and every number of ranks has the same ones."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.tiny_models import make_tiny
from tests.house.rules import ROOT
from tests.unit.workers.kernel_levels import NO_KERNELS
from tests.unit.workers.weights_in_memory import MemoryWeights, place, random_weights
from workers.config import WorkerConfig
from workers.distributed.parallel_state import TensorParallel
from workers.layers.quantization.grouped import GroupedWeight
from workers.layers.quantization.int4 import GROUP, dequantised, round_groups, rounded
from workers.layers.quantization.registry import QUANTIZATIONS
from workers.layers.quantization.shard import StoredRows, WeightShard
from workers.preflight import preflight
from workers.worker.model_runner import ModelRunner

DEMO = ROOT / "models" / "oarlock-demo"


def test_rounding_is_to_the_nearest_of_16_numbers() -> None:
    """The largest of a group is -8; where another has nearly its size and the other sign, that is 7 in place of 8."""
    torch.manual_seed(0)
    x = torch.randn(50, 300) * torch.logspace(-20, 20, 50).unsqueeze(1)
    x[7] = 0
    values, scales = round_groups(x)
    assert values.min() == -8 and values.max() == 7 and scales.shape == (50, 10)
    assert not values[7].any() and not scales[7].any()
    scale = scales.double().repeat_interleave(GROUP, 1)[:, :300]
    error = (values.double() * scale - x.double()).abs() / scale.abs().clamp(min=1e-300)
    assert (error <= torch.where(values == 7, 1.05, 0.55)).all()  # a scale has 8 bits: 8 steps of it err by 0.03


def test_a_product_keeps_what_was_rounded() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 100) * torch.logspace(-3, 3, 300).unsqueeze(1)
    assert torch.equal(rounded(weight).weight.dequantised(), dequantised(*round_groups(weight)))


def test_groups_are_as_the_registry_counts_them() -> None:
    assert QUANTIZATIONS["int4"].group == GROUP
    assert QUANTIZATIONS["int4"].weight_bytes(10, 64, 2) == 10 * (2 * (16 + 2) + 4)
    assert QUANTIZATIONS["int4"].weight_bytes(10, 65, 2) == 10 * (3 * (16 + 2) + 4)


def whole_weight(shards: list[GroupedWeight], dim: int) -> Tensor:
    """Of all ranks, dequantised."""
    return torch.cat([shard.weight.dequantised() for shard in shards], dim)


@pytest.mark.parametrize("fused", [False, True])
def test_every_number_of_ranks_has_the_same_weights(fused: bool) -> None:
    tensors = random_weights({"a.one.weight": (16, 128), "a.two.weight": (16, 128), "b.weight": (24, 128)})
    if fused:
        tensors["a.both.weight"] = torch.cat([tensors.pop("a.one.weight"), tensors.pop("a.two.weight")])
    method = QUANTIZATIONS["int4"].method()
    for size in (1, 2, 4):
        columns, rows = [], []
        for rank in range(size):
            local = 16 // size
            parts = tuple(StoredRows(name, 16, rank * local, local) for name in ("a.one", "a.two"))
            weights = MemoryWeights(tensors)
            column = WeightShard(parts, 128, 0, 128, fused="a.both")
            row = WeightShard((StoredRows("b", 24, 0, 24),), 128, rank * 128 // size, 128 // size)
            columns.append(method.load(column, weights, place().empty))
            rows.append(method.load(row, weights, place().empty))
            assert isinstance(columns[-1], GroupedWeight) and isinstance(rows[-1], GroupedWeight)
        stacked = [whole_weight([shard], 0).chunk(2) for shard in columns]
        found = [torch.cat([part[which] for part in stacked]) for which in (0, 1)]
        found.append(whole_weight(rows, 1))
        if size == 1:
            single = found
        assert all(torch.equal(one, other) for one, other in zip(single, found, strict=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_stays_near_its_dense_form(tmp_path: Path, tied: bool, size: int) -> None:
    path = make_tiny(tmp_path, "qwen2", tie_word_embeddings=tied, hidden_size=256, intermediate_size=512)
    tokens = list(range(3, 40))

    def logits(quantization: str) -> Tensor:
        def work(tp: TensorParallel) -> Tensor:
            return PagedRun(load_decoder(path, tp, torch.bfloat16, quantization=quantization)).step({0: tokens})[0]

        return on_ranks(size, work)[0]

    dense, ours = logits("none"), logits("int4")
    error = (ours - dense).pow(2).mean().sqrt() / dense.pow(2).mean().sqrt()
    assert 0.01 < error < 0.6  # weights without structure, in three layers: a weight read wrongly gives above 1


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
def test_the_demo_models_perplexity_stays_near() -> None:
    """docs/accuracy.md has it for a longer text."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokens = tokenizer.encode((DEMO / "questions.jsonl").read_text("utf-8")).ids[:1000]

    def loss(quantization: str) -> float:
        def work(tp: TensorParallel) -> Tensor:
            return PagedRun(load_decoder(DEMO, tp, torch.bfloat16, quantization=quantization)).step({0: tokens})[0]

        return float(torch.nn.functional.cross_entropy(on_ranks(1, work)[0][:-1], torch.tensor(tokens[1:])))

    assert abs(loss("int4") - loss("none")) < 0.1


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_server_of_it_is_batch_invariant(tmp_path: Path, dtype: str) -> None:
    path = make_tiny(tmp_path, "qwen2", head_dim=16)
    config = WorkerConfig(
        str(path), device="cpu", dtype=dtype, quantization="int4", max_model_len=128, kv_cache_bytes=1 << 20
    )
    runner = ModelRunner(preflight(config), TensorParallel.solo())
    runner.load(lambda share: None)
    runner.allocate(runner.num_blocks_that_fit())
    assert runner.invariance.batch_invariant, runner.invariance.reason
    assert runner.model.why_not_prepared is None
