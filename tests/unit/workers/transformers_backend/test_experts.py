"""Experts of transformers' classes in our kernels: as the class's own module computes them in float64."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.decoder_spec import slices_of
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.runner.memory_needs import rank_weight_bytes
from oarlock.workers.transformers_backend.class_description import ClassDescription, ClassTensor, ExpertsModule
from oarlock.workers.transformers_backend.experts import ExpertsPart, describe_experts, experts_of
from oarlock.workers.transformers_backend.experts_loop import run_experts
from oarlock.workers.transformers_backend.experts_source import stacked_names
from oarlock.workers.transformers_backend.served_class import spec_of
from tests.golden.paged_run import on_ranks
from tests.unit.workers.transformers_backend.stacked_weights import weights_of
from tests.unit.workers.weights_in_memory import RecordingRank

CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS = 5, 32, 24, 2, 7

# Fields of any config; `EagerConfig` has those that the class asks for.
CONFIG = {
    "hidden_size": HIDDEN, "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh", "mlp_hidden_act": "relu2",
    "moe_latent_size": None, "swiglu_limit": 1.5, "swiglu_alpha": 1.702, "zero_expert_num": 3,
    "num_experts_per_tok": TOP_K, "moe_topk": TOP_K, "_experts_implementation": "eager", "post_norm_eps": 1e-6,
    "moe_hidden_size": HIDDEN,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(
        ("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"), WIDTH
    ),
    "ffn_act_fn": {"name": "silu"},
}  # fmt: skip


def experts_module(family: str, kind: str, **changes: Any) -> Any:
    """Return the experts module `kind` of transformers' `family`, with random weights in float64."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    made = getattr(module, kind)(SimpleNamespace(**{**CONFIG, **changes})).double()
    draw = torch.Generator().manual_seed(1)
    for tensor in made.parameters():
        tensor.data = torch.randn(tensor.shape, generator=draw, dtype=torch.float64) / tensor.shape[-1] ** 0.5
    return made


def choices(ids: int = EXPERTS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, ids without order, and weights."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn((TOKENS, HIDDEN), generator=draw).to(dtype)
    chosen = torch.rand((TOKENS, ids), generator=draw).topk(TOP_K, sorted=False).indices
    return x, chosen, torch.rand((TOKENS, TOP_K), generator=draw).to(dtype)


def run(tp: TensorParallel, module: nn.Module, one: ExpertsModule, dtype: torch.dtype, quantization: str) -> Any:
    part = ExpertsPart(NAME, module, one, Placement(tp, dtype, CPU, QUANTIZATIONS[quantization], 4))
    part.load(weights_of(NAME, module))
    return part


DESCRIBED = [
    ("gpt_oss", "GptOssExperts"),
    ("aria", "AriaExperts"),
    ("gemma4", "Gemma4TextExperts"),
    ("mixtral", "MixtralExperts"),
    ("nemotron_h", "NemotronHExperts"),
    ("beam", "BeamExperts"),
    ("longcat_flash", "LongcatFlashExperts"),
    ("dbrx", "DbrxExperts"),
]
BOUNDS = {
    ("none", torch.float32): 1e-6,
    ("none", torch.bfloat16): 1e-2,
    ("int8", torch.bfloat16): 3e-2,
    ("int4", torch.bfloat16): 0.25,
}


@pytest.mark.parametrize(("quantization", "dtype"), BOUNDS)
@pytest.mark.parametrize(("family", "kind"), DESCRIBED)
def test_results_are_the_classes(family: str, kind: str, quantization: str, dtype: torch.dtype) -> None:
    module = experts_module(family, kind)
    one = describe_experts(NAME, module)
    assert one is not None and ClassDescription("A", "a", experts=(one,)) == ClassDescription.decoded(
        ClassDescription("A", "a", experts=(one,)).encoded()
    )
    x, ids, scales = choices(EXPERTS + one.identities)
    with torch.inference_mode():
        expected = module(x[:, None] if one.is_flat else x, ids, scales).reshape(TOKENS, HIDDEN)

    def result(tp: TensorParallel) -> Tensor:
        part = run(tp, module, one, dtype, quantization)
        return part(x[None].to(dtype), top_k_index=ids, top_k_weights=scales)[0]

    found = [*on_ranks(1, result), *on_ranks(2, result)]
    assert all(here.dtype == dtype and torch.equal(here, found[0]) for here in found)
    assert (found[0].double() - expected).norm() <= BOUNDS[quantization, dtype] * expected.norm()


@pytest.mark.parametrize(
    ("family", "kind"),
    [("muse_spark", "MuseSparkExperts"), ("hy_v4", "HYV4Experts"), ("deepseek_v4", "DeepseekV4Experts")],
)
def test_other_experts_run_as_the_class_computes_them(family: str, kind: str) -> None:
    module = experts_module(family, kind)
    assert describe_experts(NAME, module) is None
    x, ids, scales = choices(EXPERTS + 1)
    with torch.inference_mode():
        assert torch.allclose(run_experts(module, x, ids, scales), module(x, ids, scales))
    empty = run_experts(module.to("meta"), *(part.to("meta") for part in (x, ids, scales)))
    assert empty.shape == x.shape and empty.is_meta


@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh"])
def test_an_activation_that_no_kernel_has_is_not_described(activation: str) -> None:
    assert describe_experts(NAME, experts_module("mixtral", "MixtralExperts", hidden_act=activation)) is None


@pytest.mark.parametrize("change", ["a parameter", "a buffer", "fewer experts"])
def test_a_class_with_other_tensors_is_not_described(change: str) -> None:
    module = experts_module("mixtral", "MixtralExperts")
    if change == "a parameter":
        module.scale = nn.Parameter(torch.ones(EXPERTS))
    elif change == "a buffer":
        module.register_buffer("scale", torch.ones(EXPERTS))
    else:
        module.num_experts = EXPERTS - 1
    assert describe_experts(NAME, module) is None


def test_a_repeated_expert_counts_twice_and_an_id_of_no_expert_not_at_all() -> None:
    module = experts_module("mixtral", "MixtralExperts")
    one = describe_experts(NAME, module)
    assert one is not None
    part = run(TensorParallel.solo(), module, one, torch.float32, "none")
    x, _, _ = choices()
    ids = torch.tensor([[3, 3, 3], [0, 4, 0], [EXPERTS, 1, EXPERTS], [EXPERTS + 2, 2, 2]] + [[EXPERTS] * 3] * 3)
    scales = torch.rand((TOKENS, 3))
    with torch.inference_mode():
        expected = torch.zeros_like(x)
        for at in range(3):  # the class's own code takes each of a row's experts once
            expected += module(x, ids[:, at : at + 1].clamp(max=EXPERTS), scales[:, at : at + 1])
        found = part(x.float(), ids, scales)
    assert (found.double() - expected).norm() <= 1e-6 * expected.norm() and not found[4:].any()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("family", "kind"), [("gpt_oss", "GptOssExperts"), ("nemotron_h", "NemotronHExperts")])
