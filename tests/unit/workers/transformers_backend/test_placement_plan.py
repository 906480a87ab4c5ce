"""The plan of a class for tensor parallelism: a division for every style, and the bytes of each rank's part."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.decoder_spec import slices_of
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.registry import NONE, QUANTIZATIONS
from oarlock.workers.runner.memory_needs import rank_tensors
from oarlock.workers.transformers_backend.class_description import AttentionCall, ClassDescription, ClassTensor, Role
from oarlock.workers.transformers_backend.linears import make_linear
from oarlock.workers.transformers_backend.placement_plan import Division, division_of, division_on, tensor_specs
from oarlock.workers.transformers_backend.served_class import spec_of
from oarlock.workers.transformers_backend.vocabulary import EmbeddingPart, HeadPart

WHOLE = Division.WHOLE
# Divisions of a linear layer, and of a matrix and a vector of the class's own code; None: refused for several ranks.
STYLES = {
    None: (WHOLE, WHOLE, WHOLE),
    "all_reduce": (None, WHOLE, WHOLE),
    "colwise": (Division.COLUMN, None, Division.OUTPUTS),
    "colwise_gather_output": (Division.GATHERED_COLUMN, WHOLE, WHOLE),
    "colwise_rep": (Division.GATHERED_COLUMN, WHOLE, WHOLE),
    "embedding_colwise": (None, WHOLE, WHOLE),
    "embedding_rowwise": (None, WHOLE, WHOLE),
    "ep_dispatch_experts": (None, None, None),
    "grouped_gemm": (None, None, None),
    "local_params": (None, WHOLE, WHOLE),
    "mla_kv_a_proj": (WHOLE, None, None),
    "moe_identity_expert": (None, None, None),
    "moe_tp_experts": (None, WHOLE, WHOLE),
    "packed_colwise": (Division.PACKED_COLUMN, None, None),
    "packed_rowwise": (None, None, None),
    "replicate": (WHOLE, WHOLE, WHOLE),
    "replicated_with_grad_allreduce": (WHOLE, WHOLE, WHOLE),
    "rowwise": (Division.ROW, None, None),
    "rowwise_rep": (Division.SPLIT_ROW, WHOLE, WHOLE),
    "rowwise_split_input": (Division.SPLIT_ROW, WHOLE, WHOLE),
    "sequence_parallel": (None, None, None),
}


def test_every_style_of_transformers_is_known_or_refused() -> None:
    assert {style for style in STYLES if style} == set(ALL_PARALLEL_STYLES.valid_keys())
    for style, divisions in STYLES.items():
        tensors = [ClassTensor("a.weight", shape, role, style) for role, shape in (
            ("linear", (8, 8)), ("own", (8, 8)), ("own", (8,)),
        )]  # fmt: skip
        for tensor, division in zip(tensors, divisions, strict=True):
            if division is None:
                with pytest.raises(StartupError, match=rf"a\.weight.*\({style}\).*--tensor-parallel-size 1"):
                    division_of(tensor)
                assert division_on(1, tensor) is WHOLE
            else:
                assert division_of(tensor) is division


def test_stacked_experts_of_a_class_are_not_cut_by_their_number() -> None:
    with pytest.raises(StartupError, match="experts"):
        division_of(ClassTensor("mlp.experts.gate_up_proj", (8, 64, 32), "own", "colwise"))


# name, outputs, inputs, style; each of the divided layers has a bias.
LAYERS = [
    ("up", 96, 64, "colwise"), ("down", 64, 96, "rowwise"), ("packed", 128, 64, "packed_colwise"),
    ("gathered", 96, 64, "colwise_gather_output"), ("split", 64, 128, "rowwise_split_input"), ("latent", 40, 64, None),
]  # fmt: skip
VOCABULARY, HIDDEN = 130, 64


def described(ranks: int) -> ClassDescription:
    tensors = [ClassTensor("embed.weight", (VOCABULARY, HIDDEN), "embedding", "embedding_rowwise")]
    for name, outputs, inputs, style in LAYERS:
        tensors.append(ClassTensor(f"{name}.weight", (outputs, inputs), "linear", style))
        tensors.append(ClassTensor(f"{name}.bias", (outputs,), "linear", style))
    tensors.append(ClassTensor("router.weight", (4, HIDDEN), "linear", is_float32=True))
    for kind, shape in (("weight", (VOCABULARY, HIDDEN)), ("bias", (VOCABULARY,))):
        tensors.append(ClassTensor(f"head.{kind}", shape, "head", "colwise_gather_output"))
    call = AttentionCall(0, "attention", 4, 2, 16, 16, None, None, None, has_sinks=False)
    sizes = {"layers": 1, "vocab_size": VOCABULARY, "hidden_size": HIDDEN}
    return ClassDescription("Made", "made", ranks=ranks, attention=(call,), tensors=tuple(tensors), **sizes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_bytes_of_parts_are_as_predicted(ranks: int, quantization: str) -> None:
    description, formats = described(ranks), QUANTIZATIONS[quantization]
    spec = spec_of(description, "bfloat16")
    config = WorkerConfig(model_path="", device="cpu", dtype="bfloat16", tensor_parallel_size=ranks)
    predicted: dict[str, int] = {}
    for tensor, size in rank_tensors(config, spec, formats):
        module = tensor.name.rpartition(".")[0]
        predicted[module] = predicted.get(module, 0) + size

    tp = TensorParallel(0, ranks)
    place = Placement(tp, torch.bfloat16, torch.device("cpu"), formats, slices_of(spec, formats))
    of_head, in_float32 = replace(place, quantization=formats.of_head), replace(place, dtype=torch.float32)
    tensors = {tensor.name: tensor for tensor in description.tensors}
    meta = torch.device("meta")

    def size(name: str, outputs: int, inputs: int, place: Placement) -> int:
        linear = nn.Linear(inputs, outputs, bias=f"{name}.bias" in tensors, device=meta)
        return make_linear(name, linear, place, division_on(ranks, tensors[f"{name}.weight"])).weight_bytes

    found = {name: size(name, outputs, inputs, place) for name, outputs, inputs, _ in LAYERS}
    found["router"] = size("router", 4, HIDDEN, replace(in_float32, quantization=NONE))
    found["embed"] = EmbeddingPart("embed", nn.Embedding(VOCABULARY, HIDDEN, device=meta), of_head).weight_bytes
    found["head"] = HeadPart("head", nn.Linear(HIDDEN, VOCABULARY, device=meta), of_head).weight_bytes
    assert found == predicted


@pytest.mark.parametrize("is_divided", [True, False])
def test_work_that_every_rank_does_counts_for_each(is_divided: bool) -> None:
    """The memory and time of a step on one rank are the totals of all ranks, divided by the number of ranks."""

    def of(ranks: int) -> tuple[int, int]:
        one = described(ranks)
        call = replace(one.attention[0], is_divided=is_divided)
        (branch,) = spec_of(replace(one, attention=(call,)), "bfloat16").layers[0].branches
        return 4 * branch.sublayer.step_values(4), branch.sublayer.pair_ops

    (values, pair_ops), (values_of_four, pair_ops_of_four) = of(1), of(4)
    assert values_of_four - values == 3 * (2 * 96 + 2 * 40 + 4), "gathered and latent, with biases, and the router"
    assert pair_ops_of_four == pair_ops * (1 if is_divided else 4)


@pytest.mark.parametrize(
    ("role", "shape", "style"),
    [("linear", (95, 64), "colwise"), ("linear", (98, 64), "packed_colwise"), ("linear", (64, 95), "rowwise"),
     ("own", (5,), "colwise")],
)  # fmt: skip
def test_a_tensor_that_ranks_cannot_divide_is_refused(role: Role, shape: tuple[int, ...], style: str) -> None:
    tensor = ClassTensor("attention.odd.weight", shape, role, style)
    assert list(tensor_specs(ClassDescription("Made", "made", tensors=(tensor,))))
    with pytest.raises(StartupError, match=r"attention\.odd\.weight: .* cannot be divided into"):
        list(tensor_specs(ClassDescription("Made", "made", ranks=2, tensors=(tensor,))))
