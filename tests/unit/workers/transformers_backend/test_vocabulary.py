"""The embedding and the head of a class, divided by token id, against torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.transformers_backend.vocabulary import EmbeddingPart, HeadPart, can_replace
from tests.golden.paged_run import on_ranks
from tests.unit.workers.weights_in_memory import MemoryWeights, placement, random_weights

VOCABULARY, HIDDEN = 130, 64
CPU, META = torch.device("cpu"), torch.device("meta")
WEIGHTS = random_weights({"embed.weight": (VOCABULARY, HIDDEN), "head.bias": (VOCABULARY,)})


def embedding_part(place: Placement) -> EmbeddingPart:
    return EmbeddingPart("embed", nn.Embedding(VOCABULARY, HIDDEN, padding_idx=3, device=META), place)


def head_part(place: Placement, *, bias: bool = True) -> HeadPart:
    linear = nn.Linear(HIDDEN, VOCABULARY, bias=bias, device=META)
    return HeadPart("head", linear, place, stored_as="embed")


def all_logits(results: list[Tensor]) -> Tensor:
    """The logits of the vocabulary from those of every rank."""
    whole = torch.cat(results, -1)
    assert (whole[..., VOCABULARY:] == float("-inf")).all()
    return whole[..., :VOCABULARY]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_embedding_and_head_equal_torch(size: int, dtype: torch.dtype, is_tied: bool) -> None:
    ids = torch.tensor([[0, 129, 3, 64, 64]])
    x = torch.randn((1, 5, HIDDEN), generator=torch.Generator().manual_seed(1)).to(dtype)
    table = WEIGHTS["embed.weight"].to(dtype)

    def work(tp: TensorParallel) -> tuple[Tensor, Tensor]:
        place, weights = Placement(tp, dtype, CPU), MemoryWeights(WEIGHTS)
        embedding, head = embedding_part(place), head_part(place)
        embedding.load(weights)
        if is_tied:
            head.tie(embedding)
            head.load_bias(weights)
        else:
            head.load(weights)
        rows, logits = embedding(ids), head(x)
        for part, inputs, result in ((embedding, ids, rows), (head, x, logits)):
            on_meta = part(inputs.to(META))
            assert (on_meta.shape, on_meta.dtype) == (result.shape, result.dtype)
        assert logits.isfinite().all() and logits.shape[-1] == head.local == head.out_features
        assert head.weight_bytes - 4 * head.local == (0 if head.layer.shares_memory else embedding.weight_bytes)
        return rows, head.mask_padding(logits)

    rows, logits = zip(*on_ranks(size, work), strict=True)
    assert all(torch.equal(one, F.embedding(ids, table)) for one in rows)
    wanted = F.linear(x.double(), table.double(), WEIGHTS["head.bias"].to(dtype).double())
    found = all_logits(list(logits))
    assert found.dtype is torch.float32 and torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_head_has_the_same_bits_on_two_ranks(quantization: str) -> None:
    x = torch.randn((1, 5, HIDDEN), generator=torch.Generator().manual_seed(1))

    def work(tp: TensorParallel) -> Tensor:
        head = head_part(Placement(tp, torch.float32, CPU, QUANTIZATIONS[quantization].of_head), bias=False)
        head.load(MemoryWeights(WEIGHTS))
        return head.mask_padding(head(x))

    one, two = (all_logits(on_ranks(size, work)) for size in (1, 2))
    wanted = F.linear(x, WEIGHTS["embed.weight"])
    assert torch.equal(one, two) and (one - wanted).norm() <= 0.02 * wanted.norm()


def test_a_head_refuses_what_torch_refuses() -> None:
    head = head_part(placement(dtype=torch.bfloat16))
    for x in (torch.zeros((1, HIDDEN), device=META), torch.zeros((1, 1), dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError, match="head takes 64 inputs of"):
            head(x)


class Scaled(nn.Embedding):
    pass


def test_only_plain_embeddings_are_replaced() -> None:
    assert can_replace(nn.Embedding(4, 2, padding_idx=0)) and not can_replace(nn.Linear(4, 2))
    assert not can_replace(Scaled(4, 2)) and not can_replace(nn.Embedding(4, 2, max_norm=1.0))


def test_attributes_that_classes_read() -> None:
    part = embedding_part(placement(1, 2, torch.bfloat16))
    assert (part.num_embeddings, part.embedding_dim, part.padding_idx) == (VOCABULARY, HIDDEN, 3)
    assert (part.weight.dtype, part.weight.device) == (torch.bfloat16, CPU)
    assert head_part(placement(dtype=torch.bfloat16)).weight.dtype is torch.bfloat16
