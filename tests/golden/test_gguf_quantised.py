"""GGUF models whose weights are multiplied as they are stored, at several numbers of ranks.

Three judges: each rank's weights against the whole tensors, dequantised by other code; the logits against a float64
model of these tensors; and the same bits at every number of ranks.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.gguf_config import hf_config, open_checkpoint
from oarlock.workers.layers.decoder_spec import FUSED_MODULES
from oarlock.workers.layers.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_shard
from oarlock.workers.model_files.gguf_model import GGUFCheckpoint, GGUFModel
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.registry import read_spec
from oarlock.workers.quantization.formats.checkpoint_formats import GGUFFormats
from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.groups import packed_bytes
from oarlock.workers.quantization.method import DenseWeight, StackedWeight, WeightShard
from oarlock.workers.runner.memory_needs import rank_weight_bytes, weight_bytes
from oarlock.workers.verify.dequantise import dequantised_gguf
from oarlock.workers.weights.gguf_reader import GGUFReader, Groups, weight_source
from tests.golden.device_products import INTERPRETED, use_device_products
from tests.golden.exact_reference import ExactReference
from tests.golden.gguf_writer import KindOf, all_of, q4_k_m, write_gguf
from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.quantised_errors import GPT_OSS
from tests.golden.test_gguf_golden import stored
from tests.golden.tiny_models import make_tiny

pytestmark = pytest.mark.slow

TOKENS = list(range(3, 43))
SIZES = (1, 2, 4)
_WIDE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
_HALF_BLOCK = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
CASES: dict[str, tuple[str, dict[str, Any], KindOf]] = {
    "llama-mix": ("llama", _WIDE | {"vocab_size": 317}, q4_k_m),
    "qwen2-mix-tied": ("qwen2", _WIDE | {"tie_word_embeddings": True}, q4_k_m),
    "qwen2-mix-fallback": ("qwen2", _WIDE | {"hidden_size": 192}, q4_k_m),  # rows that are no blocks of 256
    "gemma2-mix": ("gemma2", _WIDE | {"head_dim": 32, "query_pre_attn_scalar": 32}, q4_k_m),
    "phi3-q4_k": ("phi3", _WIDE, all_of("Q4_K")),
    "qwen3-q6_k": ("qwen3", _WIDE | {"head_dim": 32}, all_of("Q6_K")),
    "llama-q8_0-half-blocks": ("llama", _HALF_BLOCK, all_of("Q8_0")),  # borders of slices in the middle of blocks
    "qwen2-q4_0-odd-borders": ("qwen2", _HALF_BLOCK | {"intermediate_size": 288}, all_of("Q4_0")),  # within 16 inputs
    # Widths of experts that are filled up to whole slices. Every token has all: none is chosen by a rounding.
    "qwen3-moe-q8_0": ("qwen3_moe", {"hidden_size": 128, "num_hidden_layers": 2, "moe_intermediate_size": 96,
                                     "num_experts": 3, "num_experts_per_tok": 3},
                       lambda name, shape: "F32" if len(shape) == 1 or "gate_inp" in name else "Q8_0"),
    "gpt-oss-mxfp4": ("gpt_oss", {"hidden_size": 128, "num_hidden_layers": 2, "swiglu_limit": 7.0, **GPT_OSS},
                      lambda name, shape: "MXFP4" if len(shape) == 3 else "F32"),
    "qwen2-q5_1-and-f16": ("qwen2", _WIDE, lambda name, shape: "F32" if len(shape) == 1 else
                           "F16" if "attn_k" in name or "ffn_down" in name else "Q5_1"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_of(case)`: a directory of config.json and a GGUF file; `meaning/` in it has its numbers as they are."""

    @cache
    def make(name: str) -> Path:
        family, special, kind_of = CASES[name]
        folder = tmp_path_factory.mktemp("gguf")
        dense = make_tiny(folder, family, seed=3, **special)
        path = write_gguf(dense, folder / "model.gguf", kind_of)
        (folder / "config.json").write_text(json.dumps(hf_config(GGUFModel.open(path))))
        (folder / "meaning").mkdir()
        meaning = {tensor: _meaning(path, tensor, len(shape)).float() for tensor, shape in _shapes(dense).items()}
        save_file(meaning, folder / "meaning" / "model.safetensors", {"format": "pt"})
        (folder / "meaning" / "config.json").write_text((dense / "config.json").read_text())
        return folder

    return make


def _shapes(dense: Path) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in stored(dense).items()}


