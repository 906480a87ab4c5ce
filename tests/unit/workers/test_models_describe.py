"""`config.json` -> `DecoderSpec`: every family's page against transformers, and refusals that name the key."""

from typing import Any

import pytest
from transformers import AutoConfig

from tests.golden.tiny_models import FAMILIES, tiny_model
from workers.errors import StartupError
from workers.models.registry import describe
from workers.models.spec import DecoderSpec, is_ignorable, tensor_shapes

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    """What save_pretrained would write."""
    model = tiny_model(family, **overrides)
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_tensor_names_and_shapes_are_transformers_own(family: str, tied: bool) -> None:
    extra = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}.get(family, {})
    model = tiny_model(family, tie_word_embeddings=tied, **extra)
    spec = describe({**model.config.to_dict(), "architectures": [type(model).__name__]})
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wanted = tensor_shapes(spec)
    left = state.keys() - wanted.keys()
    assert all(is_ignorable(spec, name) for name in left)
    assert wanted == {name: shape for name, shape in state.items() if name not in left}
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("LlamaForCausalLM", "llama"), ("MistralForCausalLM", "mistral"), ("Qwen2ForCausalLM", "qwen2"),
     ("Qwen3ForCausalLM", "qwen3")],
)  # fmt: skip
def test_what_a_config_leaves_out_is_what_transformers_assumes(architecture: str, family: str) -> None:
    sparse = {**BASE, "architectures": [architecture], "num_attention_heads": 32, "hidden_size": 128}
    theirs = AutoConfig.for_model(family, **sparse)
    ours = describe(sparse)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 128 // 32)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.windows == (getattr(theirs, "sliding_window", None),) * 3


def test_windows_follow_the_familys_rule() -> None:
    qwen = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    assert describe(config_of("qwen2", **qwen)).windows == (None, None, 16)
    assert describe(config_of("qwen2", **{**qwen, "use_sliding_window": False})).windows == (None, None, None)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert describe(config_of("qwen3", **qwen, layer_types=kinds)).windows == (16, None, 16)
    assert describe(config_of("mistral", sliding_window=None)).windows == (None, None, None)
    mistral = {**BASE, "architectures": ["MistralForCausalLM"]}
    assert describe(mistral).windows == (4096,) * 3
    assert describe({**mistral, "sliding_window": None}).windows == (None,) * 3


def test_lengths_a_model_reaches() -> None:
    def lengths(**rope: Any) -> tuple[int, int]:
        spec = describe({**BASE, "max_position_embeddings": 1000, "rope_scaling": rope or None})
        return spec.default_length, spec.longest_length

    assert lengths() == (1000, 1000)
    assert lengths(rope_type="linear", factor=4.0) == (1000, 4000)
    assert lengths(type="dynamic", factor=2.0) == (1000, 2000)
    assert lengths(type="yarn", factor=4.0, original_max_position_embeddings=1000) == (4000, 4000)
    assert lengths(type="yarn", original_max_position_embeddings=250) == (1000, 1000)  # factor from the ratio


def test_the_declared_dtype_is_kept() -> None:
    assert describe({**BASE, "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert describe({**BASE, "dtype": "float16"}).dtype == "float16"
    assert describe(BASE).dtype is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Supported: LlamaForCausalLM"),
    "no architecture": ({"architectures": None}, "names no architecture"),
    "architecture of another type": ({"architectures": [["x"]]}, "not supported"),
    "missing size": ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
    "size as text": ({"vocab_size": "100"}, "vocab_size must be a positive integer, got '100'"),
    "size as boolean": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "negative size": ({"intermediate_size": -1}, "intermediate_size"),
    "uneven kv heads": ({"num_key_value_heads": 3}, "8 attention heads cannot share 3"),
    "odd head": ({"head_dim": 7}, "head_dim = 7"),
    "activation": ({"hidden_act": "relu"}, "hidden_act = 'relu'.*silu"),
    "flag as text": ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
    "theta": ({"rope_theta": float("nan")}, "rope_theta must be a positive number"),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn'"),
    "rope kind": ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope type = 'longrope'"),
    "rope key": ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    "rope of another type": ({"rope_scaling": [2.0]}, r"rope_scaling = \[2.0\]"),
    "rope factor": ({"rope_scaling": {"type": "linear"}}, "rope setting factor must be a positive number, got None"),
    "llama3 without ends": ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "partial rotation inside": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    "experts": ({"num_local_experts": 8}, "num_local_experts = 8"),
    "softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_change_the_mathematics_is_refused_by_name(what: str) -> None:
    change, message = REFUSED[what]
    with pytest.raises(StartupError, match=message) as error:
        describe({**BASE, **change})
    assert error.value.exit_code == 3 and error.value.fix


def test_mistral_and_qwen_refuse_foreign_layer_types() -> None:
    for architecture in ("MistralForCausalLM", "Qwen3ForCausalLM"):
        config = {**BASE, "architectures": [architecture], "num_key_value_heads": 4}
        with pytest.raises(StartupError, match="layer_types"):
            describe({**config, "layer_types": ["chunked_attention"] * 3})


def test_harmless_keys_are_no_obstacle() -> None:
    spec = describe({**BASE, "pretraining_tp": 2, "use_cache": False, "transformers_version": "4.37.0", "my_note": 1})
    assert isinstance(spec, DecoderSpec)
