"""`config.json` -> `DecoderSpec`: every family against transformers, and errors that name the key."""

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedModel

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import QueryScale, RopeSpec
from oarlock.workers.layers.decoder_spec import FUSED_MODULES, DecoderSpec, is_ignorable, tensor_shapes
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.model_files.located import LocatedTensor, TensorEntry
from oarlock.workers.models.registry import describe
from tests.golden.tiny_models import DESCRIBED, FAMILIES, tiny_model

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    """Config that save_pretrained would write."""
    model = tiny_model(family, **overrides)
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def fused_where(state: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """`wanted` in the layout of `state`: Phi-3's parts stacked, all others as they are."""
    for fused in [name for name in state if any(f"{part}." in name for part in FUSED_MODULES)]:
        whole = next(part for part in FUSED_MODULES if part in fused)
        shapes = [wanted.pop(fused.replace(whole, part)) for part in FUSED_MODULES[whole]]
        wanted[fused] = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return wanted


def stored_shapes(model: PreTrainedModel, spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's tensors under our names, whose parts are apart if heads have theirs together."""
    entries = {name: TensorEntry("F32", tuple(tensor.shape), 0, 0) for name, tensor in model.state_dict().items()}
    located = {name: LocatedTensor(Path(), entry) for name, entry in entries.items()}
    return {name: one.entry.shape for _, name, one in spec.names.tensors(located)}


@pytest.mark.parametrize("family", [*FAMILIES, *DESCRIBED])
@pytest.mark.parametrize("tied", [False, True])
def test_tensor_names_and_shapes_are_transformers_own(family: str, tied: bool) -> None:
    extra = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True},
             "gemma2": {"attention_bias": True}, "gemma3_text": {"attention_bias": True},
             "arcee": {"attention_bias": True}, "nemotron": {"attention_bias": True, "mlp_bias": True},
             "olmo": {"attention_bias": True},
             "olmo2": {"attention_bias": True}, "cohere2": {"attention_bias": True}, "ernie4_5": {"use_bias": True},
             "granite": {"attention_bias": True, "mlp_bias": True}}.get(family, {})  # fmt: skip
    model = tiny_model(family, tie_word_embeddings=tied, **extra)
    spec = describe({**model.config.to_dict(), "architectures": [type(model).__name__]})
    state = stored_shapes(model, spec)
    wanted = fused_where(state, tensor_shapes(spec))
    left = state.keys() - wanted.keys()
    assert all(is_ignorable(spec, name) for name in left)
    assert wanted == {name: shape for name, shape in state.items() if name not in left}
    served = [parameter for name, parameter in model.named_parameters() if not is_ignorable(spec, name)]
    assert spec.num_parameters == sum(parameter.numel() for parameter in served)


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("LlamaForCausalLM", "llama"), ("MistralForCausalLM", "mistral"), ("Qwen2ForCausalLM", "qwen2"),
     ("Qwen3ForCausalLM", "qwen3"), ("Gemma2ForCausalLM", "gemma2"), ("Gemma3ForCausalLM", "gemma3_text"),
     ("Phi3ForCausalLM", "phi3"), ("CwmForCausalLM", "cwm"), ("Emu3ForCausalLM", "emu3_text_model"),
     ("Ernie4_5ForCausalLM", "ernie4_5"), ("Exaone4ForCausalLM", "exaone4"), ("GemmaForCausalLM", "gemma"),
     ("Glm4ForCausalLM", "glm4"), ("GlmForCausalLM", "glm"), ("GraniteForCausalLM", "granite"),
     ("GraniteSWAForCausalLM", "granite_swa"), ("HeliumForCausalLM", "helium"),
     ("HyperCLOVAXForCausalLM", "hyperclovax"),
     ("IQuestCoderForCausalLM", "iquestcoder"), ("InternLM3ForCausalLM", "internlm3"),
     ("MinistralForCausalLM", "ministral"), ("Olmo3ForCausalLM", "olmo3"),
     ("Phi4MultimodalForCausalLM", "phi4_multimodal"), ("SeedOssForCausalLM", "seed_oss"),
     ("SmolLM3ForCausalLM", "smollm3"), ("StableLmForCausalLM", "stablelm"),
     ("VaultGemmaForCausalLM", "vaultgemma"), ("CohereForCausalLM", "cohere"), ("MixtralForCausalLM", "mixtral")],
)  # fmt: skip
def test_missing_config_values_are_the_defaults_of_transformers(architecture: str, family: str) -> None:
    sparse = {**BASE, "architectures": [architecture], "num_attention_heads": 32, "hidden_size": 256,
              "num_hidden_layers": 5}  # fmt: skip
    if family == "helium":  # whose heads together are as wide as its rows
        sparse |= {"num_attention_heads": 20, "hidden_size": 2560}
    theirs = AutoConfig.for_model(family, **sparse)
    ours = describe(sparse)
    head_dim = getattr(theirs, "head_dim", None) or 256 // 32
    assert ours.attentions[0].num_kv_heads == theirs.num_key_value_heads
    assert ours.attentions[0].head_dim == head_dim
    assert ours.norm.eps == (getattr(theirs, "rms_norm_eps", None) or theirs.layer_norm_eps)
    assert ours.default_length == ours.longest_length == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 5
    window = getattr(theirs, "sliding_window", None)
    assert windows_of(ours) == [window if kind == "sliding_attention" else None for kind in kinds]
    rotated = [kind == "sliding_attention" or family != "exaone4" for kind in kinds]
    rotated = getattr(theirs, "no_rope_layers", rotated)
    tables = [theirs.rope_parameters.get(kind, theirs.rope_parameters) for kind in kinds]
    for layer, is_rotated, table in zip(ours.layers, rotated, tables, strict=True):
        rope = layer.attention.rope
        assert (rope is not None) == is_rotated
        assert rope is None or (rope.kind, rope.theta) == (table["rope_type"], table["rope_theta"])
        assert rope is None or rope.rotary_dim == int(head_dim * table.get("partial_rotary_factor", 1.0))
    usual = (getattr(theirs, "query_pre_attn_scalar", None) or head_dim) ** -0.5
    assert ours.attentions[0].scale == getattr(theirs, "attention_multiplier", usual)
    assert ours.attentions[0].softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.logit_scale == getattr(theirs, "logit_scale", 1.0)
    assert ours.attentions[0].qkv_bias == getattr(theirs, "attention_bias", family == "qwen2")
    mlp: Any = ours.layers[0].branches[-1].sublayer
    assert mlp.activation == ("gelu_tanh" if "gemma" in family else "silu")


