"""GPT-Neo and GPT-J: defaults of transformers, the kinds of layers, refusals, and checkpoints with causal masks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from oarlock.base.errors import StartupError
from oarlock.workers.model_files.checkpoint import SINGLE_FILE, Checkpoint
from oarlock.workers.models.registry import describe, read_spec
from tests.golden.tiny_models import make_tiny

BASE = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "rotary_dim": 4}
NEO, GPTJ = ({**BASE, "architectures": [name]} for name in ("GPTNeoForCausalLM", "GPTJForCausalLM"))


@pytest.mark.parametrize(("architecture", "family"), [("GPTNeoForCausalLM", "gpt_neo"), ("GPTJForCausalLM", "gptj")])
def test_missing_values_are_the_defaults_of_transformers(architecture: str, family: str) -> None:
    theirs = AutoConfig.for_model(family)
    sizes = {"vocab_size": theirs.vocab_size, "hidden_size": theirs.hidden_size}
    ours = describe({**sizes, "architectures": [architecture]})
    attention, mlp = ours.attentions[0], ours.layers[0].mlp
    assert (ours.num_layers, attention.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (mlp.intermediate_size, mlp.activation, mlp.bias) == (4 * theirs.hidden_size, "gelu_tanh", True)
    assert ours.norm.eps == theirs.layer_norm_epsilon and ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.default_length == ours.longest_length == theirs.max_position_embeddings
    assert theirs.activation_function == "gelu_new"
    if family == "gptj":
        assert attention.rope is not None and attention.rope.interleaved and ours.head_bias
        assert (attention.rope.rotary_dim, attention.o_bias) == (theirs.rotary_dim, False)
    else:
        windows = [theirs.window_size if kind == "local" else None for kind in theirs.attention_layers]
        assert [layer.attention.window for layer in ours.layers] == windows
        assert (attention.rope, attention.scale, attention.o_bias, attention.qkv_bias) == (None, 1.0, True, False)


def test_the_kind_of_each_layer() -> None:
    def windows(**changes: Any) -> list[int | None]:
        return [layer.attention.window for layer in describe({**NEO, "window_size": 5, **changes}).layers]

    assert windows() == windows(attention_types=[[["global", "local"], 2]]) == [None, 5, None, 5]
    assert windows(attention_layers=["local"] * 3 + ["global"], attention_types=[[["global"], 4]]) == [5, 5, 5, None]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**NEO, "attention_types": [[["local"], 4]]}, "attention_types = .*Give attention_layers"),
        ({**NEO, "attention_layers": ["global"] * 3}, "attention_layers = .*4 num_hidden_layers"),
        ({**NEO, "attention_layers": ["sparse"] * 4}, "attention_layers = .*global or local"),
        ({**NEO, "num_hidden_layers": 3}, "attention_layers = .*3 num_hidden_layers"),
        ({**NEO, "num_layers": 2}, "num_layers and num_hidden_layers differ"),
        ({**NEO, "num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({**NEO, "activation_function": "silu"}, "activation_function = 'silu'"),
        ({**GPTJ, "rotary_dim": 10}, "rotary_dim = 10.*at most head_dim, which is 8"),
        ({**GPTJ, "rotary_dim": 3}, "rotary_dim = 3"),
        ({**GPTJ, "rotary_dim": None}, "rotary_dim = None"),
        ({**GPTJ, "rope_scaling": {"type": "yarn", "factor": 4}}, "rope type = 'yarn'"),
    ],
)
def test_other_settings_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        describe(config)


@pytest.mark.parametrize(("family", "inside"), [("gpt_neo", "attn.attention"), ("gptj", "attn")])
@pytest.mark.slow
def test_masks_of_old_checkpoints_are_not_read(tmp_path: Path, family: str, inside: str) -> None:
    path = make_tiny(tmp_path, family)
    names = read_spec(str(path)).names
    before, tensors = Checkpoint.open(path, names).tensors.keys(), load_file(path / SINGLE_FILE)
    for layer in range(3):
        tensors[f"transformer.h.{layer}.{inside}.bias"] = torch.ones(1, 1, 8, 8).tril() > 0
        tensors[f"transformer.h.{layer}.{inside}.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, path / SINGLE_FILE, {"format": "pt"})
    assert Checkpoint.open(path, names).tensors.keys() == before
