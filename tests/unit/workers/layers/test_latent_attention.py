"""Latent attention against transformers, which expands keys and values, and its bits in every batch, chunking and
number of ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from oarlock.base.errors import StartupError
from oarlock.workers.attention.backend import AttentionBackend, KVSpec
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.attention.torch_backend import TorchBackend
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu import gemm
from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec, tensor_shapes
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.head_matmul import HeadMatmul
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.lora.adapter_slots import AdapterSlots
from oarlock.workers.lora.target_modules import check_adapter
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.runner.memory_needs import rank_weight_bytes
from tests.golden.adapters import Update, write_adapter
from tests.golden.paged_run import PagedRun, on_ranks
from tests.unit.workers.kernel_levels import threads
from tests.unit.workers.weights_in_memory import MemoryWeights, random_weights

SMALL = LatentAttentionSpec(
    4, nope_width=16, rope_width=8, value_dim=24, kv_rank=32, scale=24**-0.5, rope=RopeSpec("default", 1e4, 8),
    q_rank=40, bias=True,
)  # fmt: skip
MODELS = {
    "small": SMALL,
    "neighbours": replace(SMALL, rope=RopeSpec("default", 1e4, 8, interleaved=True), bias=False),
    "one query matrix": replace(SMALL, q_rank=None, bias=False, num_heads=8),
    "published widths": LatentAttentionSpec(
        4, nope_width=128, rope_width=64, value_dim=128, kv_rank=512, scale=192**-0.5,
        rope=RopeSpec("default", 1e4, 64, interleaved=True), q_rank=96,
    ),
}  # fmt: skip
PROMPT = list(range(3, 34))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small shapes: a second thread only waits for the first."""
    with threads(1):
        yield


def model_of(attention: LatentAttentionSpec) -> DecoderSpec:
    branches = (BranchSpec(attention, "input_layernorm"), BranchSpec(GatedMLPSpec(64), "post_attention_layernorm"))
    return DecoderSpec("Tiny", 50, 48, (LayerSpec(branches),) * 2, NormSpec(), 64, 64)


def weights_of(spec: DecoderSpec) -> dict[str, Tensor]:
    return {name: 0.15 * tensor for name, tensor in random_weights(tensor_shapes(spec)).items()}


CPU = torch.device("cpu")