def _meaning(path: Path, name: str, dimensions: int) -> Tensor:
    """A tensor of the dense checkpoint, in float64: of gpt-oss those of all experts are one, transposed, in which
    rows of gate and of up take turns."""
    module, _, part = name.rpartition(".experts.")
    if not module or not part.startswith(("gate_up", "down")):
        return dequantised_gguf(path, name)
    kind, parts = "bias" if dimensions == 2 else "weight", ("gate", "up") if part.startswith("gate_up") else ("down",)
    experts = range(GPT_OSS["num_local_experts"])
    of_parts = [
        torch.stack([dequantised_gguf(path, f"{module}.experts.{e}.{one}_proj.{kind}") for e in experts])
        for one in parts
    ]
    rows = torch.stack(of_parts, 2).flatten(1, 2)  # [E, N, K], or [E, N]
    return rows if dimensions == 2 else rows.transpose(1, 2).contiguous()


def decoder_of(folder: Path, tp: TensorParallel) -> Decoder:
    """Decoder of the model, without weights."""
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, GGUFCheckpoint)
    return Decoder(
        read_spec(str(folder)), tp, torch.float32, torch.device("cpu"), GGUFFormats(checkpoint, FUSED_MODULES)
    )


def shards(decoder: Decoder) -> list[WeightShard]:
    """Weight shards of all products and of the embedding."""
    words = [decoder.embedding] if decoder.spec.tie_word_embeddings else [decoder.embedding, decoder.head]
    parts = [part for block in decoder.layers for part in block.parts]
    return [
        *(vocab_shard(part) for part in words if isinstance(part, VocabParallelEmbedding | VocabParallelHead)),
        *(part.weight_shard for part in parts if hasattr(part, "weight_shard")),
    ]


def rows_of(weight: object) -> Tensor:
    """float32 [N, K], before a product packs it."""
    if isinstance(weight, GroupedWeight):
        return weight.weight.dequantised()
    assert isinstance(weight, DenseWeight)
    return weight.tensor


def differing(folder: Path, size: int) -> list[str]:
    """Names of weights that differ on some rank from the file's by more than the rounding of scales to float16."""
    found = []

    def check(tp: TensorParallel) -> None:
        decoder = decoder_of(folder, tp)
        checkpoint = open_checkpoint(folder)
        assert isinstance(checkpoint, GGUFCheckpoint)
        with GGUFReader(checkpoint) as reader:
            for shard in shards(decoder):
                weight = rows_of(decoder.placement.load(shard, reader))
                columns = slice(shard.first_input, shard.first_input + shard.local_inputs)
                want = torch.cat([_wanted(folder, shard, part.name)[:, columns] for part in _parts(shard)])
                error = (weight[: len(want)] - want).abs()
                if (error > 2**-10 * want.abs().max()).any() or weight[len(want) :].any():
                    found.append(f"{shard.parts[0].name} on rank {tp.rank}")

    on_ranks(size, check)
    return found


def _parts(shard: WeightShard) -> list[Any]:
    return [part for part in shard.parts if part.count]


def _wanted(folder: Path, shard: WeightShard, name: str) -> Tensor:
    """A part's rows of the whole tensor, which may be in a fused one."""
    meaning = ExactMeaning.of(folder)
    part = next(part for part in shard.parts if part.name == name)
    if f"{name}.weight" in meaning:
        return meaning[f"{name}.weight"][part.first : part.first + part.count]
    above = 0
    for other in shard.parts:
        if other.name == name:
            break
        above += other.rows
    return meaning[f"{shard.fused}.weight"][above + part.first : above + part.first + part.count]


class ExactMeaning:
    """The tensors of the dense checkpoint beside a model."""

    @staticmethod
    @cache
    def of(folder: Path) -> dict[str, Tensor]:
        return stored(folder / "meaning")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_every_rank_are_what_the_file_says(
    model_of: Callable[[str], Path], name: str, size: int
) -> None:
    assert differing(model_of(name), size) == []


