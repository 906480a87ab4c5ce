"""Every tensor of every layer of quantised checkpoints, against transformers with the same weights written out.

The bounds are what rounding each row of inputs to 8 bits costs, where products do that; a scale that is cut wrongly
costs ten times as much and more.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.quantization import bitsandbytes, fp8, mxfp4, packed_integers
from oarlock.workers.quantization.packed_integers import Span, take_block
from tests.golden.cases import PROMPT, TOTAL
from tests.golden.exact_reference import ExactReference
from tests.golden.layer_compare import findings
from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.quantised import CASES, Quantised, write
from tests.golden.quantised_errors import GPT_OSS, SHOWN, errors_of
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.kernel_levels import threads

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1}
EXPERTS = {
    "num_hidden_layers": 2,
    "num_experts": 3,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 192,
    "mlp_only_layers": [0],
}
KIMI = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2, "linear_head_dim": 64, "linear_num_heads": 8,
    "num_local_experts": 3, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 192, "mlp_layer_types":
    ["dense", "sparse"],
}  # fmt: skip
ROUNDED, EXACT = 0.04, 2e-6  # of a tensor's size: with rows of x in 8 bits, and in float32
# One of each way of storing and of multiplying, with the tensor that a fault in a scale spoils first.
FORMS = ("gptq-4-64-asym", "gptq-4-64-sym-act-v2", "gptq-8-64-sym", "awq-64-fused", "packed-4-64-asym",
         "packed-4-32-asym-act", "integers-channel", "floats-channel", "fp8-block", "nf4-nested", "mxfp4")  # fmt: skip

Made = tuple[Quantised, ExactReference]


@pytest.fixture(scope="module")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    tokens = random.Random(3).choices(range(300), k=TOTAL)

    @cache
    def made(name: str, family: str | None = None) -> Made:
        case, folder = CASES[name], tmp_path_factory.mktemp(name)
        more = {"qwen3_moe": EXPERTS, "kimi_linear": KIMI}[family] if family else GPT_OSS if case.family else {}
        family = family or case.family or ("phi3" if case.fused else "qwen2")
        found = write(make_tiny(folder, family, **SHAPE | more), folder, case)
        return found, ExactReference(found.meaning, tokens)

    return made


def bound_of(name: str) -> float:
    return EXACT if name.startswith(("float", "fp8", "nf4", "fp4")) else ROUNDED


@pytest.mark.parametrize("name", FORMS)
def test_every_tensor_is_near_that_of_the_numbers_written_out(made_of: Callable[[str], Made], name: str) -> None:
    """At four ranks; the bits at every number of them are those of one (`test_every_number_of_ranks_has_…`)."""
    quantised, reference = made_of(name)
    found = findings(reference, 4, path=quantised.path, relative=bound_of(name))
    assert not found, f"first of {len(found)}: {found[0]}"


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.product)])
@pytest.mark.parametrize(
    "name", ["gptq-4-64-asym", "awq-32", "packed-4-64-asym", "integers-channel", "fp8-block", "nf4-nested"]
)
def test_every_tensor_of_experts_is_near_too(made_of: Callable[..., Made], name: str, size: int) -> None:
    """Their width is filled up to whole slices. Every token has all experts: none is chosen by a rounding."""
    quantised, reference = made_of(name, "qwen3_moe")
    found = findings(reference, size, path=quantised.path, relative=bound_of(name))
    assert not found, f"first of {len(found)}: {found[0]}"


@pytest.mark.parametrize("name", ["gptq-4-64-asym", "fp8-block"])
@pytest.mark.soak
def test_every_tensor_of_kimi_delta_attention_is_right(made_of: Callable[..., Made], name: str) -> None:
    """Also of the projections to decays and rates, which `--quantization` does not round but a checkpoint may."""
    quantised, reference = made_of(name, "kimi_linear")
    found = findings(reference, 4, path=quantised.path, relative=EXACT, dequantize=True)
    assert not found, f"first of {len(found)}: {found[0]}"


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [  # each form in one type, and at some numbers of ranks; in the other, and at the others, in the longer run
        pytest.param(name, dtype, sizes, marks=[] if number % 2 == place else pytest.mark.product)
        for number, name in enumerate(CASES)
        for place, (dtype, sizes) in enumerate(
            zip((torch.float32, torch.bfloat16), [(2, 4), (8,)][:: (-1) ** (number // 2)], strict=True)
        )
    ],
    ids=str,
)
def test_every_number_of_ranks_has_the_same_bits(
    made_of: Callable[[str], Made], name: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    quantised, reference = made_of(name)

    def logits(tp: TensorParallel) -> Tensor:
        with threads(1):  # attention is torch's here, which may add up in another order with more
            run = PagedRun(load_decoder(quantised.path, tp, dtype))
            return torch.cat([run.step({0: reference.tokens[:PROMPT]})[0], run.step({0: reference.tokens[PROMPT:]})[0]])

    single = on_ranks(1, logits)[0]
    assert single.isfinite().all()
    for size in sizes:
        assert all(torch.equal(single, other) for other in on_ranks(size, logits)), f"{size} ranks"


@pytest.mark.parametrize("deals", [False, True], ids=["cut", "dealt"])
def test_experts_of_mxfp4_have_the_same_bits_cut_or_dealt_to_any_number_of_ranks(
    made_of: Callable[[str], Made], deals: bool
) -> None:
    quantised, reference = made_of("mxfp4")

    def logits(tp: TensorParallel) -> Tensor:
        run = PagedRun(load_decoder(quantised.path, tp, torch.bfloat16, distributes_experts=deals))
        return run.step({0: reference.tokens[:PROMPT]})[0]

    single = on_ranks(1, logits)[0]
    assert all(torch.equal(single, other) for size in (2, 4) for other in on_ranks(size, logits))


@pytest.mark.parametrize("name", [name for name in FORMS if bound_of(name) == ROUNDED])
def test_written_out_weights_are_multiplied_exactly(made_of: Callable[[str], Made], name: str) -> None:
    quantised, reference = made_of(name)
    found = findings(reference, 2, path=quantised.path, relative=EXACT, dequantize=True)
    assert not found, f"first of {len(found)}: {found[0]}"


@pytest.mark.parametrize("name", ["gptq-4-32-asym-act", "awq-64-fused", "packed-8-channel", "integers-channel-asym"])
def test_written_out_weights_have_the_same_bits_at_every_number_of_ranks(
    made_of: Callable[[str], Made], name: str
) -> None:
    quantised, reference = made_of(name)

    def logits(tp: TensorParallel) -> Tensor:
        run = PagedRun(load_decoder(quantised.path, tp, torch.bfloat16, dequantize=True))
        return run.step({0: reference.tokens[:PROMPT]})[0]

    single = on_ranks(1, logits)[0]
    assert all(torch.equal(single, other) for size in (2, 4, 8) for other in on_ranks(size, logits))


@pytest.mark.parametrize("name", SHOWN)
def test_rounded_inputs_cost_more_than_bfloat16_and_written_out_weights_do_not(
    made_of: Callable[[str], Made], name: str
) -> None:
    quantised, reference = made_of(name)
    errors = errors_of(quantised, reference.tokens[:PROMPT])
    assert errors.dequantised < 1.1 and errors.served < 3
    assert errors.served > 1.3 or CASES[name].family is not None, "where experts alone are rounded it costs less"


def _scales_of_the_first_rank(weights: Any, name: str, shape: Any, rows: Span, columns: Span, dtype: Any) -> Tensor:
    """`take_block`, but scales are taken from the beginning."""
    if "scale" in name:
        rows, columns = Span(0, len(rows)), Span(0, len(columns))
    return take_block(weights, name, shape, rows, columns, dtype)


def _factors_of_the_first_row(patch: pytest.MonkeyPatch) -> None:
    factors = bitsandbytes._Matrix._factors
    patch.setattr(bitsandbytes._Matrix, "_factors", lambda self, blocks: factors(self, Span(0, len(blocks))))


FAULTS = {
    "gptq-4-64-asym": packed_integers,
    "awq-64-fused": packed_integers,
    "packed-4-64-asym": packed_integers,
    "integers-channel": packed_integers,
    "floats-channel": packed_integers,
    "fp8-block": fp8,
    "nf4-nested": None,
    "mxfp4": mxfp4,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_scale_that_is_cut_wrongly_is_named(
    made_of: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    quantised, reference = made_of(name)
    module = FAULTS[name]
    if module is None:
        _factors_of_the_first_row(monkeypatch)
    else:
        monkeypatch.setattr(module, "take_block", _scales_of_the_first_rank)
    found = findings(reference, 2, path=quantised.path, relative=bound_of(name))
    first = "0.experts" if CASES[name].family else "0.q"
    assert found and found[0].tensor == first, f"named {found[:1]}"
