"""One look at a class without weights: its memory and tensors, or the reason why it is refused."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaForCausalLM

from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.inspection import describe_class, describe_opened
from oarlock.workers.transformers_backend.observers import Refused, register
from oarlock.workers.transformers_backend.opening import OpenClass
from oarlock.workers.transformers_backend.private_parts import PretrainedConfig

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
RECURRENT = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def look(model_type: str, architecture: str, ranks: int = 1, **settings: Any) -> ClassDescription:
    register()
    config = CONFIG_MAPPING[model_type](**{**SIZES, **settings})
    config.architectures = [architecture]
    found = describe_class(config, ranks)
    assert ClassDescription.decoded(found.encoded()) == found
    return found


def test_a_plain_class() -> None:
    found = look("llama", "LlamaForCausalLM")
    assert found.refusal is None and found.layers == 4 and found.has_plan and not found.states
    first = found.attention[0]
    assert (first.heads, first.kv_heads, first.key_width, first.value_width) == (4, 2, 16, 16)
    assert (first.module, first.window, first.has_sinks) == ("model.layers.0.self_attn", None, False)
    query = next(tensor for tensor in found.tensors if tensor.name == "model.layers.3.self_attn.q_proj.weight")
    assert query.shape == (64, 64) and query.role == "linear" and query.style == "colwise"


def test_windows_and_sinks() -> None:
    found = look("gpt_oss", "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=128)
    assert [call.window for call in found.attention] == [128, None, 128, None]
    assert all(call.has_sinks for call in found.attention)


@pytest.mark.slow
def test_recurrent_states() -> None:
    kinds = ["linear_attention", "full_attention"] * 2
    found = look("qwen3_5_text", "Qwen3_5ForCausalLM", layer_types=kinds)
    assert [call.layer for call in found.attention] == [1, 3]
    assert [(one.layer, one.is_convolution) for one in found.states] == [(0, True), (0, False), (2, True), (2, False)]
    assert found.states[0].shape[-1] == 4 and found.states[1].dtype == "float32"


@pytest.mark.slow
def test_ranks_of_a_class_with_a_plan_and_without() -> None:
    divided = look("qwen3_5_text", "Qwen3_5ForCausalLM", 2, layer_types=["linear_attention", "full_attention"] * 2)
    assert divided.ranks == 2 and all(call.is_divided for call in divided.attention)
    assert (divided.attention[0].heads, divided.attention[0].kv_heads) == (4, 2), "counts are over all ranks"
    whole = look("bert", "BertLMHeadModel", 2, is_decoder=True, max_position_embeddings=77)
    assert whole.refusal is None and not whole.has_plan and not any(call.is_divided for call in whole.attention)
    assert whole.longest_length == 77 and not any(tensor.is_float32 for tensor in whole.tensors)


@pytest.mark.slow
def test_heads_that_ranks_cannot_divide() -> None:
    found = look("llama", "LlamaForCausalLM", 4).refusal
    assert found == "it cannot be divided among 4 ranks (layer 0 has 2 heads of keys and values)"


def test_a_learned_table_limits_the_length() -> None:
    found = look("biogpt", "BioGptForCausalLM", max_position_embeddings=99)
    assert found.refusal is None and found.longest_length == 99, "its table has two more rows, which are not used"


class Own(LlamaForCausalLM):
    """A class with code around Llama's."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, past_key_values: Any = None, **others: Any
    ) -> Any:
        given = self.positions(input_ids, position_ids)
        return super().forward(input_ids, position_ids=given, past_key_values=past_key_values, **others)

    def positions(self, ids: Tensor, given: Tensor | None) -> Tensor | None:
        return given


class Counting(Own):
    def positions(self, ids: Tensor, given: Tensor | None) -> Tensor:
        return torch.arange(ids.shape[1], device=ids.device)[None]


class Ignoring(Own):
    def positions(self, ids: Tensor, given: Tensor | None) -> Tensor:
        return torch.zeros_like(ids)


class Reading(Own):
    def positions(self, ids: Tensor, given: Tensor | None) -> Tensor | None:
        self.model.layers[1].mlp.down_proj.weight.float()
        return given


class Keeping(Own):
    def positions(self, ids: Tensor, given: Tensor | None) -> Tensor | None:
        self.model.longest = max(getattr(self.model, "longest", 0), ids.shape[1])
        return given


