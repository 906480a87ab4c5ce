"""The gated delta net and Kimi delta attention compared with transformers' modules; their bits depend on neither cuts,
batches nor ranks."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BailingHybridConfig, KimiLinearConfig, OlmoHybridConfig, Qwen3_5TextConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.gated_delta import GatedDelta
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.kimi_delta import KimiDelta
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.recurrent.states import LayerStates
from oarlock.workers.verify.exact_modules import in_float64
from tests.golden.paged_run import on_ranks
from tests.unit.workers.state_steps import layer_step_of
from tests.unit.workers.weights_in_memory import MemoryWeights

CPU = torch.device("cpu")
HIDDEN, TOKENS, SLOTS = 24, 70, 9
SIZES = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-5,
}  # fmt: skip
KINDS = ["linear_attention", "full_attention"]
QWEN = GatedDeltaSpec(4, 8, 12, 20, 4, 1e-5)
OLMO = GatedDeltaSpec(4, 8, 12, 20, 4, 1e-5, doubles_beta=True)
KIMI = KimiDeltaSpec(4, 12, 3, 1e-5, decay_rank=12, gate_rank=12, axes_around_rates=(2, 1))
LING = KimiDeltaSpec(4, 12, 4, 1e-5, lower_bound=-2.5)
LING_UNBOUNDED = KimiDeltaSpec(4, 12, 4, 1e-5)
Spec = GatedDeltaSpec | KimiDeltaSpec
# Names of OLMo's modules, and ours.
_OLMO_NAMES = {
    "q_proj": "in_proj_q", "k_proj": "in_proj_k", "v_proj": "in_proj_v", "g_proj": "in_proj_z", "b_proj": "in_proj_b",
    "a_proj": "in_proj_a", "o_norm": "norm", "o_proj": "out_proj",
}  # fmt: skip


def kimi_reference(spec: KimiDeltaSpec, shape: dict[str, Any]) -> Any:
    if spec.decay_rank is None:
        bound = {"kda_safe_gate": spec.lower_bound is not None, "kda_lower_bound": spec.lower_bound or -5.0}
        sizes = {"head_dim": spec.head_width, "short_conv_kernel_size": spec.taps_of_convolution}
        config = BailingHybridConfig(**shape, **bound, **sizes, layer_types=KINDS, rms_norm_eps=spec.eps)
        return BailingHybridDeltaAttention(config, 0)
    sizes = {"linear_head_dim": 12, "linear_num_heads": 4, "linear_conv_kernel_dim": 3}
    return KimiLinearDeltaAttention(KimiLinearConfig(**shape, **sizes, layer_types=KINDS, rms_norm_eps=spec.eps), 0)


@cache
def reference(spec: Spec) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
    if isinstance(spec, KimiDeltaSpec):
        module = kimi_reference(spec, shape)
        return initialised(module)
    shape |= SIZES
    if spec.doubles_beta:
        module: Any = OlmoHybridGatedDeltaNet(OlmoHybridConfig(**shape, layer_types=KINDS), 0)
    else:
        config: Any = Qwen3_5TextConfig(**shape, layer_types=KINDS)
        module = Qwen3_5GatedDeltaNet(config, 0)
    return initialised(module)


def initialised(module: Any) -> Any:
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.4)
    return module.eval()


def ours(tp: TensorParallel, spec: Spec, dtype: torch.dtype = torch.float32, quantization: str = "none") -> Any:
    """Return the module of a rank, with the reference module's weights."""
    placement = Placement(tp, dtype, CPU, QUANTIZATIONS[quantization], slices=4)
    module: GatedDelta | KimiDelta
    if isinstance(spec, KimiDeltaSpec):
        module = KimiDelta("net", spec, 0, HIDDEN, placement)
    else:
        module = GatedDelta("net", spec, 0, HIDDEN, placement)
    found = {}
    for name, tensor in reference(spec).named_parameters():
        if isinstance(spec, KimiDeltaSpec):
            found[f"net.{name.removeprefix('forget_gate.')}"] = tensor.detach()
            continue
        first, dot, last = name.partition(".")
        found[f"net.{_OLMO_NAMES.get(first, first)}{dot}{last}"] = tensor.detach()
    weights = MemoryWeights(found)
    for part in module.parts:
        part.load(weights)
    return module


