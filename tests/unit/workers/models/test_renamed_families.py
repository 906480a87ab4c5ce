"""GPT-2, GPT-BigCode, OPT, Phi and GPT-NeoX: settings, and every way in which their checkpoints name tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.model_files.checkpoint import SINGLE_FILE
from oarlock.workers.models.registry import describe
from oarlock.workers.preflight import preflight
from tests.golden.paged_run import PagedRun, load_decoder
from tests.golden.tiny_models import make_tiny

ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2", "GPTBigCodeForCausalLM": "gpt_bigcode", "OPTForCausalLM": "opt",
    "PhiForCausalLM": "phi", "GPTNeoXForCausalLM": "gpt_neox", "BioGptForCausalLM": "biogpt",
}  # fmt: skip
Tensors = dict[str, Tensor]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_missing_values_are_the_defaults_of_transformers(architecture: str) -> None:
    theirs = AutoConfig.for_model(ARCHITECTURES[architecture])
    config = {
        "architectures": [architecture], "vocab_size": 100, "hidden_size": theirs.hidden_size,
        "num_hidden_layers": 2, "num_attention_heads": theirs.num_attention_heads,
    }  # fmt: skip
    inner = {"OPTForCausalLM": "ffn_dim", "GPTNeoXForCausalLM": "intermediate_size", "PhiForCausalLM":
             "intermediate_size", "BioGptForCausalLM": "intermediate_size"}.get(architecture)  # fmt: skip
    width = 4 * theirs.hidden_size if inner is None else getattr(theirs, inner)
    ours = describe(config if inner in (None, "ffn_dim") else {**config, "intermediate_size": width})
    attention, mlp = ours.attentions[0], ours.layers[0].mlp
    assert attention.num_kv_heads == (getattr(theirs, "num_key_value_heads", None) or attention.num_heads)
    assert attention.head_dim == theirs.hidden_size // theirs.num_attention_heads
    assert attention.scale == attention.head_dim**-0.5
    assert mlp.intermediate_size == width and mlp.bias and attention.qkv_bias and attention.o_bias
    act = getattr(theirs, "hidden_act", None) or theirs.activation_function
    assert mlp.activation == {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}.get(act, act)
    eps = next((getattr(theirs, key) for key in ("layer_norm_eps", "layer_norm_epsilon") if hasattr(theirs, key)), 1e-5)
    eps = 1e-5 if architecture == "BioGptForCausalLM" else eps  # its norms do not use the setting
    assert (ours.norm.kind, ours.norm.eps, ours.norm.bias) == ("layer", eps, True)
    assert ours.default_length == ours.longest_length == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    if attention.rope is None:
        assert ours.positions is not None and ours.positions.positions == theirs.max_position_embeddings
    else:
        share = theirs.rope_parameters["partial_rotary_factor"]
        assert attention.rope.rotary_dim == int(attention.head_dim * share)
        assert attention.rope.theta == theirs.rope_parameters["rope_theta"] and ours.positions is None
    assert ours.head_bias == (architecture == "PhiForCausalLM")


BASE = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 96}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention = True"),
    ("GPT2LMHeadModel", {"n_embd": 32}, "n_embd and hidden_size differ"),
    ("GPT2LMHeadModel", {"n_layer": 0}, "n_layer must be a positive integer"),
    ("GPT2LMHeadModel", {"hidden_size": 60}, "hidden_size 60 is not a multiple of num_attention_heads 8"),
    ("GPT2LMHeadModel", {"head_dim": 16}, "head_dim = 16"),
    ("GPT2LMHeadModel", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ("GPT2LMHeadModel", {"activation_function": "tanh"}, "activation_function = 'tanh'"),
    ("GPTBigCodeForCausalLM", {"num_key_value_heads": 8}, "num_key_value_heads = 8"),
    ("GPTBigCodeForCausalLM", {"multi_query": False, "num_key_value_heads": 1}, "num_key_value_heads = 1"),
    ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before = False.*350M"),
    ("OPTForCausalLM", {"word_embed_proj_dim": 32}, "word_embed_proj_dim = 32"),
    ("OPTForCausalLM", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm = True"),
    ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm = True"),
    ("PhiForCausalLM", {"partial_rotary_factor": 0.4}, "partial_rotary_factor = 0.4"),
    ("GPTNeoXForCausalLM", {"rope_theta": 5e5}, "rope_theta = 500000.0"),
    ("GPTNeoXForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
]


@pytest.mark.parametrize(("architecture", "change", "message"), REFUSED, ids=[f"{one[0]}-{one[2]}" for one in REFUSED])
def test_other_settings_are_refused_by_name(architecture: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        describe({**BASE, "architectures": [architecture], **change})


def test_values_that_differ_by_layer_or_model() -> None:
    gpt2 = {**BASE, "architectures": ["GPT2LMHeadModel"], "reorder_and_upcast_attn": True}
    by_layer = describe({**gpt2, "scale_attn_by_inverse_layer_idx": True})
    assert [layer.attention.scale for layer in by_layer.layers] == [8**-0.5 / number for number in (1, 2, 3)]
    assert describe({**gpt2, "scale_attn_weights": False}).attentions[0].scale == 1.0
    opt = describe({**BASE, "architectures": ["OPTForCausalLM"], "enable_bias": False, "max_position_embeddings": 50})
    assert not (opt.attentions[0].qkv_bias or opt.attentions[0].o_bias or opt.layers[0].mlp.bias)
    assert opt.positions is not None and (opt.positions.rows, opt.positions.first, opt.longest_length) == (52, 2, 50)
    neox = {**BASE, "architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5, "rotary_emb_base": 500}
    attention = describe(neox).attentions[0]
    assert attention.rope is not None and (attention.rope.theta, attention.rope.rotary_dim) == (500.0, 4)
    for flag in (True, False):
        assert describe({**neox, "use_parallel_residual": flag}).layers[0].lengths == ((2,) if flag else ())


def as_first_published(tensors: Tensors) -> Tensors:
    """GPT-2 without a prefix, with the causal mask of each layer."""
    found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    mask = torch.ones(1, 1, 16, 16).tril()
    return found | {f"h.{layer}.attn.bias": mask.clone() for layer in range(3)}


def with_masks(tensors: Tensors) -> Tensors:
    """GPT-NeoX with its masks and frequencies, and the head's first name."""
    head = next(name for name in tensors if name.endswith(("lm_head.weight", "embed_out.weight")))
    found = {name: tensor for name, tensor in tensors.items() if name != head} | {"embed_out.weight": tensors[head]}
    for layer in range(3):
        inside = f"gpt_neox.layers.{layer}.attention"
        found[f"{inside}.bias"] = torch.ones(1, 1, 16, 16).tril() > 0
        found[f"{inside}.masked_bias"] = torch.tensor(-1e9)
        found[f"{inside}.rotary_emb.inv_freq"] = torch.ones(1)
    return found


