"""What verify calls the tensors of a model, in the order they are computed, and which part of each a rank holds.

Torch-free. The names are those of `taps.py`; both sides of a comparison use them.
"""

from dataclasses import dataclass

from workers.layers.decoder_spec import DecoderSpec
from workers.layers.shards import shard_evenly, shard_heads, shard_vocab

BEFORE = ("embedding",)
LAYER = (
    "input_norm", "q", "k", "v", "q_rope", "k_rope", "attention", "o_proj", "mid_residual",
    "mlp_norm", "gate_up", "mlp", "residual",
)  # fmt: skip
AFTER = ("final_norm", "logits")
_QUERY_HEADS = ("q", "q_rope", "attention")
_KV_HEADS = ("k", "v", "k_rope")
# Results of a sum over ranks, or of what every rank does alike: the same bits everywhere.
REPLICATED = frozenset(
    {"embedding", "input_norm", "o_proj", "mid_residual", "mlp_norm", "mlp", "residual", "final_norm"}
)


@dataclass(frozen=True, slots=True)
class Part:
    """Columns `start` to `stop` of the whole tensor, `group` of them belonging together (a head), or all."""

    start: int
    stop: int
    group: int

    @property
    def width(self) -> int:
        return self.stop - self.start


def tensor_names(num_layers: int) -> list[str]:
    """All of them, first computed first."""
    layers = [f"{layer}.{tensor}" for layer in range(num_layers) for tensor in LAYER]
    return [*BEFORE, *layers, *AFTER]


def split(name: str) -> tuple[int | None, str]:
    """`"3.q"` -> (3, "q"); `"logits"` -> (None, "logits")."""
    layer, _, tensor = name.rpartition(".")
    return (int(layer), tensor) if layer else (None, tensor)


def part_of(tensor: str, spec: DecoderSpec, rank: int, size: int) -> Part:
    """What `rank` of `size` holds of `tensor`, a name without its layer."""
    if tensor in _QUERY_HEADS or tensor in _KV_HEADS:
        shard = shard_heads("attention", spec.num_heads, spec.num_kv_heads, rank, size)
        first, count = (
            (shard.first_head, shard.num_heads) if tensor in _QUERY_HEADS else (shard.first_kv_head, shard.num_kv_heads)
        )
        return Part(first * spec.head_dim, (first + count) * spec.head_dim, spec.head_dim)
    if tensor == "gate_up":
        local = shard_evenly("mlp", "intermediate size", spec.intermediate_size, size)
        return Part(rank * local, (rank + 1) * local, local)
    if tensor == "logits":
        start, _, real = shard_vocab(spec.vocab_size, rank, size)
        return Part(start, start + real, max(1, real))
    return Part(0, spec.hidden_size, spec.hidden_size)