def test_memory_is_as_planned(family: str, kind: str, quantization: str, size: int) -> None:
    module = experts_module(family, kind)
    one = describe_experts(NAME, module)
    assert one is not None
    tensors = tuple(
        ClassTensor(name, tuple(module.get_parameter(name.rpartition(".")[2]).shape), "experts", "rowwise")
        for name in stacked_names(one)
    )
    spec = spec_of(
        ClassDescription("A", "a", ranks=size, layers=1, hidden_size=HIDDEN, experts=(one,), tensors=tensors), None
    )
    formats = QUANTIZATIONS[quantization]
    config = WorkerConfig("", dtype="bfloat16", device="cpu", tensor_parallel_size=size)
    tp = TensorParallel.solo() if size == 1 else RecordingRank(0, size)
    place = Placement(tp, torch.bfloat16, torch.device("meta"), formats, slices_of(spec, formats))
    part = ExpertsPart(NAME, module, one, place)
    assert part.weight_bytes == rank_weight_bytes(config, spec, formats)


def test_a_rank_reads_only_its_part() -> None:
    module = experts_module("mixtral", "MixtralExperts", moe_intermediate_size=32)
    one = describe_experts(NAME, module)
    assert one is not None
    for divided, count in ((True, 2), (False, 1)):
        part = ExpertsPart(NAME, module, one, Placement(RecordingRank(1, 2), torch.float32, CPU), divided=divided)
        weights = weights_of(NAME, module)
        part.load(weights)
        assert weights.taken == {name: tensor.numel() // count for name, tensor in weights.tensors.items()}
        assert part.weight_bytes == sum(4 * taken for taken in weights.taken.values())
        x, ids, scales = choices(dtype=torch.float32)
        found = part(x, ids, scales)
        sums = part.placement.tp.sent if divided else []
        assert torch.equal(found, sums[0] if divided else found) and len(sums) == divided


def test_without_weights_a_part_has_shapes_and_sees_the_number_of_choices() -> None:
    module = experts_module("mixtral", "MixtralExperts", num_experts_per_tok=None, moe_topk=None).to("meta")
    one = describe_experts(NAME, module)
    assert one is not None and one.top_k == 1
    place = Placement(RecordingRank(0, 2), torch.bfloat16, torch.device("meta"))
    part = ExpertsPart(NAME, module, one, place)
    found = part(*(tensor.to("meta") for tensor in choices(dtype=torch.bfloat16)))
    assert found.shape == (TOKENS, HIDDEN) and found.is_meta and found.dtype == torch.bfloat16
    model = nn.ModuleDict({"described": module, "replaced": part, "other": nn.Linear(2, 2)})
    assert experts_of(model) == {
        "described": replace(one, module="described"), "replaced": replace(one, top_k=TOP_K)
    }  # fmt: skip
