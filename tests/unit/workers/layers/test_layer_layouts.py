"""Layers in every order that a description can have: both forms give the same bits, and add up what they say."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.attention_spec import QueryScale, RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec, tensor_shapes
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.layers.mlp_spec import MLPSpec
from oarlock.workers.layers.short_convolution_spec import ShortConvolutionSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.quantization.matmul import PLAIN_ACTIVATIONS
from oarlock.workers.runner.memory_needs import rank_weight_bytes
from tests.golden import paged_run
from tests.golden.paged_run import PagedRun, on_ranks
from tests.unit.workers.kernel_levels import NO_KERNELS
from tests.unit.workers.weights_in_memory import MemoryWeights, random_weights

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")

HALVES = RopeSpec("default", 1e4, 16)
ATTENTION = SelfAttentionSpec(4, 2, 32, 32**-0.5, HALVES)
UNROTATED = replace(ATTENTION, rope=None, window=5, sinks=True)
NEIGHBOURS = replace(ATTENTION, rope=replace(HALVES, interleaved=True), o_bias=True)
CLIPPED = replace(ATTENTION, clip_qkv=0.4, qkv_bias=True)
SCALE = QueryScale(0.3, 3, 1)
NORMS_LAST = replace(ATTENTION, qk_norm=NormSpec(), norms_after_rotation=True)
ALL = replace(
    NEIGHBOURS, qk_norm=NormSpec(weight=False), norms_after_rotation=True, query_scale=SCALE, chunk=6, output_gate=True
)
MLP = GatedMLPSpec(64, bias=True)
Attention = SelfAttentionSpec | LatentAttentionSpec | GatedDeltaSpec | KimiDeltaSpec | Mamba2Spec | ShortConvolutionSpec


def layer(
    attention: Attention = ATTENTION,
    norms: tuple[tuple[str | None, str | None], ...] = (("a", None), ("b", None)),
    scale: float = 1.0,
    *,
    mlp: GatedMLPSpec | MLPSpec = MLP,
    parallel: bool = False,
) -> LayerSpec:
    pairs = zip((attention, mlp), norms, strict=True)
    return LayerSpec(tuple(BranchSpec(one, *names, scale) for one, names in pairs), (2,) if parallel else ())


LAYOUTS = {
    "one after the other": layer(),
    "norms after": layer(norms=((None, "a"), (None, "b"))),
    "norms before and after": layer(norms=(("a", "b"), ("c", "d"))),
    "side by side behind one norm": layer(norms=(("a", None), ("a", None)), parallel=True),
    "side by side behind two norms": layer(parallel=True),
    "scaled residuals": layer(scale=0.25),
    "scaled residuals and norms after": layer(norms=(("a", "b"), ("c", "d")), scale=0.25),
    "no rotation, with sinks": layer(UNROTATED),
    "neighbours rotated": layer(NEIGHBOURS),
    "queries, keys and values limited": layer(CLIPPED),
    "a gate on attention": layer(replace(ATTENTION, output_gate=True)),
    "a gate behind a shared norm": layer(
        replace(ATTENTION, output_gate=True), norms=(("a", None), ("a", None)), parallel=True
    ),
    "scaled queries": layer(replace(ATTENTION, query_scale=SCALE)),
    "scaled queries without rotation": layer(replace(UNROTATED, query_scale=SCALE)),
    "scaled queries after norms": layer(replace(ATTENTION, qk_norm=NormSpec(), query_scale=SCALE)),
    "chunks": layer(replace(ATTENTION, chunk=7)),
    "norms after the rotation": layer(NORMS_LAST),
    "everything at once": layer(ALL),
    **{f"no gate, {name}": layer(mlp=MLPSpec(64, name, bias=name != "relu2")) for name in PLAIN_ACTIVATIONS},
    "no gate, side by side": layer(parallel=True, mlp=MLPSpec(64, "gelu")),
}
MAMBA = Mamba2Spec(4, 16, 2, 24, 4, 1e-5)
SCALED_MAMBA = replace(
    MAMBA, scales=(0.5, 0.7, 1.1, 0.9, 1.3), least_step=0.4, most_step=1.1, projection_bias=True, gates_first=False
)
RECURRENT = {
    "gated delta": layer(GatedDeltaSpec(2, 4, 16, 24, 4, 1e-6)),
    "gated delta, norms after": layer(
        GatedDeltaSpec(2, 2, 20, 8, 2, 1e-6, doubles_beta=True), ((None, "a"), ("b", None))
    ),
    "Kimi delta": layer(KimiDeltaSpec(4, 24, 3, 1e-5, decay_rank=20, gate_rank=12, axes_around_rates=(2, 1))),
    "Kimi delta, one projection each": layer(KimiDeltaSpec(4, 16, 4, 1e-6, lower_bound=-5.0)),
    "Mamba 2": layer(MAMBA),
    "Mamba 2 with scales, limits and biases": layer(SCALED_MAMBA),
    "Mamba 2 without a norm": layer(replace(MAMBA, eps=None, conv_bias=False)),
    "Mamba 2 beside attention": LayerSpec(
        (BranchSpec(ATTENTION, "a"), BranchSpec(MAMBA, "a"), BranchSpec(MLP, "b")), (2, 1)
    ),
    "short convolution": layer(ShortConvolutionSpec(48, 3)),
    "short convolution with biases": layer(ShortConvolutionSpec(48, 4, bias=True)),
}
# Widths that are no multiples of registers, if the pages allow it.
LATENT = LatentAttentionSpec(4, 20, 16, 24, 32, 0.2, HALVES, q_rank=20, bias=True, latent_factor=0.7)
LATENTS = {
    "halves rotated": layer(LATENT),
    "neighbours rotated, behind a shared norm": layer(
        replace(LATENT, rope=NEIGHBOURS.rope, q_rank=None), (("a", None), ("a", None)), parallel=True
    ),
    "a part rotated": layer(replace(LATENT, rope_width=32), (("a", "b"), ("c", "d")), 0.25),
    "no rotation, with gates": layer(replace(LATENT, rope=None, output_gate=True, bias=False)),
    "gates, and queries of the input": layer(replace(LATENT, q_rank=None, output_gate=True, value_dim=13)),
    "only a latent": layer(replace(LATENT, rope=None, rope_width=0, nope_width=13)),
}
NORMS = {
    "rms": NormSpec(),
    "layer": NormSpec("layer", 1e-5),
    "layer with a shift": NormSpec("layer", 1e-5, bias=True),
    "layer with an offset": NormSpec("layer", 1e-5, offset=1.0, bias=True),
    "layer without a weight": NormSpec("layer", 1e-5, weight=False),
}


class SeparateOperations(CppBackend):
    """A backend that layers are not prepared for."""


@pytest.fixture(autouse=True)
def pages_that_the_kernel_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_run, "BLOCK_SIZE", 16)


def model(layers: tuple[LayerSpec, ...], norm: NormSpec = NORMS["rms"]) -> DecoderSpec:
    return DecoderSpec("Tiny", 50, 48, layers, norm, 64, 64)


def loaded(spec: DecoderSpec, tp: TensorParallel, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(spec, tp, dtype, torch.device("cpu"))
    weights = {name: 0.3 * tensor for name, tensor in random_weights(tensor_shapes(spec)).items()}
    decoder.load(MemoryWeights(weights), lambda share: None)
    return decoder


def logits(decoder: Decoder, backend: type[CppBackend]) -> Tensor:
    steps = PagedRun(decoder, backend)
    works = {0: list(range(3, 22)), 1: [5]}, {0: [7], 1: [8, 9, 10]}
    found = torch.cat([rows for work in works for rows in steps.step(work).values()])
    assert (decoder.why_not_prepared is None) == (backend is CppBackend)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_forms_give_the_same_bits_at_any_number_of_ranks(layout: str, norm: str, dtype: torch.dtype) -> None:
    check_both_forms(model((LAYOUTS[layout], layer()), NORMS[norm]), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_stages_of_branches_with_scaled_inputs_are_the_same_in_both_forms(dtype: torch.dtype) -> None:
    experts = ExpertsSpec(3, 32, RouterSpec(2), module="moe")
    branches = (BranchSpec(ATTENTION, "a"), BranchSpec(experts, "a", None, 0.5, 0.7), BranchSpec(MLP, "b", "c"))
    check_both_forms(model((LayerSpec(branches, (2, 1)), layer())), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", RECURRENT)
def test_recurrent_layers_give_the_same_bits_in_both_forms(layout: str, dtype: torch.dtype) -> None:
    check_both_forms(model((RECURRENT[layout], layer())), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LATENTS)
def test_latent_attention_gives_the_same_bits_in_both_forms(layout: str, dtype: torch.dtype) -> None:
    check_both_forms(model((LATENTS[layout], layer())), dtype)


def check_both_forms(spec: DecoderSpec, dtype: torch.dtype) -> None:
    """Compare separate operations with the fused kernel, on one rank and on two."""

    def both_forms(tp: TensorParallel) -> list[Tensor]:
        decoder = loaded(spec, tp, dtype)
        name = str(dtype).removeprefix("torch.")
        config = WorkerConfig("x", device="cpu", dtype=name, tensor_parallel_size=tp.size)
        assert decoder.weight_bytes == rank_weight_bytes(config, spec)
        return [logits(decoder, SeparateOperations), logits(decoder, CppBackend)]

    (alone,) = on_ranks(1, both_forms)
    assert alone[0].isfinite().all() and len(alone[0].unique()) > 100
    for found in (*alone, *(one for rank in on_ranks(2, both_forms) for one in rank)):
        assert torch.equal(found, alone[0])


def test_parallel_branches_read_what_enters_the_layer_and_results_are_scaled() -> None:
    with torch.inference_mode():
        decoder = loaded(model((layer(scale=0.25, parallel=True),)), TensorParallel.solo(), torch.float32)
        attention, mlp = decoder.layers[0].branches
        attention.sublayer = mlp.sublayer
        x = torch.randn(3, 48)
        expected = x + 0.25 * mlp.sublayer(attention.norm(x), None, None) + 0.25 * mlp.sublayer(mlp.norm(x), None, None)
        torch.testing.assert_close(decoder.layers[0](x.clone(), None), expected)  # ty: ignore[invalid-argument-type]


def test_a_stage_reads_what_the_stage_before_it_leaves() -> None:
    branches = (BranchSpec(ATTENTION, "a"), BranchSpec(MLP, "a", input_scale=0.5), BranchSpec(MLP, "b"))
    with torch.inference_mode():
        decoder = loaded(model((LayerSpec(branches, (2, 1)),)), TensorParallel.solo(), torch.float32)
        attention, *mlps = decoder.layers[0].branches
        attention.sublayer = mlps[0].sublayer
        x = torch.randn(3, 48)
        normed = attention.norm(x)
        between = x + mlps[0].sublayer(normed, None, None) + mlps[0].sublayer(0.5 * normed, None, None)
        expected = between + mlps[1].sublayer(mlps[1].norm(between), None, None)
        torch.testing.assert_close(decoder.layers[0](x.clone(), None), expected)  # ty: ignore[invalid-argument-type]
