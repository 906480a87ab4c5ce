"""The learned table of positions and the bias of the output head: values, bits on several ranks, stages and memory."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import (
    BranchSpec,
    DecoderSpec,
    LayerSpec,
    PositionTable,
    is_in_stage,
    matrices_of,
    tensor_shapes,
)
from oarlock.workers.layers.embedding import PositionEmbedding, VocabParallelEmbedding, VocabParallelHead
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.runner.memory_needs import rank_weight_bytes
from oarlock.workers.weights.source import DummyWeights
from tests.golden.paged_run import PagedRun, on_ranks
from tests.unit.workers.weights_in_memory import MemoryWeights, RecordingRank, placement, random_weights

VOCAB, HIDDEN, LENGTH, FIRST = 53, 128, 40, 2
LAYER = LayerSpec(
    (
        BranchSpec(SelfAttentionSpec(4, 4, 32, 0.25, None), "a"),
        BranchSpec(GatedMLPSpec(128), "b"),
    )
)
SPEC = DecoderSpec(
    "Tiny", VOCAB, HIDDEN, (LAYER, LAYER), NormSpec("layer", 1e-5, bias=True), LENGTH, LENGTH,
    positions=PositionTable(LENGTH + FIRST, FIRST), head_bias=True,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_row_of_a_position_is_added_in_the_dtype_of_the_weights(dtype: torch.dtype) -> None:
    tensors = random_weights({"p.weight": (LENGTH + FIRST, HIDDEN), "e.weight": (VOCAB, HIDDEN)})
    table, positions = tensors["p.weight"].to(dtype), torch.tensor([0, 5, LENGTH - 1, 5])
    layer = PositionEmbedding("p", PositionTable(LENGTH + FIRST, FIRST), HIDDEN, placement(0, 1, dtype))
    weights = MemoryWeights({"p.weight": table})
    layer.load(weights)
    weights.finish(lambda name: False)
    embedded = tensors["e.weight"][:4].to(dtype)
    assert torch.equal(layer(embedded.clone(), positions), embedded + table[positions + FIRST])
    assert layer.weight_bytes == (LENGTH + FIRST) * HIDDEN * dtype.itemsize


@pytest.mark.parametrize("vocab", [61, 9, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_adds_its_part_of_the_bias(vocab: int, size: int, tied: bool) -> None:
    tensors = random_weights({"e.weight": (vocab, HIDDEN), "e.bias": (vocab,)})
    hidden, joined = torch.randn(3, HIDDEN), []
    for rank in range(size):
        where, weights = placement(rank, size), MemoryWeights(tensors)
        head = VocabParallelHead("e", vocab, HIDDEN, where, scale=0.5, has_bias=True)
        if tied:
            embedding = VocabParallelEmbedding("e", vocab, HIDDEN, where)
            embedding.load(weights)
            head.tie(embedding)
            head.load_bias(weights)
        else:
            head.load(weights)
        weights.finish(lambda name: False)
        joined.append(head(hidden))
        assert torch.isneginf(joined[-1][:, head.real :]).all()
    wanted = 0.5 * (hidden @ tensors["e.weight"].T + tensors["e.bias"])
    torch.testing.assert_close(torch.cat(joined, 1)[:, :vocab], wanted)


def run(tp: TensorParallel, dtype: torch.dtype, quantization: str, *, tied: bool) -> Tensor:
    """Logits of two sequences in several steps, of which one reaches the last position."""
    spec, formats = replace(SPEC, tie_word_embeddings=tied), QUANTIZATIONS[quantization]
    decoder = Decoder(spec, tp, dtype, torch.device("cpu"), formats)
    weights = {name: 0.3 * tensor for name, tensor in random_weights(tensor_shapes(spec)).items()}
    decoder.load(MemoryWeights(weights), lambda share: None)
    name = str(dtype).removeprefix("torch.")
    config = WorkerConfig("x", device="cpu", dtype=name, tensor_parallel_size=tp.size)
    assert decoder.weight_bytes == rank_weight_bytes(config, spec, formats)
    steps = PagedRun(decoder)
    works = {0: list(range(3, 22)), 1: [5]}, {0: list(range(LENGTH - 19)), 1: [8, 9, 10]}
    return torch.cat([rows for work in works for rows in steps.step(work).values()])


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_are_the_same_on_any_number_of_ranks(dtype: torch.dtype, quantization: str) -> None:
    tied = quantization == "none"
    (alone,) = on_ranks(1, lambda tp: run(tp, dtype, quantization, tied=tied))
    assert alone.isfinite().all() and len(alone.unique()) > 100
    for size in (2, 4):
        for found in on_ranks(size, lambda tp: run(tp, dtype, quantization, tied=tied)):
            assert torch.equal(found, alone)


def test_random_weights_have_a_table_and_a_bias() -> None:
    """As `--load-format dummy` draws them, in every rank's part of the same model."""
    parts = []
    for rank in range(2):
        decoder = Decoder(SPEC, RecordingRank(rank, 2), torch.float32, torch.device("cpu"))
        decoder.load(DummyWeights(0), lambda share: None)
        assert decoder.positions is not None and decoder.head.bias is not None
        parts.append((decoder.positions.weight, decoder.head.bias[: decoder.head.real]))
    (first, bias), (second, more) = parts
    assert torch.equal(first, second) and len(first.unique()) > LENGTH
    assert len(torch.cat((bias, more)).unique()) == VOCAB


def test_the_table_is_on_the_first_stage_and_the_bias_on_the_last() -> None:
    first, last = range(1), range(1, 2)
    where = {"model.embed_positions.weight": (True, False), "lm_head.bias": (False, True)}
    for name, stages in where.items():
        assert tuple(is_in_stage(SPEC, name, stage) for stage in (first, last)) == stages
        assert tuple(name in tensor_shapes(SPEC, stage) for stage in (first, last)) == stages
    assert "model.embed_positions" not in matrices_of(SPEC)  # looked up, and so never quantised


def test_a_stage_without_the_embedding_has_no_table() -> None:
    for stage, has_table in ((range(1), True), (range(1, 2), False)):
        decoder = Decoder(SPEC, TensorParallel.solo(), torch.float32, torch.device("cpu"), stage=stage)
        assert (decoder.positions is not None) == has_table
        weights = MemoryWeights(random_weights(tensor_shapes(SPEC, stage)))
        decoder.load(weights, lambda share: None)