def loaded(
    spec: DecoderSpec, tp: TensorParallel, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> Decoder:
    decoder = Decoder(spec, tp, dtype, device)
    decoder.load(MemoryWeights(weights_of(spec)), lambda share: None)
    return decoder


def transformers_logits(attention: LatentAttentionSpec) -> Tensor:
    """The logits of `PROMPT` from transformers, with the same weights: [T, vocab]."""
    assert attention.rope is not None
    config = DeepseekV3Config(
        vocab_size=50, hidden_size=48, intermediate_size=64, num_hidden_layers=2, first_k_dense_replace=2,
        num_attention_heads=attention.num_heads, num_key_value_heads=attention.num_heads,
        q_lora_rank=attention.q_rank, kv_lora_rank=attention.kv_rank, qk_nope_head_dim=attention.nope_width,
        qk_rope_head_dim=attention.rope_width, v_head_dim=attention.value_dim, attention_bias=attention.bias,
        rope_interleave=attention.rope.interleaved, tie_word_embeddings=False, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": attention.rope.theta},
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).eval()
    weights = weights_of(model_of(attention))
    model.load_state_dict(weights)
    return model(torch.tensor([PROMPT])).logits[0]


def fed(decoder: Decoder, backend: Callable[[KVSpec], AttentionBackend], cuts: list[int]) -> Tensor:
    """The logits of `PROMPT`, fed in pieces that end at `cuts`, among other sequences in every other step."""
    run, rows, start = PagedRun(decoder, backend), [], 0
    for number, end in enumerate(cuts):
        others = {10 + number: PROMPT[: 2 + number]} if number % 2 else {}
        rows.append(run.step({**others, 0: PROMPT[start:end]})[0])
        start = end
    return torch.cat(rows)


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_as_transformers_at_any_number_of_ranks(name: str) -> None:
    spec = model_of(MODELS[name])
    with torch.inference_mode():
        expected = transformers_logits(MODELS[name])

    def both(tp: TensorParallel) -> list[Tensor]:
        decoder = loaded(spec, tp)
        config = WorkerConfig("x", device="cpu", dtype="float32", tensor_parallel_size=tp.size)
        assert decoder.weight_bytes == rank_weight_bytes(config, spec)
        return [fed(decoder, backend, [7, 8, 20, 31]) for backend in (ReferenceBackend, TorchBackend)]

    for size in (1, 4):
        for found in (one for rank in on_ranks(size, both) for one in rank):
            torch.testing.assert_close(found, expected, atol=4e-6 * expected.abs().max().item(), rtol=0)


def test_matrices_that_are_stored_apart_have_the_same_bits() -> None:
    spec = model_of(SMALL)
    split = model_of(replace(SMALL, splits_kv_b=True))
    weights = weights_of(spec)
    for name in [name for name in weights if name.endswith("kv_b_proj.weight")]:
        keys, values = weights[name].view(SMALL.num_heads, -1, SMALL.kv_rank).split([16, 24], 1)
        before = name.removesuffix("kv_b_proj.weight")
        weights[f"{before}k_b_proj.weight"] = keys.transpose(1, 2).flatten(0, 1)
        weights[f"{before}v_b_proj.weight"] = values.flatten(0, 1)

    def logits(tp: TensorParallel) -> Tensor:
        decoder = Decoder(split, tp, torch.float32, torch.device("cpu"))
        decoder.load(MemoryWeights({name: weights[name] for name in tensor_shapes(split)}), lambda share: None)
        return fed(decoder, ReferenceBackend, [31])

    (expected,) = on_ranks(1, lambda tp: fed(loaded(spec, tp), ReferenceBackend, [31]))
    assert all(torch.equal(found, expected) for size in (1, 2) for found in on_ranks(size, logits))


def test_factors_of_queries_and_of_the_latent() -> None:
    """The norm's weight has the latent's factor, and the scale of scores that of the queries."""
    scaled = model_of(replace(SMALL, query_factor=1.7, latent_factor=0.6))
    plain = model_of(replace(SMALL, scale=1.7 * SMALL.scale))
    weights = weights_of(plain)
    weights |= {name: 0.6 * one for name, one in weights.items() if name.endswith("kv_a_layernorm.weight")}

    def logits(tp: TensorParallel) -> list[Tensor]:
        other = Decoder(plain, tp, torch.float32, torch.device("cpu"))
        other.load(MemoryWeights(weights), lambda share: None)
        return [fed(decoder, ReferenceBackend, [31]) for decoder in (loaded(scaled, tp), other)]

    ((found, expected),) = on_ranks(1, logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", ["kernel", "matmuls", "stacked"])
def test_heads_may_be_parts_of_wider_rows(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the C++ kernel, in torch's matmul of each head, and in the matmul of all heads that devices use."""
    weight, rows, wide = torch.randn(3, 40, 24), torch.randn(9, 3, 30), torch.zeros(9, 3, 50)
    can_serve = gemm.can_serve
    monkeypatch.setattr(gemm, "can_serve", lambda weight: way == "kernel" and can_serve(weight))
    multiply = HeadMatmul(weight)
    multiply.stacked = weight.transpose(1, 2).contiguous() if way == "stacked" else None
    expected = torch.einsum("thi,hoi->tho", rows[..., 6:], weight)
    multiply(rows[..., 6:], out=wide[..., 10:])
    for found in (multiply(rows[..., 6:]), wide[..., 10:]):
        torch.testing.assert_close(found, expected)
    assert not wide[..., :10].any()


def test_adapters_update_all_matrices_but_those_of_the_latent(tmp_path: Path) -> None:
    """Its keys and values are not computed, so an update of them has no matmul that it could be added to."""
    spec = model_of(MODELS["neighbours"])
    model = loaded(spec, TensorParallel.solo())
    updated = {part.name for shard in AdapterSlots(model, 1, 4).shards for part in shard.parts}
    inside = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}
    assert {name.rpartition(".")[2] for name in updated if ".self_attn." in name} == inside
    name = "model.layers.1.self_attn.kv_b_proj"
    update = Update(name, 1.0, torch.ones(2, 32), torch.ones(160, 2))
    with pytest.raises(StartupError, match=f"updates {name}, which cannot be adapted"):
        check_adapter(write_adapter(tmp_path / "one.safetensors", [update]), spec, 4, None)


@pytest.mark.parametrize("name", ["neighbours", "published widths"])
def test_bits_depend_neither_on_the_batch_nor_on_the_chunks_nor_on_the_ranks(name: str) -> None:
    def ways(tp: TensorParallel) -> list[Tensor]:
        decoder = loaded(model_of(MODELS[name]), tp, torch.bfloat16)
        by_one = [[*range(1, 11), 31]] if tp.size == 1 else []
        return [fed(decoder, TorchBackend, cuts) for cuts in ([31], [7, 8, 20, 31], *by_one)]

    (alone,) = on_ranks(1, ways)
    assert len(alone[0].unique()) > 100
    for found in (*alone, *(one for size in (2, 4) for rank in on_ranks(size, ways) for one in rank)):
        assert torch.equal(found, alone[0])