@pytest.mark.parametrize(
    ("architecture", "family", "eps", "activation"),
    [("ArceeForCausalLM", "arcee", "rms_norm_eps", "relu2"), ("NemotronForCausalLM", "nemotron", "norm_eps", "relu2"),
     ("Jais2ForCausalLM", "jais2", "layer_norm_eps", "relu2"),
     ("Starcoder2ForCausalLM", "starcoder2", "norm_epsilon", "gelu_tanh"), ("OlmoForCausalLM", "olmo", None, "silu")],
)  # fmt: skip
def test_missing_values_of_models_with_other_norms_and_mlps(
    architecture: str, family: str, eps: str | None, activation: str
) -> None:
    sparse = {**BASE, "architectures": [architecture], "num_attention_heads": 16, "hidden_size": 128}
    theirs, ours = AutoConfig.for_model(family, **sparse), describe(sparse)
    assert ours.attentions[0].num_kv_heads == (theirs.num_key_value_heads or 16)
    assert ours.norm.eps == (1e-5 if eps is None else getattr(theirs, eps))
    assert ours.default_length == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    rope = ours.attentions[0].rope
    assert rope.theta == theirs.rope_parameters["rope_theta"]
    assert rope.rotary_dim == 8 * theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    has_bias = getattr(theirs, "use_bias", False) or theirs.to_dict().get("attention_bias", False)
    assert ours.attentions[0].qkv_bias == ours.attentions[0].o_bias == has_bias
    assert ours.layers[0].mlp.bias == (getattr(theirs, "use_bias", False) or theirs.to_dict().get("mlp_bias", False))
    assert ours.layers[0].mlp.activation == activation and windows_of(ours) == [None] * 3
    assert ours.attentions[0].clip_qkv is None