class Drawing(Own):
    def positions(self, ids: Tensor, given: Tensor | None) -> Tensor | None:
        F.dropout(torch.ones(3, device=ids.device), 0.1)
        return given


class Stretching(Own):
    """A class that halves the positions of long rows."""

    def positions(self, ids: Tensor, given: Tensor | None) -> Tensor | None:
        return given // 2 if given is not None and ids.shape[1] > 4096 else given


class Centred(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.silu(x).chunk(2, dim=-1)
        return torch.cat([first - first.mean(self.dim, keepdim=True), second], dim=-1)


class Averaging(Own):
    dim = -1

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model.layers[1].mlp.act_fn = Centred(self.dim)


class AveragingTokens(Averaging):
    dim = 0  # of rows, of which there is one


class Choosing(Own):
    def forward(self, *given: Any, **named: Any) -> Any:
        result = super().forward(*given, **named)
        result.logits[..., 3] = float("-inf")
        return result

    forward.__signature__ = inspect.signature(Own.forward)


@pytest.mark.parametrize(
    ("kind", "ranks", "reason"),
    [
        (Counting, 1, "it counts positions by itself"),
        (Ignoring, 1, "it does not use the given positions"),
        (Choosing, 1, None),
        (Choosing, 2, "it cannot be divided among 2 ranks (its logits are changed by __setitem__)"),
        (Reading, 1, None),
        (Keeping, 1, "it keeps model.longest of one forward for the next"),
        (Drawing, 1, "it draws random numbers (dropout)"),
        (Stretching, 1, "it computes a long row in another way than a short one"),
        (Averaging, 1, None),
        (AveragingTokens, 2, None),
        (
            Averaging,
            2,
            "it cannot be divided among 2 ranks (it computes mean over all outputs of model.layers.1.mlp.gate_proj)",
        ),
    ],
)
def test_classes_with_code_of_their_own(kind: type, ranks: int, reason: str | None) -> None:
    register()
    opened = OpenClass("Own", kind, CONFIG_MAPPING["llama"](**SIZES))
    if reason is None:
        own = describe_opened(opened, ranks).own_linears
        assert len(own) == (4 if kind is Reading else 0), "all layers have the same code"
        return
    with pytest.raises(Refused) as refused:
        describe_opened(opened, ranks)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("model_type", "architecture", "settings", "reason"),
    [
        ("llama4_text", "Llama4ForCausalLM", {"num_local_experts": 2}, "its mask"),
        ("minimax_m3_vl_text", "MiniMaxM3VLTextForCausalLM", {}, ""),
        ("bart", "BartForCausalLM", {}, "it counts positions by itself"),
        ("mamba", "MambaForCausalLM", {}, "it counts positions by itself"),
        ("rwkv", "RwkvForCausalLM", {}, "it counts positions by itself"),
        ("jamba", "JambaForCausalLM", RECURRENT, "the recurrence of layer 0 forgets"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM", {}, "its convolution"),
        ("roberta", "RobertaForCausalLM", {"is_decoder": True}, "its table of positions begins after"),
        ("llama", "LlamaForCausalLM", {"rope_parameters": DYNAMIC}, "its rotary angles (dynamic) depend on"),
        ("paligemma", "PaliGemmaForConditionalGeneration", None, "its attention is not causal"),
        ("bamba", "BambaForCausalLM", {"time_step_limit": (0.1, 1.0)}, "its time steps are limited to [0.1, 1.0]"),
        ("doge", "DogeForCausalLM", {}, "its mask is changed by the class"),
        ("diffllama", "DiffLlamaForCausalLM", {}, "layer 0 has two attentions"),
        ("gptj", "GPTJForCausalLM", {}, "its attention cannot be replaced"),
        ("llama", "LlamaForTokenClassification", {}, "transformers has no such class that completes text"),
    ],
)
def test_refusals(model_type: str, architecture: str, settings: dict[str, Any] | None, reason: str) -> None:
    config = CONFIG_MAPPING[model_type]() if settings is None else None
    if config is None:
        found = look(model_type, architecture, **(settings or {}))
    else:
        config.architectures = [architecture]
        found = describe_class(config)
    assert found.refusal is not None and found.refusal.startswith(reason)