def of_the_base_model(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("family", "change"),
    [("gpt2", as_first_published), ("gpt_neox", with_masks), ("opt", of_the_base_model)],
    ids=lambda one: getattr(one, "__name__", one),
)
@pytest.mark.slow
def test_a_checkpoint_with_other_names_is_the_same_model(
    tmp_path: Path, family: str, change: Callable[[Tensors], Tensors]
) -> None:
    path = make_tiny(tmp_path, family, seed=3)

    def logits() -> Tensor:
        preflight(WorkerConfig(str(path), device="cpu"))
        with torch.inference_mode():
            return PagedRun(load_decoder(path, TensorParallel.solo())).step({0: list(range(3, 20))})[0]

    before, tensors = logits(), load_file(path / SINGLE_FILE)
    changed = change(tensors)
    assert changed.keys() != tensors.keys()
    save_file(changed, path / SINGLE_FILE, {"format": "pt"})
    assert torch.equal(logits(), before)


@pytest.mark.slow
def test_a_context_longer_than_the_table_is_refused(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "opt", max_position_embeddings=40)
    assert preflight(WorkerConfig(str(path), device="cpu")).max_model_len == 40
    with pytest.raises(StartupError, match="max_model_len 41 is more than the model's 40 positions"):
        preflight(WorkerConfig(str(path), device="cpu", max_model_len=41))