def windows_of(spec: DecoderSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def ropes_of(spec: DecoderSpec) -> list[RopeSpec]:
    return [layer.attention.rope for layer in spec.layers if layer.attention.rope is not None]


def test_windows_follow_the_familys_rule() -> None:
    qwen = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    assert windows_of(describe(config_of("qwen2", **qwen))) == [None, None, 16]
    assert windows_of(describe(config_of("qwen2", **{**qwen, "use_sliding_window": False}))) == [None] * 3
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows_of(describe(config_of("qwen3", **qwen, layer_types=kinds))) == [16, None, 16]
    assert windows_of(describe(config_of("mistral", sliding_window=None))) == [None] * 3
    mistral = {**BASE, "architectures": ["MistralForCausalLM"]}
    assert windows_of(describe(mistral)) == [4096] * 3
    assert windows_of(describe({**mistral, "sliding_window": None})) == [None] * 3


def test_gemma_alternates_and_says_so_in_either_form() -> None:
    gemma = {**BASE, "num_key_value_heads": 4, "num_hidden_layers": 8, "sliding_window": 16}
    two = describe({**gemma, "architectures": ["Gemma2ForCausalLM"]})
    assert windows_of(two) == [16, None] * 4 and len(set(ropes_of(two))) == 1
    three = {**gemma, "architectures": ["Gemma3ForCausalLM"]}
    old = describe({**three, "sliding_window_pattern": 3, "rope_theta": 5e5, "rope_local_base_freq": 2e4,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0}})  # fmt: skip
    assert windows_of(old) == [16, 16, None] * 2 + [16, 16]
    new = describe({**three, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2
                    + ["sliding_attention"] * 2, "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}})  # fmt: skip
    assert new == old
    assert [(rope.theta, rope.factor) for rope in ropes_of(old)[:3]] == [(2e4, 1.0), (2e4, 1.0), (5e5, 8.0)]
    off = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "architectures": ["Gemma2ForCausalLM"]}
    assert (describe(gemma | off).attentions[0].softcap, describe(gemma | off).logit_softcap) == (None, None)


PHI: dict[str, Any] = {**BASE, "architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 1024,
                       "original_max_position_embeddings": 256}  # fmt: skip
LONGROPE: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def test_phi_rotates_in_part_and_by_the_length_it_serves() -> None:
    spec = describe({**PHI, "rope_scaling": LONGROPE})
    assert (spec.default_length, spec.longest_length) == (256, 1024)
    assert ropes_of(spec)[0].attention_factor == pytest.approx((1 + math.log(4) / math.log(256)) ** 0.5)
    assert [ropes_of(spec.for_length(length))[0].stretched for length in (256, 257)] == [False, True]
    for name in ("su", "yarn"):  # what early configs called it
        assert describe({**PHI, "rope_scaling": LONGROPE | {"type": name}}) == spec
    short = LONGROPE | {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    assert ropes_of(describe({**PHI, "partial_rotary_factor": 0.75, "rope_scaling": short}))[0].rotary_dim == 6
    # Phi-3's own key, or its default of 4096, stands above what the table says.
    inner = {key: value for key, value in PHI.items() if key != "original_max_position_embeddings"}
    table = LONGROPE | {"original_max_position_embeddings": 256}
    assert describe({**inner, "rope_scaling": table}).attentions[0].rope.original_max_positions == 4096
    # Every other family reads LongRoPE too, from the table.
    assert describe({**BASE, "rope_scaling": table}).attentions[0].rope.long_factors == (2.0,) * 4


def test_lengths_a_model_reaches() -> None:
    def lengths(**rope: Any) -> tuple[int, int]:
        spec = describe({**BASE, "max_position_embeddings": 1000, "rope_scaling": rope or None})
        return spec.default_length, spec.longest_length

    assert lengths() == (1000, 1000)
    assert lengths(rope_type="linear", factor=4.0) == (1000, 4000)
    assert lengths(type="dynamic", factor=2.0) == (1000, 2000)
    assert lengths(type="yarn", factor=4.0, original_max_position_embeddings=1000) == (4000, 4000)
    assert lengths(type="yarn", original_max_position_embeddings=250) == (1000, 1000)  # factor from the ratio


def test_windows_and_rotation_of_layers_follow_the_familys_rule() -> None:
    five = {**BASE, "num_hidden_layers": 5, "num_key_value_heads": 4, "sliding_window": 16}
    smollm = {**five, "architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": True}
    assert windows_of(describe(smollm)) == [None, None, None, 16, None]
    assert windows_of(describe({**smollm, "no_rope_layers": [0, 1, 1, 0, 1, 1]})) == [16, None, None, 16, None]
    assert windows_of(describe({**smollm, "use_sliding_window": False})) == [None] * 5
    exaone = describe({**five, "architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": 2})
    assert windows_of(exaone) == [16, None, 16, None, 16] and len(ropes_of(exaone)) == 3
    plain = describe({**five, "architectures": ["Exaone4ForCausalLM"], "sliding_window": None})
    assert windows_of(plain) == [None] * 5 and len(ropes_of(plain)) == 5
    ministral = {**five, "architectures": ["MinistralForCausalLM"]}
    assert windows_of(describe(ministral)) == [16] * 5
    assert windows_of(describe({**ministral, "sliding_window": None})) == [None] * 5
    bases = {"architectures": ["GraniteSWAForCausalLM"], "layer_rope_theta": [5e5, 0, 1e4, 0.0, 7]}
    assert [rope.theta for rope in ropes_of(describe({**five, **bases}))] == [5e5, 1e4, 7.0]


def test_olmo3_stretches_the_layers_without_window_only() -> None:
    old = {**BASE, "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 4, "rope_theta": 500000,
           "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}}  # fmt: skip
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    tables = {"full_attention": {**old["rope_scaling"], "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    assert describe(old) == describe({**new, "rope_parameters": tables})
    assert [rope.kind for rope in ropes_of(describe(old))] == ["default", "default", "default", "yarn"]


def test_phi4_multimodal_leaves_its_encoders_and_adapters_unread() -> None:
    spec = describe({**BASE, "architectures": ["Phi4MMForCausalLM"], "num_key_value_heads": 4})
    layer = "model.layers.2.self_attn.qkv_proj"
    assert spec.names.rename(f"{layer}.base_layer.weight") == f"{layer}.weight"
    for name in (f"{layer}.lora_A.vision.weight", f"{layer}.lora_B.speech.weight", "model.embed_tokens_extend.audio.x"):
        assert is_ignorable(spec, name)
    stored = describe({**BASE, "architectures": ["Phi4MultimodalForCausalLM"], "num_key_value_heads": 4})
    assert not is_ignorable(stored, f"{layer}.lora_A.vision.weight") and not is_ignorable(spec, f"{layer}.bias")


def test_the_declared_dtype_is_kept() -> None:
    assert describe({**BASE, "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert describe({**BASE, "dtype": "float16"}).dtype == "float16"
    assert describe(BASE).dtype is None


_GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 4}
_HUNYUAN: dict[str, Any] = {**BASE, "architectures": ["HunYuanDenseV1ForCausalLM"]}
_HUNYUAN_MOE: dict[str, Any] = {**BASE, "architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4}
_LLAMA4: dict[str, Any] = {**BASE, "architectures": ["Llama4ForCausalLM"], "num_key_value_heads": 4}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": (
        {"architectures": ["RwkvForCausalLM"]},
        "'RwkvForCausalLM' is not supported. `oarlock models --supported` lists",
    ),
    "architecture with a similar name": (
        {"architectures": ["QWEN3ForTokenClassification"]},
        "'QWEN3ForTokenClassification' is not supported. Supported, with a similar name: Qwen3ForCausalLM, ",
    ),
    "no architecture": ({"architectures": None}, "names no architecture"),
    "architecture of another type": ({"architectures": [["x"]]}, "not supported"),
    "missing size": ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
    "size as text": ({"vocab_size": "100"}, "vocab_size must be a positive integer, got '100'"),
    "size as boolean": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "negative size": ({"intermediate_size": -1}, "intermediate_size"),
    "uneven kv heads": ({"num_key_value_heads": 3}, "8 attention heads cannot share 3"),
    "odd head": ({"head_dim": 7}, "head_dim = 7"),
    "heads of another width": (
        {"architectures": ["Cohere2ForCausalLM"], "head_dim": 16},
        "head_dim = 16",
    ),
    "layers of a window without one": (
        {"architectures": ["Cohere2ForCausalLM"], "sliding_window": None},
        "sliding_window = None",
    ),
    "one after the other": (
        {"architectures": ["Cohere2ForCausalLM"], "use_parallel_block": False},
        "use_parallel_block = False",
    ),
    "a norm for each head": ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "use_qk_norm = True"),
    "queries that are clipped": ({"architectures": ["Olmo2ForCausalLM"], "clip_qkv": 8.0}, "clip_qkv = 8.0"),
    "limit of zero": ({"architectures": ["OlmoForCausalLM"], "clip_qkv": 0.0}, "clip_qkv must be a positive number"),
    "windows of StarCoder 2": (
        {"architectures": ["Starcoder2ForCausalLM"], "num_key_value_heads": 4, "layer_types": ["full_attention"] * 3},
        "layer_types",
    ),
    "activation": ({"hidden_act": "relu"}, "hidden_act = 'relu'.*silu"),
    "activation without a gate": (
        {"architectures": ["ArceeForCausalLM"], "hidden_act": "silu"},
        "hidden_act = 'silu'.*gelu.*relu2",
    ),
    "flag as text": ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
    "theta": ({"rope_theta": float("nan")}, "rope_theta must be a finite number"),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn'"),
    "rope kind": ({"rope_scaling": {"type": "axial", "factor": 2}}, "rope type = 'axial'"),
    "rope key": ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    "rope of another type": ({"rope_scaling": [2.0]}, r"rope_scaling = \[2.0\]"),
    "rope factor": ({"rope_scaling": {"type": "linear"}}, "rope setting factor must be a positive number, got None"),
    "llama3 without ends": ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "partial rotation inside": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    "experts": ({"num_local_experts": 8}, "num_local_experts = 8"),
    "softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "bidirectional": ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    "attention to later tokens": ({"is_causal": False}, "is_causal = False"),
    "query scalar": ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar = 256"),
    "gemma 3 attention softcap": (
        {"architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 4, "attn_logit_softcapping": 50.0},
        "attn_logit_softcapping = 50.0",
    ),
    "gemma 3 flat rope": ({**_GEMMA3, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = "),
    "gemma 3 rope of another type": ({**_GEMMA3, "rope_scaling": [1]}, "rope_scaling = "),
    "gemma 2 without window": (
        {"architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 4, "sliding_window": None},
        "sliding_window = None",
    ),
    "gemma activation": ({**_GEMMA3, "hidden_activation": "relu"}, "hidden_activation = 'relu'"),
    "a norm for each head of StableLM": (
        {"architectures": ["StableLmForCausalLM"], "num_key_value_heads": 8, "qk_layernorm": True},
        "qk_layernorm = True",
    ),
    "heads of Helium narrower than rows": (
        {"architectures": ["HeliumForCausalLM"], "num_key_value_heads": 8, "head_dim": 4},
        "head_dim = 4.*hidden_size = 64",
    ),
    "positions of Ernie that are divided": (
        {"architectures": ["Ernie4_5_ForCausalLM"], "compression_ratio": 2.0},
        "compression_ratio = 2.0",
    ),
    "one bias of InternLM 3": (
        {"architectures": ["InternLM3ForCausalLM"], "num_key_value_heads": 8, "qkv_bias": True},
        "attention_bias = True.*qkv_bias",
    ),
    "a window of SmolLM 3 that is switched off": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "num_key_value_heads": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention"] * 3,
        },
        "use_sliding_window = False",
    ),
    "rotated layers of another number": (
        {"architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 8, "no_rope_layers": [1, 0]},
        r"no_rope_layers = \[1, 0\]",
    ),
    "a negative base of one layer": (
        {"architectures": ["GraniteSWAForCausalLM"], "num_key_value_heads": 8, "layer_rope_theta": [1e4, 0, -1]},
        "layer_rope_theta must be a positive number",
    ),
    "one table for all layers of Compass": (
        {"architectures": ["CohereCompassForCausalLM"], "rope_parameters": {"rope_theta": 1e4}},
        "rope_parameters = .*for full_attention",
    ),
    "another base of OLMo 3": ({"architectures": ["Olmo3ForCausalLM"], "rope_theta": 1e4}, "rope_theta = 10000.0"),
    "Gemma with two activations": (
        {"architectures": ["GemmaForCausalLM"], "num_key_value_heads": 8, "hidden_activation": "gelu"},
        "hidden_activation = 'gelu'",
    ),
    "phi with biases": ({"architectures": ["Phi3ForCausalLM"], "attention_bias": True}, "attention_bias = True"),
    "phi with linear rope": (
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope type = 'linear'",
    ),
    "phi with odd rotation": (
        {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.4},
        "partial_rotary_factor = 0.4",
    ),
    "longrope of another length": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}},
        "short_factor must be a list of 4 numbers, got a list of 3",
    ),
    "longrope of another type": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": ["x"] * 4}},
        "long_factor must be a positive number, got 'x'",
    ),
    "ministral 3 layer types": (
        {"architectures": ["Ministral3ForCausalLM"], "layer_types": ["full_attention"] * 3},
        "layer_types = ",
    ),
    "ministral 3 query scale without a period": (
        {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": {"llama_4_scaling_beta": 0.1}},
        "rope setting llama_4_scaling_beta = 0.1 .*",
    ),
    "hunyuan without norms": ({**_HUNYUAN, "use_qk_norm": False}, "use_qk_norm = False"),
    "hunyuan with latent attention": ({**_HUNYUAN, "use_mla": True, "kv_lora_rank": 512}, "use_mla = True"),
    "hunyuan with scaled experts": ({**_HUNYUAN_MOE, "routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
    "hunyuan with other widths": ({**_HUNYUAN_MOE, "moe_intermediate_size": [32] * 3}, "moe_intermediate_size = 32"),
    "hunyuan with layers that differ": ({**_HUNYUAN_MOE, "moe_topk": [2, 2, 3]}, r"moe_topk = \[2, 2, 3\]"),
    "hunyuan alpha of another kind": (
        {**_HUNYUAN, "rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 50.0}},
        "rope setting alpha = 50.0",
    ),
    "afmoe with groups": ({"architectures": ["AfmoeForCausalLM"], "n_group": 4}, "n_group = 4"),
    "afmoe with softmax": ({"architectures": ["AfmoeForCausalLM"], "score_func": "softmax"}, "score_func = 'softmax'"),
    "afmoe without window": ({"architectures": ["AfmoeForCausalLM"], "sliding_window": None}, "sliding_window = None"),
    "llama 4 without chunks": ({**_LLAMA4, "attention_chunk_size": None}, "attention_chunk_size = None"),
    "llama 4 with windows": ({**_LLAMA4, "layer_types": ["sliding_attention"] * 3}, "layer_types = "),
    "llama 4 rotated in part": ({**_LLAMA4, "no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\]"),
    "llama 4 layers with experts": ({**_LLAMA4, "moe_layers": ["1"]}, "moe_layers = "),
    "longrope factors elsewhere": ({"rope_scaling": {"type": "default", "long_factor": [1.0]}}, "long_factor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_would_change_results_are_refused_by_name(what: str) -> None:
    change, message = REFUSED[what]
    with pytest.raises(StartupError, match=message) as error:
        describe({**BASE, **change})
    assert error.value.exit_code == 3 and error.value.fix


def test_foreign_layer_types_are_refused() -> None:
    for architecture in ("MistralForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM", "Gemma2ForCausalLM"):
        config = {**BASE, "architectures": [architecture], "num_key_value_heads": 4}
        with pytest.raises(StartupError, match="layer_types"):
            describe({**config, "layer_types": ["chunked_attention"] * 3})


def test_llama_4_rotates_chunked_layers_and_scales_the_queries_of_the_others() -> None:
    config = {**_LLAMA4, "num_hidden_layers": 5, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    spec = describe({**config, "attention_chunk_size": 100, "floor_scale": 9, "attn_scale": 0.2})
    kinds = [layer.attention for layer in spec.layers]
    assert [kind.chunk for kind in kinds] == [100, 100, 100, None, 100]
    assert [group.memory.span for group in spec.groups] == [100, None]
    assert [kind.rope is not None and kind.rope.interleaved for kind in kinds] == [True, True, True, False, True]
    assert [kind.query_scale for kind in kinds] == [None, None, None, QueryScale(0.2, 9, 1), None]
    assert [kind.qk_norm is not None and kind.norms_after_rotation for kind in kinds] == [
        kind.rope is not None for kind in kinds
    ]
    assert not any("norm" in name for name in tensor_shapes(spec) if "self_attn" in name)
    experts = [layer.branches[1].sublayer for layer in spec.layers]
    assert [isinstance(one, ExpertsSpec) and one.weighs_inputs for one in experts] == [False, True, False, True, False]
    assert spec.layers[0].mlp.intermediate_size == 16384
    everywhere = describe({**config, "no_rope_layers": [1] * 5, "attention_chunk_size": 100})
    assert [group.memory.span for group in everywhere.groups] == [100]
    assert describe({**config, "attn_temperature_tuning": 4}) == describe(config)
    plain = describe({**config, "attn_temperature_tuning": False, "use_qk_norm": False})
    assert all(layer.attention.query_scale is layer.attention.qk_norm is None for layer in plain.layers)


def test_hunyuan_stretches_its_base_and_may_list_a_number_for_each_layer() -> None:
    rope = {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    spec = describe({**_HUNYUAN, "head_dim": 32, "rope_scaling": rope})
    assert spec.attentions[0].rope == RopeSpec("default", 10000.0 * 50.0 ** (32 / 30), 32)
    assert spec.attentions[0].norms_after_rotation
    assert describe(_HUNYUAN).attentions[0].rope == RopeSpec("default", 1e4, 8)
    listed = {"moe_topk": [2] * 3, "num_experts": [4] * 3, "num_shared_expert": [1] * 3}
    moe = describe({**_HUNYUAN_MOE, **listed, "moe_intermediate_size": [96] * 3})
    assert moe == describe({**_HUNYUAN_MOE, "moe_topk": 2, "num_experts": 4, "use_mla": False, "kv_lora_rank": 512})
    assert moe.layers[0].branches[1].sublayer.router.top_k == 2


def test_afmoe_rotates_and_windows_the_same_layers() -> None:
    config = {**BASE, "architectures": ["AfmoeForCausalLM"], "num_hidden_layers": 5, "mup_enabled": True}
    spec = describe({**config, "sliding_window": 9, "num_dense_layers": 2})
    assert windows_of(spec) == [9, 9, 9, None, 9] and spec.embedding_scale == 8.0
    assert [layer.attention.rope is None for layer in spec.layers] == [False, False, False, True, False]
    assert all(layer.attention.output_gate for layer in spec.layers)
    assert [isinstance(layer.branches[1].sublayer, ExpertsSpec) for layer in spec.layers] == [False] * 2 + [True] * 3


def test_ministral_3_scales_queries_unless_its_factor_is_zero() -> None:
    config = {**BASE, "architectures": ["Ministral3ForCausalLM"]}
    assert describe(config).attentions[0].query_scale == QueryScale(0.1, 16384)
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "max_position_embeddings": 128}
    for beta, scale in ((0.3, QueryScale(0.3, 64)), (0.0, None), (None, None)):
        found = describe({**config, "rope_parameters": {**rope, "llama_4_scaling_beta": beta}})
        assert found.attentions[0].query_scale == scale and found.attentions[0].rope.kind == "yarn"


def test_harmless_keys_are_no_obstacle() -> None:
    spec = describe({**BASE, "pretraining_tp": 2, "use_cache": False, "transformers_version": "4.37.0", "my_note": 1})
    assert isinstance(spec, DecoderSpec)
