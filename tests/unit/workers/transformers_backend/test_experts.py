"""Experts of transformers' classes in our kernels: as the class's own module computes them in float64."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.transformers_backend.class_description import ClassDescription, ClassTensor, ExpertsModule
from oarlock.workers.transformers_backend.experts import ExpertsPart, describe_experts, experts_of
from oarlock.workers.transformers_backend.experts_loop import run_experts
from oarlock.workers.transformers_backend.experts_source import stacked_names
from tests.golden.paged_run import on_ranks
from tests.unit.workers.transformers_backend.stacked_weights import weights_of

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
    ("mixtral", "MixtralExperts"),
    ("gemma4", "Gemma4TextExperts"),
    ("aria", "AriaExperts"),
    ("gpt_oss", "GptOssExperts"),
    ("nemotron_h", "NemotronHExperts"),
    ("beam", "BeamExperts"),
    ("longcat_flash", "LongcatFlashExperts"),
    ("dbrx", "DbrxExperts"),
]
BOUNDS = {("none", torch.float32): 1e-6, ("none", torch.bfloat16): 1e-2, ("int8", torch.bfloat16): 3e-2}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("quantization", "dtype"), BOUNDS)
@pytest.mark.parametrize(("family", "kind"), DESCRIBED)
def test_results_are_the_classes(family: str, kind: str, quantization: str, dtype: torch.dtype, size: int) -> None:
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

    found = on_ranks(size, result)
    for here in found:
        assert here.dtype == dtype and torch.equal(here, found[0])
        assert (here.double() - expected).norm() <= BOUNDS[quantization, dtype] * expected.norm()
