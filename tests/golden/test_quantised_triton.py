"""Every tensor of every layer of quantised checkpoints, with products as they run on CUDA devices.

In Triton's interpreter, in float32, against transformers with the same weights written out, in float64. Inputs are not
rounded there, so the bounds are those of float32.
"""

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.quantization.method import StackedMatmul
from oarlock.workers.quantization.weight_only import StoredWeight, WeightOnlyMatmul
from tests.golden.cases import TOTAL
from tests.golden.device_products import INTERPRETED, use_device_products
from tests.golden.exact_reference import ExactReference
from tests.golden.layer_compare import findings
from tests.golden.paged_run import load_decoder
from tests.golden.quantised import CASES, Quantised, write
from tests.golden.quantised_errors import GPT_OSS
from tests.golden.tiny_models import make_tiny

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
EXACT = 4e-6  # of a tensor's size
# The others, and more ranks, in the soak test.
FORMS = [("gptq-4-64-asym", 2), ("fp8-block", 1)]

Made = tuple[Quantised, ExactReference]

pytestmark = [pytest.mark.slow, INTERPRETED]


@pytest.fixture(scope="module")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    tokens = random.Random(3).choices(range(300), k=TOTAL)

    @cache
    def made(name: str) -> Made:
        case, folder = CASES[name], tmp_path_factory.mktemp(name)
        family = case.family or ("phi3" if case.fused else "qwen2")
        found = write(make_tiny(folder, family, **(SHAPE | GPT_OSS if case.family else SHAPE)), folder, case)
        return found, ExactReference(found.meaning, tokens)

    return made


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use_device_products(monkeypatch)


def agree(made: Made, size: int) -> None:
    quantised, reference = made
    found = findings(reference, size, path=quantised.path, relative=EXACT)
    assert not found, f"first of {len(found)}: {found[0]}"


@pytest.mark.parametrize(("name", "size"), FORMS)
def test_every_tensor_is_that_of_the_numbers_written_out(made_of: Callable[[str], Made], name: str, size: int) -> None:
    agree(made_of(name), size)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_form_at_every_number_of_ranks(made_of: Callable[[str], Made], name: str, size: int) -> None:
    agree(made_of(name), size)


@pytest.mark.soak
def test_a_scale_that_is_lost_shows(made_of: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = StoredWeight._arguments

    def without_the_last_group(weight: StoredWeight) -> tuple[torch.Tensor, ...]:
        values, scales, *others = arguments(weight)
        scales = scales.clone()
        scales[-1] = 0.0
        return values, scales, *others

    monkeypatch.setattr(StoredWeight, "_arguments", without_the_last_group)
    quantised, reference = made_of("gptq-4-64-asym")
    found = findings(reference, 2, path=quantised.path, relative=EXACT)
    assert found and found[0].tensor == "0.q"


def test_products_match_the_device(made_of: Callable[[str], Made]) -> None:
    """Parts that a checkpoint leaves as they are stay dense, and the parts of one product may differ."""
    layer = load_decoder(made_of("gptq-4-64-sym-act-v2")[0].path, TensorParallel.solo()).layers[0]
    assert isinstance(layer.attention.output.matmul, WeightOnlyMatmul)
    assert isinstance(layer.attention.qkv.matmul, WeightOnlyMatmul | StackedMatmul)
