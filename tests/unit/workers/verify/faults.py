"""Damage to a tensor of a checkpoint, and the cause that verify must name for it: planted one at a time.

python -m tests.unit.workers.verify.faults        # the table: tensor, damage, named cause
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = 2  # ranks
_WORDS = {0.0: "lost", 0.5: "halved", 2.0: "doubled"}


@dataclass(frozen=True)
class Damage:
    """A change of a tensor, called with it, and its description."""

    what: str
    change: Callable[[Tensor], Tensor]

    def __call__(self, weight: Tensor) -> Tensor:
        return self.change(weight)


def rows(start: int, stop: int, factor: float = 0.5) -> Damage:
    def change(weight: Tensor) -> Tensor:
        weight[start:stop] *= factor
        return weight

    return Damage(f"rows {start} to {stop - 1} {_WORDS[factor]}", change)


def columns(start: int, stop: int) -> Damage:
    def change(weight: Tensor) -> Tensor:
        weight[:, start:stop] *= 0.5
        return weight

    return Damage(f"columns {start} to {stop - 1} {_WORDS[0.5]}", change)


def swapped(size: int) -> Damage:
    """The first two heads of `size` rows."""
    return Damage(
        "its first two heads change places",
        lambda weight: torch.cat((weight[size : 2 * size], weight[:size], weight[2 * size :])),
    )


TURNS = Damage("gate and up change places", lambda both: both.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).clone())


# Tiny models: 8 heads of 8 (Qwen3: of 24) over 4 KV heads, hidden 64, intermediate 96, vocabulary 320. Rank 1 of 2
# begins at row 32 of q, 16 of k and v, 48 of gate and up, column 32 of o_proj, 48 of down_proj, id 160.
L1 = "model.layers.1"
WEIGHTS = [
    ("qwen2", f"{L1}.self_attn.q_proj.weight", rows(32, 64), f"{L1}.self_attn.q_proj.weight: the rows of rank 1"),
    ("qwen2", f"{L1}.self_attn.k_proj.weight", rows(16, 32), f"{L1}.self_attn.k_proj.weight: the rows of rank 1"),
    ("qwen2", f"{L1}.self_attn.v_proj.weight", rows(0, 16), f"{L1}.self_attn.v_proj.weight: the rows of rank 0"),
    ("qwen2", f"{L1}.self_attn.v_proj.weight", rows(0, 32), f"{L1}.self_attn.v_proj.weight: the rows of ranks 0, 1"),
    ("qwen2", f"{L1}.self_attn.q_proj.bias", rows(32, 64, 0.0), f"{L1}.self_attn.q_proj.bias: the rows of rank 1"),
    ("qwen2", f"{L1}.self_attn.k_proj.bias", rows(0, 32, 2.0), f"{L1}.self_attn.k_proj.bias: the rows of ranks 0, 1"),
    ("mistral", f"{L1}.self_attn.k_proj.weight", swapped(8), "its head 0 has the values of head 1"),
    ("qwen2", f"{L1}.self_attn.o_proj.weight", columns(32, 64), f"{L1}.self_attn.o_proj.weight: the columns of rank 1"),
    ("llama", f"{L1}.self_attn.o_proj.bias", rows(0, 64, 2.0), f"{L1}.self_attn.o_proj.bias"),
    ("qwen2", f"{L1}.mlp.gate_proj.weight", rows(48, 96), f"{L1}.mlp.gate_proj.weight: the rows of rank 1"),
    ("qwen2", f"{L1}.mlp.up_proj.weight", rows(48, 96), f"{L1}.mlp.up_proj.weight: the rows of rank 1"),
    ("llama", f"{L1}.mlp.gate_proj.weight", rows(0, 48), f"{L1}.mlp.gate_proj.weight: the rows of rank 0"),
    ("llama", f"{L1}.mlp.up_proj.weight", rows(0, 48), f"{L1}.mlp.up_proj.weight: the rows of rank 0"),
    ("qwen2", f"{L1}.mlp.down_proj.weight", columns(0, 48), f"{L1}.mlp.down_proj.weight: the columns of rank 0"),
    ("qwen2", f"{L1}.input_layernorm.weight", rows(0, 8), f"{L1}.input_layernorm"),
    ("qwen2", f"{L1}.post_attention_layernorm.weight", rows(0, 8), f"{L1}.post_attention_layernorm"),
    ("qwen2", "model.norm.weight", rows(0, 8), "model.norm.weight"),
    ("qwen2", "lm_head.weight", rows(160, 320), "lm_head.weight: the rows of rank 1"),
    ("qwen2", "model.embed_tokens.weight", rows(160, 320), "model.embed_tokens.weight: the rows of rank 1"),
    ("qwen3", f"{L1}.self_attn.k_norm.weight", rows(0, 24), f"{L1}.self_attn.k_norm"),
    ("olmo2", f"{L1}.self_attn.q_norm.weight", rows(32, 64), f"{L1}.self_attn.q_norm: its weight, or the norm of rows"),
    ("olmo2", f"{L1}.self_attn.k_proj.weight", rows(16, 32), f"{L1}.self_attn.k_proj.weight: the rows of rank 1"),
    ("olmo2", f"{L1}.post_attention_layernorm.weight", rows(0, 8), f"{L1}: post_attention_layernorm, or the addition"),
    ("cohere2", f"{L1}.input_layernorm.weight", rows(0, 8), f"{L1}.input_layernorm"),
    ("cohere2", f"{L1}.mlp.up_proj.weight", rows(48, 96), f"{L1}.mlp.up_proj.weight: the rows of rank 1"),
    ("cohere2", f"{L1}.mlp.down_proj.weight", columns(0, 48), f"{L1}.mlp.down_proj.weight: the columns of rank 0"),
    # GPT-2 stores matrices as [inputs, outputs], and GPT-NeoX q, k and v of a head together: rank 1 begins at row 96.
    ("gpt2", "transformer.wpe.weight", rows(0, 3), "model.embed_positions.weight: its rows"),
    ("gpt2", "transformer.wte.weight", rows(160, 320), "model.embed_tokens.weight: the rows of rank 1"),
    ("gpt2", "transformer.h.1.mlp.c_proj.weight", rows(48, 96), f"{L1}.mlp.down_proj.weight: the columns of rank 1"),
    ("phi", "lm_head.bias", rows(160, 320, 0.0), "lm_head.bias: the rows of rank 1"),
    ("phi", f"{L1}.self_attn.dense.bias", rows(0, 64, 2.0), f"{L1}.self_attn.o_proj.bias"),
    (
        "gpt_neox",
        "gpt_neox.layers.1.attention.query_key_value.weight",
        rows(96, 104),
        f"{L1}.self_attn.q_proj.weight: the rows of rank 1",
    ),
    ("nemotron", f"{L1}.mlp.up_proj.weight", rows(48, 96), f"{L1}.mlp.up_proj.weight: the rows of rank 1"),
    ("nemotron", f"{L1}.mlp.down_proj.weight", columns(48, 96), f"{L1}.mlp.down_proj.weight: the columns of rank 1"),
    ("nemotron", f"{L1}.input_layernorm.weight", rows(0, 8), f"{L1}.input_layernorm"),
    ("starcoder2", f"{L1}.mlp.c_fc.bias", rows(0, 48, 0.0), f"{L1}.mlp.up_proj.weight or bias: the rows of rank 0"),
    ("qwen2_moe", f"{L1}.mlp.gate.weight", rows(2, 3), f"{L1}.mlp.gate.weight: the rows of expert 2"),
    ("qwen2_moe", f"{L1}.mlp.experts.3.down_proj.weight", rows(0, 64), "expert 3 (its result is 0.5 times the right"),
    ("qwen2_moe", f"{L1}.mlp.experts.1.gate_proj.weight", rows(0, 8), f"{L1}.mlp.experts: expert 1"),
    ("qwen2_moe", f"{L1}.mlp.shared_expert.up_proj.weight", rows(0, 8), f"{L1}.mlp.shared_expert: its weights"),
    ("gpt_oss", f"{L1}.self_attn.sinks", rows(4, 5, 0.0), f"{L1}.self_attn.sinks: head 4 (its results are multiples"),
    (
        "afmoe",
        f"{L1}.self_attn.gate_proj.weight",
        rows(96, 192),
        f"{L1}.self_attn.gate_proj.weight: the rows of rank 1",
    ),
    ("afmoe", f"{L1}.mlp.expert_bias", rows(0, 3, 0.0), "other experts are chosen (mlp.expert_bias, how many"),
    (
        "nemotron_h",
        "backbone.layers.1.mixer.experts.2.down_proj.weight",
        rows(0, 64),
        "mlp.experts: experts 2 (its result is 0.5 times the right",
    ),
    ("gemma4_text", f"{L1}.layer_scalar", rows(0, 1), f"{L1}: post_per_layer_input_norm, or layer_scalar, or the"),
    ("gemma4_text", f"{L1}.router.per_expert_scale", rows(0, 7), "or not, moe.router.per_expert_scale, or the scores"),
    ("gemma4_text", "model.embed_tokens_per_layer.weight", rows(0, 320), "the inputs of the layer (model.embed_tokens"),
    ("hunyuan_v1_dense", f"{L1}.self_attn.key_layernorm.weight", rows(0, 24), f"{L1}.self_attn.k_norm: its weight"),
    # gpt-oss stores all experts as one tensor [E, K, N].
    ("gpt_oss", f"{L1}.mlp.router.bias", rows(1, 2, 0.0), f"{L1}.mlp.router.weight or bias: the rows of expert 1"),
    ("gpt_oss", f"{L1}.mlp.experts.down_proj", rows(3, 4), f"{L1}.mlp.experts: expert 3"),
    ("gpt_oss", f"{L1}.mlp.experts.gate_up_proj", TURNS, f"{L1}.mlp.experts: experts 0, 1, 2, 3, 4"),
]


def table() -> str:
    """Format the faults as a table in Markdown, without the name of the damaged layer."""
    lines = ["| tensor | damage | named as |", "|---|---|---|"]
    lines += [f"| `{tensor}` | {damage.what} | `{cause}` |" for _, tensor, damage, cause in WEIGHTS]
    return "\n".join(dict.fromkeys(line.replace("model.layers.1.", "") for line in lines))


if __name__ == "__main__":
    print(table())