FAULTS = ("scales of the next group", "no offsets", "rows of the next head")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reader_with_a_fault_is_noticed(
    model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    take = GGUFReader.take_groups

    def faulty(self: GGUFReader, name: str, into: Groups, **where: Any) -> None:
        take(self, name, into, **where)
        if fault == "scales of the next group":
            into.scales.copy_(into.scales.roll(1, 1))
        elif fault == "no offsets" and into.offsets is not None:
            into.offsets.zero_()
        elif fault == "rows of the next head":
            into.values.copy_(into.values.roll(8, 0))

    monkeypatch.setattr(GGUFReader, "take_groups", faulty)
    assert len(differing(model_of("llama-mix"), 2)) > 10


def logits(folder: Path, size: int, *, dequantize: bool = False) -> Tensor:
    """float32 [n, vocab] after each of `TOKENS`."""

    def run(tp: TensorParallel) -> Tensor:
        decoder = load_decoder(folder, tp, quantization="gguf", dequantize=dequantize)
        return PagedRun(decoder).step({0: TOKENS})[0]

    ranks = on_ranks(size, run)
    assert all(torch.equal(ranks[0], other) for other in ranks[1:]), "ranks disagree"
    return ranks[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_match_the_files_numbers_at_every_number_of_ranks(model_of: Callable[[str], Path], name: str) -> None:
    """Products round their inputs to 8 bits, a hundredth of the largest at most: that is the distance allowed."""
    folder = model_of(name)
    truth, _ = ExactReference(folder / "meaning", TOKENS).logits
    ours = logits(folder, 1)
    distance = (ours.double() - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt()
    assert distance < 0.05, f"{distance:.3f}"
    for size in SIZES[1:]:
        assert torch.equal(logits(folder, size), ours), f"other bits with {size} ranks"


def test_written_out_weights_are_multiplied_exactly(model_of: Callable[[str], Path]) -> None:
    """Embedding, head and products of parts of several types."""
    folder = model_of("llama-mix")
    truth, _ = ExactReference(folder / "meaning", TOKENS).logits
    ours = logits(folder, 1, dequantize=True)
    assert (ours.double() - truth).pow(2).mean().sqrt() < 1e-5 * truth.pow(2).mean().sqrt()
    for size in SIZES[1:]:
        assert torch.equal(logits(folder, size, dequantize=True), ours), f"other bits with {size} ranks"


@INTERPRETED
@pytest.mark.parametrize(
    ("name", "size"),
    [("qwen2-mix-tied", 1)] + [pytest.param(name, size, marks=pytest.mark.soak) for name in CASES for size in SIZES],
)
def test_logits_match_the_files_numbers_on_devices(
    model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    """There inputs are not rounded: what differs is the rounding of scales to float16."""
    folder = model_of(name)
    truth, _ = ExactReference(folder / "meaning", TOKENS).logits
    use_device_products(monkeypatch)
    distance = (logits(folder, size).double() - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt()
    assert distance < 2e-3, f"{distance:.5f}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["llama-q8_0-half-blocks", "qwen2-q4_0-odd-borders", "qwen2-q5_1-and-f16"])
def test_memory_is_counted_as_weights_are_kept(model_of: Callable[[str], Path], name: str, size: int) -> None:
    """The count includes weights that are dequantised because a rank's border lies within the inputs of a scale."""
    folder = model_of(name)
    kept = []

    def count(tp: TensorParallel) -> None:
        decoder, checkpoint, total = decoder_of(folder, tp), open_checkpoint(folder), 0
        with weight_source(checkpoint, check_finite=True, on_read=lambda: None) as weights:
            for shard in shards(decoder):
                loaded = decoder.placement.load(shard, weights)
                parts = loaded.parts if isinstance(loaded, StackedWeight) else [loaded]
                found = sum(bytes_of(part) for part in parts)
                assert decoder.placement.weight_bytes(shard, bias=False) == found, shard.parts[0].name
                total += found
        kept.append((decoder.weight_bytes, total))

    on_ranks(size, count)
    config = WorkerConfig(str(folder), device="cpu", dtype="float32", tensor_parallel_size=size)
    decoder = decoder_of(folder, TensorParallel.solo())
    formats = decoder.placement.quantization
    assert all(counted == rank_weight_bytes(config, decoder.spec, formats) > total for counted, total in kept)
    if size == 1:
        assert kept[0][0] == weight_bytes(decoder.spec, "float32", formats)


def bytes_of(weight: object) -> int:
    if isinstance(weight, DenseWeight):
        return weight.tensor.nbytes
    assert isinstance(weight, GroupedWeight)
    rows, inputs = weight.weight.values.shape
    return packed_bytes(rows, inputs, weight.bits, weight.weight.group, offsets=weight.weight.zeros is not None)


def test_a_wrong_scale_shows_in_the_logits(model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    take = GGUFReader.take_groups

    def faulty(self: GGUFReader, name: str, into: Groups, **where: Any) -> None:
        take(self, name, into, **where)
        into.scales.copy_(into.scales.roll(1, 1))

    monkeypatch.setattr(GGUFReader, "take_groups", faulty)
    with pytest.raises(AssertionError, match=r"^\d\.\d+"):
        test_logits_match_the_files_numbers_at_every_number_of_ranks(model_of, "llama-mix")


def test_weights_that_make_one_product_have_one_form(model_of: Callable[[str], Path]) -> None:
    """In the mix v has more bits than q and k, so that all three are kept in groups of 16 and 8 bits."""
    checkpoint = open_checkpoint(model_of("llama-mix"))
    assert isinstance(checkpoint, GGUFCheckpoint)
    formats = GGUFFormats(checkpoint, FUSED_MODULES)
    q, k, v = (formats.format_of(f"model.layers.0.self_attn.{part}_proj") for part in "qkv")
    assert q == k == v and getattr(q, "bits", None) == 8
    other = formats.format_of("model.layers.1.self_attn.q_proj")
    assert getattr(other, "bits", None) == 4 and replace(other, bits=8, group=16) == q  # ty: ignore[invalid-argument-type]
    assert formats.description == "gguf (Q4_K, Q6_K)"