def empty_states(module: Any, dtype: torch.dtype) -> LayerStates:
    size = module.placement.tp.size
    shapes = [part.shape_of_rank(size) for part in module.spec.memory.parts]
    return LayerStates((torch.zeros(SLOTS + 1, *shapes[0], dtype=dtype), torch.zeros(SLOTS + 1, *shapes[1])))


def fed(module: Any, x: Tensor, cuts: list[int]) -> Tensor:
    """Return the results of one sequence that is fed in pieces, by turns from slots 1 and 2."""
    states = empty_states(module, x.dtype)
    rows = []
    for number, (start, end) in enumerate(pairwise([0, *cuts])):
        slots = (0 if number == 0 else 1 + number % 2, 2 - number % 2)
        rows.append(module(x[start:end], x[start:end], layer_step_of(states, [0, end - start], [slots], [])))
    assert not any(part[0].any() for part in states.parts), "the state before the first token was written"
    return torch.cat(rows)


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(
    "spec",
    [QWEN, OLMO, KIMI, LING, pytest.param(LING_UNBOUNDED, marks=pytest.mark.soak)],
    ids=["qwen", "olmo", "kimi", "ling", "ling-unbounded"],
)
def test_it_is_within_twice_transformers_own_error(spec: Spec) -> None:
    theirs, x = reference(spec), inputs()
    with torch.inference_mode():
        found = fed(ours(TensorParallel.solo(), spec), x, [31, TOKENS]).double()
        own = (theirs(x[None])[0] + x).double()
        with in_float64(theirs):
            truth = theirs(x[None].double())[0] + x.double()
    assert truth.dtype == torch.float64
    assert (found - truth).square().mean() <= 4 * (own - truth).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [QWEN, KIMI, LING], ids=["qwen", "kimi", "ling"])
def test_bits_depend_on_neither_cuts_nor_ranks_nor_the_batch(spec: Spec, dtype: torch.dtype) -> None:
    x = inputs(dtype)[:23]
    module = ours(TensorParallel.solo(), spec, dtype)
    with torch.inference_mode():
        whole = fed(module, x, [23])
        for cuts in ([*range(1, 24)], [1, 2, 9, 23]):
            assert torch.equal(fed(module, x, cuts), whole)
        states = empty_states(module, dtype)
        step = layer_step_of(states, [0, 23, 28], [(0, 1), (0, 2)], [(5, 3), (8, 4)])
        both = torch.cat((x, x[:5]))
        assert torch.equal(module(both, both, step), torch.cat((whole, whole[:5])))
        for part in states.parts:
            assert torch.equal(part[3], part[2]), "the state after 5 tokens, saved and left"
        rest = module(x[8:], x[8:], layer_step_of(states, [0, 15], [(4, 5)], []))
        assert torch.equal(rest, whole[8:])  # a sequence with the same first 8 tokens
    for size in (2, 4):
        for found in on_ranks(size, lambda tp: fed(ours(tp, spec, dtype), x, [9, 23])):
            assert torch.equal(found, whole)


def test_gates_are_not_quantized() -> None:
    """Rounding them would change the decay of all of a head's state."""
    module = ours(TensorParallel.solo(), QWEN, quantization="int8")
    plain = ours(TensorParallel.solo(), QWEN)
    x = inputs()
    with torch.inference_mode():
        assert torch.equal(module.b_and_a(x), plain.b_and_a(x))
        assert not torch.equal(module.z(x), plain.z(x))
        assert module.b_and_a.weight_bytes == plain.b_and_a.weight_bytes
