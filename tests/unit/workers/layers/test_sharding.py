"""All ranks' layers in one process: partial results add up to the whole, and no weight is read twice needlessly."""

import itertools

import pytest
import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.distributed.topology import vocab_shard_size
from oarlock.workers.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from oarlock.workers.layers.linear import GatedParallelLinear, QKVParallelLinear, RowParallelLinear
from oarlock.workers.layers.sharding import shard_heads, shard_vocab, supported_tp_sizes
from oarlock.workers.layers.tensor_spec import TensorSpec
from tests.unit.workers.weights_in_memory import MemoryWeights, RecordingRank, placement, random_weights

HIDDEN, DIM = 32, 8


def qkv_weights(heads: int, kv_heads: int, *, fused: bool) -> dict[str, Tensor]:
    sizes = {"q": heads * DIM, "k": kv_heads * DIM, "v": kv_heads * DIM}
    shapes: dict[str, tuple[int, ...]] = {f"a.{p}_proj.weight": (n, HIDDEN) for p, n in sizes.items()}
    shapes |= {f"a.{p}_proj.bias": (n,) for p, n in sizes.items()}
    tensors = random_weights(shapes)
    if not fused:
        return tensors
    return {
        f"a.qkv_proj.{kind}": torch.cat([tensors[f"a.{p}_proj.{kind}"] for p in "qkv"]) for kind in ("weight", "bias")
    }


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(heads, kv, size) for heads, kv in ((8, 8), (8, 4), (8, 2), (8, 1), (16, 2)) for size in (1, 2, 4, 8)]
    + [(12, 4, 2), (12, 4, 4), (12, 4, 12), (14, 2, 2), (14, 2, 14)],
)
def test_every_query_head_uses_its_own_kv_head(heads: int, kv_heads: int, size: int) -> None:
    whole = qkv_weights(heads, kv_heads, fused=False)
    x = torch.randn(3, HIDDEN)
    expected = {p: (x @ whole[f"a.{p}_proj.weight"].T + whole[f"a.{p}_proj.bias"]).view(3, -1, DIM) for p in "qkv"}
    for rank, fused in itertools.product(range(size), (False, True)):
        weights = MemoryWeights(qkv_weights(heads, kv_heads, fused=fused))
        layer = QKVParallelLinear("a", HIDDEN, DIM, heads, kv_heads, True, placement(rank, size))
        layer.load(weights)
        shard = layer.shard
        assert shard.num_heads == heads // size and shard.num_kv_heads == max(1, kv_heads // size)
        out = layer(x).view(3, shard.num_heads + 2 * shard.num_kv_heads, DIM)
        q, k, v = out.split([shard.num_heads, shard.num_kv_heads, shard.num_kv_heads], 1)
        for local in range(shard.num_heads):
            head = rank * shard.num_heads + local
            torch.testing.assert_close(q[:, local], expected["q"][:, head])
            kv = local // (shard.num_heads // shard.num_kv_heads)
            torch.testing.assert_close(k[:, kv], expected["k"][:, head // (heads // kv_heads)])
            torch.testing.assert_close(v[:, kv], expected["v"][:, head // (heads // kv_heads)])
        assert sum(weights.taken.values()) == layer.weight_shard.rows * (HIDDEN + 1), (
            "a rank reads its slice and no more"
        )
        assert layer.weight_bytes == layer.weight_shard.rows * (HIDDEN + 1) * 4


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_mlp_partials_sum_to_the_whole_with_the_bias_once(size: int, with_bias: bool, fused: bool) -> None:
    inner = 48
    shapes = {"gate_proj": (inner, HIDDEN), "up_proj": (inner, HIDDEN), "down_proj": (HIDDEN, inner)}
    tensors = random_weights({f"m.{name}.weight": shape for name, shape in shapes.items()})
    tensors |= random_weights({f"m.{name}.bias": shape[:1] for name, shape in shapes.items()}, seed=1)
    x, residual = torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    scale = 1.0 if with_bias else 0.0
    gate = x @ tensors["m.gate_proj.weight"].T + scale * tensors["m.gate_proj.bias"]
    up = x @ tensors["m.up_proj.weight"].T + scale * tensors["m.up_proj.bias"]
    partial = (torch.nn.functional.silu(gate) * up) @ tensors["m.down_proj.weight"].T
    expected = partial + scale * tensors["m.down_proj.bias"]
    if fused:
        for kind in ("weight", "bias"):
            tensors[f"m.gate_up_proj.{kind}"] = torch.cat([tensors.pop(f"m.{p}_proj.{kind}") for p in ("gate", "up")])
    total = torch.zeros_like(expected)
    for rank in range(size):
        where = placement(rank, size)
        weights = MemoryWeights(tensors)
        both = GatedParallelLinear("m", HIDDEN, inner, with_bias, "silu", where)
        down = RowParallelLinear("m.down_proj", inner, HIDDEN, with_bias, where)
        both.load(weights)
        down.load(weights)
        out = down(both(x), residual)
        if isinstance(where.tp, RecordingRank):
            assert len(where.tp.sent) == 1, "one sum per half-block"
            bias = scale * tensors["m.down_proj.bias"]
            torch.testing.assert_close(out, where.tp.sent[0] + bias + residual)
            total += where.tp.sent[0] + bias / size
        else:
            total += out - residual
        weights.finish(lambda name: not with_bias and name.endswith("bias"))
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab", [64, 61, 9, 3])
def test_embedding_sums_and_head_joins_to_the_whole_vocabulary(vocab: int, size: int) -> None:
    tensors = random_weights({"e.weight": (vocab, HIDDEN)})
    ids, hidden = torch.arange(vocab), torch.randn(4, HIDDEN)
    total, joined = torch.zeros(vocab, HIDDEN), []
    for rank in range(size):
        where = placement(rank, size)
        embedding = VocabParallelEmbedding("e", vocab, HIDDEN, where)
        weights = MemoryWeights(tensors)
        embedding.load(weights)
        out = embedding(ids)
        total += where.tp.sent[0] if isinstance(where.tp, RecordingRank) else out
        untied, tied = VocabParallelHead("e", vocab, HIDDEN, where), VocabParallelHead("e", vocab, HIDDEN, where)
        untied.load(MemoryWeights(tensors))
        tied.tie(embedding)
        logits = untied(hidden)
        assert torch.equal(logits, tied(hidden)) and logits.dtype == torch.float32
        assert logits.shape == (4, vocab_shard_size(vocab, size)) and untied.start == rank * logits.shape[1]
        joined.append(logits)
        weights.finish(lambda name: False)  # a rank that holds only padding has still accounted for the tensor
    assert torch.equal(total, tensors["e.weight"])
    logits = torch.cat(joined, 1)
    torch.testing.assert_close(logits[:, :vocab], hidden @ tensors["e.weight"].T)
    assert torch.isneginf(logits[:, vocab:]).all()


def test_scale_and_softcap_are_applied_once_whatever_the_ranks() -> None:
    """The embedding's scale is rounded to the dtype first; the tied head must not be scaled."""
    weight = torch.randn(7, HIDDEN).bfloat16()
    for size in (1, 4):
        total, joined = torch.zeros(7, HIDDEN, dtype=torch.bfloat16), []
        for rank in range(size):
            where = placement(rank, size, torch.bfloat16)
            layer = VocabParallelEmbedding("e", 7, HIDDEN, where, scale=HIDDEN**0.5)
            layer.load(MemoryWeights({"e.weight": weight}))
            total += layer(torch.arange(7))
            head = VocabParallelHead("e", 7, HIDDEN, where, softcap=2.0)
            head.tie(layer)
            joined.append(head(total[:3]) if rank == size - 1 else head(torch.zeros(3, HIDDEN).bfloat16()))
            assert torch.isneginf(joined[-1][:, layer.real :]).all()
            assert joined[-1][:, : layer.real].abs().le(2.0).all()
        assert torch.equal(total, weight * torch.tensor(HIDDEN**0.5).bfloat16())


def test_sizes_that_do_not_divide_are_refused_with_the_layer_and_the_numbers() -> None:
    with pytest.raises(StartupError, match=r"b\.0\.qkv_proj: 14 heads over 2 key-value heads.* 4 ranks.*\[1, 2, 14\]"):
        QKVParallelLinear("b.0", HIDDEN, DIM, 14, 2, True, placement(0, 4))
    with pytest.raises(StartupError, match=r"m\.gate_up_proj: intermediate size 50 cannot be divided into 4"):
        GatedParallelLinear("m", HIDDEN, 50, False, "silu", placement(0, 4))
    with pytest.raises(StartupError, match=r"m\.down_proj: input size 50 cannot be divided into 4"):
        RowParallelLinear("m.down_proj", 50, HIDDEN, False, placement(0, 4))
    with pytest.raises(StartupError, match="12 heads over 4 key-value heads"):
        shard_heads("x", 12, 4, 0, 6)  # six ranks over four heads: neither partition nor replication


def test_supported_tp_sizes() -> None:
    assert supported_tp_sizes(14, 2, 4864) == [1, 2]
    assert supported_tp_sizes(8, 4, 96) == [1, 2, 4, 8]
    assert supported_tp_sizes(12, 4, 24) == [1, 2, 4, 12]
    assert supported_tp_sizes(8, 1, 12) == [1, 2, 4]


def test_vocabulary_shards_tile_the_vocabulary() -> None:
    for vocab in (1, 7, 8, 9, 151_936):
        for size in (1, 2, 3, 8):
            shards = [shard_vocab(vocab, rank, size) for rank in range(size)]
            assert len({local for _, local, _ in shards}) == 1
            owned = [start + offset for start, _, real in shards for offset in ({0, real - 1} if real else ())]
            assert sum(real for _, _, real in shards) == vocab and max(owned) == vocab - 1


def test_a_scalar_is_whole_on_every_rank() -> None:
    assert TensorSpec("beta", ()).local_shape(4) == ()
