"""Weights rounded to 8 or 4 bits as they are loaded: every number of ranks has the same ones, and models stay near."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.preflight import preflight
from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.int8 import Int8Weight
from oarlock.workers.quantization.method import StoredRows, WeightShard
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.runner.model_runner import ModelRunner
from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.tiny_models import make_tiny
from tests.house.rules import ROOT
from tests.unit.workers.kernel_levels import NO_KERNELS
from tests.unit.workers.weights_in_memory import MemoryWeights, placement, random_weights

DEMO = ROOT / "models" / "oarlock-demo"

each_form = pytest.mark.parametrize("form", ["int8", "int4"])
with_kernels = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")


def dequantised(weight: object) -> Tensor:
    """[outputs, inputs] of one rank."""
    if isinstance(weight, Int8Weight):
        return weight.values.double() * weight.scales.double().unsqueeze(1)
    assert isinstance(weight, GroupedWeight)
    return weight.weight.dequantised()


@each_form
@pytest.mark.parametrize("fused", [False, True])
def test_every_number_of_ranks_has_the_same_weights(form: str, fused: bool) -> None:
    inputs = 128  # four groups of int4
    tensors = random_weights({"a.one.weight": (16, inputs), "a.two.weight": (16, inputs), "b.weight": (24, inputs)})
    if fused:
        tensors["a.both.weight"] = torch.cat([tensors.pop("a.one.weight"), tensors.pop("a.two.weight")])
    method, found = QUANTIZATIONS[form].method(), []
    for size in (1, 2, 4):
        columns, rows = [], []
        for rank in range(size):
            local = 16 // size
            parts = tuple(StoredRows(name, 16, rank * local, local) for name in ("a.one", "a.two"))
            weights = MemoryWeights(tensors)
            column = WeightShard(parts, inputs, 0, inputs, fused="a.both")
            row = WeightShard((StoredRows("b", 24, 0, 24),), inputs, rank * inputs // size, inputs // size)
            columns.append(dequantised(method.load(column, weights, placement().empty)).chunk(2))
            rows.append(dequantised(method.load(row, weights, placement().empty)))
        found.append([*(torch.cat([parts[which] for parts in columns]) for which in (0, 1)), torch.cat(rows, 1)])
    for several in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], several, strict=True))


def logits_of(path: Path, tokens: list[int], quantization: str, size: int = 1, *, dequantize: bool = False) -> Tensor:
    """[tokens, vocabulary], computed by `size` ranks."""

    def work(tp: TensorParallel) -> Tensor:
        decoder = load_decoder(path, tp, torch.bfloat16, quantization=quantization, dequantize=dequantize)
        return PagedRun(decoder).step({0: tokens})[0]

    return on_ranks(size, work)[0]


# Weights without structure, in three layers: one that is read wrongly gives above 1.
@pytest.mark.parametrize(("form", "least", "most"), [("int8", 1e-4, 0.1), ("int4", 0.01, 0.6)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_stays_near_its_dense_form(
    tmp_path: Path, form: str, least: float, most: float, tied: bool, size: int
) -> None:
    path = make_tiny(tmp_path, "qwen2", tie_word_embeddings=tied, hidden_size=256, intermediate_size=512)
    dense, ours = (logits_of(path, list(range(3, 40)), quantization, size) for quantization in ("none", form))
    error = (ours - dense).pow(2).mean().sqrt() / dense.pow(2).mean().sqrt()
    assert least < error < most


@each_form
@pytest.mark.slow
def test_written_out_weights_have_the_same_bits_at_every_number_of_ranks(tmp_path: Path, form: str) -> None:
    """They are rounded as without that: only the products differ."""
    path, tokens = make_tiny(tmp_path, "qwen2", hidden_size=256, intermediate_size=512), list(range(3, 40))
    single = logits_of(path, tokens, form, dequantize=True)
    assert all(torch.equal(single, logits_of(path, tokens, form, size, dequantize=True)) for size in (2, 4))
    dense, rounded = logits_of(path, tokens, "none"), logits_of(path, tokens, form)
    error, of_inputs = (x.sub(y).pow(2).mean().sqrt() for x, y in ((single, dense), (single, rounded)))
    assert 0 < of_inputs < 4 * error


@with_kernels
@pytest.mark.slow
def test_the_demo_models_perplexity_stays_near() -> None:
    """docs/accuracy.md has it for a longer text."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokens = tokenizer.encode((DEMO / "questions.jsonl").read_text("utf-8")).ids[:500]

    def loss(quantization: str) -> float:
        logits = logits_of(DEMO, tokens, quantization)
        return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])))

    dense = loss("none")
    assert abs(loss("int8") - dense) < 0.01
    assert abs(loss("int4") - dense) < 0.1


@with_kernels
@each_form
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_server_of_it_is_batch_invariant(tmp_path: Path, form: str, dtype: str) -> None:
    config = WorkerConfig(
        str(make_tiny(tmp_path, "qwen2", head_dim=16)), device="cpu", dtype=dtype, quantization=form,
        max_model_len=128, kv_cache_bytes=1 << 20,
    )  # fmt: skip
    runner = ModelRunner(preflight(config), TensorParallel.solo())
    runner.load(lambda share: None)
    runner.allocate(runner.num_blocks_that_fit())
    assert runner.invariance.batch_invariant, runner.invariance.reason
    assert runner.model.why_not_prepared is None
