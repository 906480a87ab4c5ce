"""Multimodal models as text models: settings as published, defaults of transformers, names of tensors, refusals."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import FUSED_MODULES, DecoderSpec
from oarlock.workers.model_files.checkpoint import SINGLE_FILE, Checkpoint
from oarlock.workers.model_files.tensor_names import NO_NAMES
from oarlock.workers.models.hf_quantization import stored_quantization
from oarlock.workers.models.hf_rope import without_sections
from oarlock.workers.models.registry import FAMILIES, describe
from oarlock.workers.models.wrapper_table import REFUSED, TEXT_PARTS, WRAPPERS
from oarlock.workers.models.wrappers import served_wrappers
from oarlock.workers.quantization.formats.checkpoint_formats import CheckpointFormats
from tests.unit.workers.models.test_invalid_values import ODD

GEMMA = "Gemma3ForConditionalGeneration"
QWEN = "Qwen2_5_VLForConditionalGeneration"
LLAVA = "LlavaForConditionalGeneration"
SERVED = served_wrappers(FAMILIES)
# The defaults of some classes make no model, such as heads of 42 elements, of which half are rotated.
POSSIBLE: dict[str, dict[str, Any]] = {
    "glm4v_moe_text": {"num_attention_heads": 32},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},  # its class makes no model of None
    "deepseek_v3": {"num_nextn_predict_layers": 1},  # which transformers writes, and names of tensors follow
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}},
}
# Gemma 4's classes have towers or none, and transformers knows no older names of its checkpoints.
_OF_GEMMA4 = ("model.vision_tower.x", "model.audio_tower.x", "model.embed_vision.x", "model.embed_audio.x")
# Tensors that belong to no text part, with the stored names of each kind of checkpoint.
OTHERS = {
    "HunYuanVLForConditionalGeneration": ("vit.layers.0.x", "model.vision_tower.layers.0.x"),
    "Idefics3ForConditionalGeneration": ("model.vision_model.encoder.x", "model.connector.modality_projection.x"),
    "SmolVLMForConditionalGeneration": ("model.vision_model.encoder.x", "model.connector.modality_projection.x"),
    "DeepseekVLForConditionalGeneration": ("model.vision_model.encoder.x", "model.aligner.linear1.x"),
    "Llama4ForConditionalGeneration": ("vision_model.model.layers.0.x", "multi_modal_projector.linear_1.x"),
    "Kimi_K25ForConditionalGeneration": ("vision_tower.x", "mm_projector.x", "model.vision_tower.x"),
    "Ovis2ForConditionalGeneration": ("model.vision_tower.x", "model.visual_embeddings_table.x"),
    "Gemma4ForConditionalGeneration": _OF_GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": (*_OF_GEMMA4, "model.vision_embedder.pos_norm.x", "vision_embedder.x"),
    "PaddleOCRVLForConditionalGeneration": ("visual.x", "mlp_AR.x", "model.visual.x", "model.projector.x"),
    **dict.fromkeys(
        (
            "CohereCompassForConditionalGeneration", "Glm4vForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration", "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        ("model.visual.blocks.0.x",),
    ),
    **dict.fromkeys(("Qwen2VLForConditionalGeneration", QWEN), ("visual.blocks.0.x", "model.visual.blocks.0.x")),
}  # fmt: skip
_OF_LLAVA = ("vision_tower.x", "multi_modal_projector.x", "model.vision_tower.x", "model.multi_modal_projector.x")


def spec_of(architecture: str, text: dict[str, Any] | None = None, **others: Any) -> DecoderSpec:
    """The spec of a wrapper with this `text_config`."""
    return describe({"architectures": [architecture], "text_config": text or {}, **others})


def text_spec(architecture: str, **config: Any) -> DecoderSpec:
    """The spec of a text model, as if it were the text part of a wrapper."""
    return describe({"architectures": [architecture], **config})


def without_names(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, names=NO_NAMES, wrapper=None)


def test_gemma_3_as_published() -> None:
    """gemma-3-4b-it: its text_config has next to nothing, and the rest is the default of the class."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    found = spec_of(GEMMA, text, model_type="gemma3", torch_dtype="bfloat16", vision_config={"hidden_size": 1152})
    whole = text | {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                    "torch_dtype": "bfloat16"}  # fmt: skip
    assert without_names(found) == text_spec("Gemma3ForCausalLM", **whole)
    assert found.wrapper == GEMMA and found.architecture == "Gemma3ForCausalLM"
    assert found.tie_word_embeddings and found.dtype == "bfloat16"
    assert (found.attentions[0].num_heads, found.attentions[0].num_kv_heads, found.vocab_size) == (8, 4, 262208)


def test_qwen_2_5_vl_as_published_without_text_config() -> None:
    config = {
        "architectures": [QWEN], "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 128000,
        "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 152064,
        "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    same = {key: value for key, value in config.items() if key not in ("architectures", "rope_scaling")}
    assert without_names(describe(config)) == text_spec("Qwen2ForCausalLM", **same)
    assert describe(config).attentions[0].rope == RopeSpec("default", 1e6, 128)
    nested = {key: same.pop(key) for key in list(same) if key not in ("vision_config", "torch_dtype")}
    moved = spec_of(QWEN, nested | {"rope_scaling": config["rope_scaling"]}, **same)
    assert moved == describe(config)


def test_qwen_3_vl_has_the_defaults_of_its_own_class() -> None:
    text = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                                       "rope_type": "default"}}  # fmt: skip
    found = spec_of("Qwen3VLForConditionalGeneration", text, tie_word_embeddings=True)
    assert found.attentions[0].rope == RopeSpec("default", 5e5, 128) and found.default_length == 128000
    assert found.tie_word_embeddings
    assert not spec_of("Qwen3VLForConditionalGeneration", text | {"tie_word_embeddings": True}).tie_word_embeddings


def test_yarn_keeps_its_settings_without_the_sections() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    with_sections = spec_of(QWEN, {"rope_scaling": yarn | {"mrope_section": [16, 24, 24]}})
    assert with_sections == spec_of(QWEN, {"rope_scaling": yarn})
    assert with_sections.attentions[0].rope.kind == "yarn" and with_sections.attentions[0].rope.factor == 4.0


def test_rotary_tables_lose_only_their_sections() -> None:
    """As HunyuanOCR has them, and Cohere Compass for each kind of layer."""
    old = {"type": "xdrope", "xdrope_section": [16, 16, 16, 16], "alpha": 1000.0, "factor": 1.0}
    assert without_sections(old, "rope_scaling") == {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    kinds = {"full_attention": None, "sliding_attention": {"rope_theta": 5e4, "mrope_section": [24, 20, 20]}}
    plain = {"full_attention": None, "sliding_attention": {"rope_theta": 5e4}}
    assert without_sections(kinds, "rope_parameters") == plain


def test_the_class_of_the_text_part_follows_its_model_type() -> None:
    llama = spec_of(LLAVA, {"vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5})
    assert llama.architecture == "LlamaForCausalLM" and llama.num_layers == 32 and llama.vocab_size == 32064
    mistral = spec_of(LLAVA, {"model_type": "mistral"})
    assert mistral.architecture == "MistralForCausalLM" and mistral.layers[0].mlp.intermediate_size == 14336
    assert spec_of("InternVLForConditionalGeneration", {}).architecture == "Qwen2ForCausalLM"
    assert spec_of("InternVLForConditionalGeneration", {"model_type": "qwen3"}).attentions[0].qk_norm is not None
    assert spec_of("InternVLForConditionalGeneration", {"model_type": "gpt_oss"}).has_experts


@pytest.mark.parametrize("own", [{}, {"tie_embedding": False}, {"tie_embedding": False, "tie_word_embeddings": True}])
def test_lfm2_has_another_name_for_a_head_that_is_the_embedding(own: dict[str, Any]) -> None:
    """It goes first in the text part, which `LlavaConfig` asks, and in LFM2-VL itself, which does not ask it."""
    assert spec_of(LLAVA, {"model_type": "lfm2", **own}).tie_word_embeddings is (not own)
    assert spec_of("Lfm2VlForConditionalGeneration", {"tie_embedding": False}).tie_word_embeddings
    assert spec_of("Lfm2VlForConditionalGeneration", **own).tie_word_embeddings is (not own)


@pytest.mark.parametrize(
    ("architecture", "own", "text", "tied"),
    [
        (GEMMA, None, None, True),
        (GEMMA, False, True, False),
        (LLAVA, None, None, False),
        (LLAVA, None, True, True),  # it adopts the setting of its text part
        (LLAVA, True, False, True),
        ("LlavaNextForConditionalGeneration", None, True, False),
        ("Mistral3ForConditionalGeneration", None, None, True),
        ("PaddleOCRVLForConditionalGeneration", False, None, True),
        (QWEN, False, True, True),
    ],
)
def test_the_wrapper_decides_whether_the_head_is_the_embedding(
    architecture: str, own: bool | None, text: bool | None, tied: bool
) -> None:
    given = {} if text is None else {"tie_word_embeddings": text}
    others = {} if own is None else {"tie_word_embeddings": own}
    assert spec_of(architecture, given, **others).tie_word_embeddings is tied


def test_the_dtype_is_that_of_the_wrapper() -> None:
    assert spec_of(GEMMA, {"torch_dtype": "float32"}, dtype="bfloat16").dtype == "bfloat16"
    assert spec_of(GEMMA, {"dtype": "float16"}, torch_dtype="bfloat16").dtype == "bfloat16"
    assert spec_of(GEMMA, {"dtype": "float16"}).dtype == "float16"


def test_a_wrapper_has_a_plain_head() -> None:
    """transformers applies neither the factor of Cohere 2's logits nor Gemma's limit of them in wrappers."""
    aya = spec_of("AyaVisionForConditionalGeneration", {"logit_scale": 0.25})
    assert (aya.logit_scale, text_spec("Cohere2ForCausalLM", **TEXT_PARTS["cohere2"].defaults).logit_scale) == (
        1,
        0.0625,
    )
    assert spec_of(GEMMA, {"final_logit_softcapping": 30.0}).logit_softcap is None


def test_paddleocr_switches_all_biases_by_one_setting() -> None:
    for use_bias in (False, True):
        spec = spec_of("PaddleOCRVLForConditionalGeneration", {"use_bias": use_bias})
        attention, mlp = spec.attentions[0], spec.layers[0].mlp
        assert (attention.qkv_bias, attention.o_bias, mlp.bias) == (use_bias,) * 3


@pytest.mark.parametrize("architecture", SERVED)
def test_stored_names_of_old_and_new_checkpoints(architecture: str) -> None:
    wrapper = WRAPPERS[architecture]
    names = spec_of(architecture, POSSIBLE.get(wrapper.text)).names
    for prefix in (*wrapper.prefixes, *(["model."] if wrapper.is_flat else [])):
        ours = wrapper.prefixes.get(prefix, "model.")
        inside = ("layers.3.mlp.up_proj.weight", "norm.weight") if ours != "model.layers." else ("3.norm.weight",)
        for inner in ("weight",) if ours == "lm_head." else inside:
            assert names.rename(prefix + inner) == ours + inner
    assert names.rename("lm_head.weight") == "lm_head.weight"
    for name in OTHERS.get(architecture, _OF_LLAVA):
        assert names.rename(name) is None
    assert names.rename("audio_tower.x") == "audio_tower.x", "not ignored, so it is refused as unused"


def test_all_wrappers_of_the_table_have_a_text_part() -> None:
    assert all(wrapper.text in TEXT_PARTS for wrapper in WRAPPERS.values())
    assert {GEMMA, QWEN, LLAVA} <= SERVED.keys()
    assert SERVED["InternVLForConditionalGeneration"][0] == "Qwen2ForCausalLM"
    assert not served_wrappers(set())


@pytest.mark.parametrize("architecture", REFUSED)
def test_wrappers_that_would_be_wrong_are_refused_with_the_reason(architecture: str) -> None:
    with pytest.raises(
        StartupError, match=rf"{architecture} cannot be served as a text model: {REFUSED[architecture]}"
    ):
        spec_of(architecture)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no text_config": ({"architectures": [GEMMA]}, "text_config = None is not supported"),
    "text_config of another type": ({"architectures": [GEMMA], "text_config": [1]}, "text_config"),
    "unknown text part": (
        {"architectures": [LLAVA], "text_config": {"model_type": "mamba"}},
        f"the text part of {LLAVA} has model_type = 'mamba'",
    ),
    "model_type of another type": ({"architectures": [LLAVA], "text_config": {"model_type": ["llama"]}}, "model_type"),
    "sections of another type": (
        {"architectures": [QWEN], "text_config": {"rope_scaling": {"type": "mrope", "mrope_section": "16"}}},
        "mrope_section = '16'",
    ),
    "sections for a text part without them": (
        {"architectures": [LLAVA], "text_config": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}},
        "mrope",
    ),
    "rotary table of another type": (
        {"architectures": [QWEN], "text_config": {"rope_scaling": [1]}},
        "rope_scaling",
    ),
    "tied by another type": ({"architectures": [GEMMA], "text_config": {}, "tie_word_embeddings": 1}, "true or false"),
    "two vocabularies": (
        {"architectures": ["Ovis2ForConditionalGeneration"], "text_config": {"vocab_size": 100}, "vocab_size": 90,
         "tie_word_embeddings": False},
        "vocab_size must be 100, as in text_config",
    ),
    "heads of another width": (
        {"architectures": [QWEN], "text_config": {"head_dim": 64}},
        "head_dim = 64 is not supported",
    ),
    "two numbers of experts": (
        {
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "text_config": {"num_experts": 8, "num_local_experts": 16},
        },
        "num_local_experts must be 8, as num_experts",
    ),
    "prompt attended both ways": (
        {"architectures": [GEMMA], "text_config": {"use_bidirectional_attention": True}},
        "use_bidirectional_attention",
    ),
    "windows that the described class does not have": (
        {"architectures": ["PaddleOCRVLForConditionalGeneration"],
         "text_config": {"layer_types": ["sliding_attention"] * 18}},
        "layer_types",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_refused_by_name(case: str) -> None:
    config, names = WRONG[case]
    with pytest.raises(StartupError) as caught:
        describe(config)
    assert names in caught.value.cause


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VLMoeTextModel"),
        ("Step3p7ForConditionalGeneration", "Step3p5ForCausalLM"),
    ],
)
def test_text_parts_that_no_family_describes_are_refused_by_name(architecture: str, text: str) -> None:
    assert architecture not in SERVED
    with pytest.raises(StartupError, match=f"the text part of {architecture} is {text}, which is not supported"):
        spec_of(architecture)


KEYS = ("head_dim", "hidden_size", "layer_types", "model_type", "mrope_section", "num_attention_heads", "num_experts",
        "num_local_experts", "rope_parameters", "rope_scaling", "tie_word_embeddings", "use_bias", "vocab_size",
        "dtype", "torch_dtype")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [GEMMA, LLAVA, QWEN, "PaddleOCRVLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"]
)
def test_any_value_is_refused_or_described(architecture: str) -> None:
    """In text_config, in its rotary table, and next to it."""
    small = {"num_hidden_layers": 1}
    for key, value in itertools.product(KEYS, ODD):
        for config in (
            {"text_config": {**small, key: value}},
            {"text_config": {**small, "rope_scaling": {"type": "mrope", key: value}}},
            {"text_config": small, key: value},
            {"text_config": value},
        ):
            try:
                assert isinstance(describe({"architectures": [architecture], **config}), DecoderSpec)
            except StartupError as error:
                assert error.cause.startswith("config.json: ") and error.fix and len(error.cause) < 600


def test_a_text_part_that_is_not_described_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, "Gemma3ForCausalLM")
    with pytest.raises(StartupError, match=f"the text part of {GEMMA} is Gemma3ForCausalLM, which is not supported"):
        spec_of(GEMMA)
    assert GEMMA not in served_wrappers(FAMILIES) and QWEN in served_wrappers(FAMILIES)


def test_quantization_settings_may_be_in_the_text_config(tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    outer = stored_quantization(tmp_path, {"quantization_config": gptq})
    inner = stored_quantization(tmp_path, {"text_config": {"quantization_config": gptq}})
    assert outer is not None and inner is not None and inner.scheme.description == outer.scheme.description
    assert stored_quantization(tmp_path, {"text_config": {}}) is None


PACKED = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64,
         "dynamic": {"+:{prefix}layers\\.1\\.mlp": {"bits": 8}, "-:.*down_proj": {}}},
        ("qweight", "qzeros", "scales", "g_idx"),
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*vision_tower.*"],
         "config_groups": {
             "a": {"targets": ["re:{prefix}layers\\.1\\.mlp\\.up_proj"], "weights": PACKED},
             "b": {"targets": ["{prefix}layers.0.mlp.up_proj"], "weights": PACKED | {
                 "num_bits": 4, "strategy": "group", "group_size": 32}}}},
        ("weight_packed", "weight_scale", "weight_shape"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_quantization_settings_name_modules_as_they_are_stored(tmp_path: Path, method: str, prefix: str) -> None:
    written, kinds = SETTINGS[method]
    settings = json.loads(json.dumps(written).replace("{prefix}", prefix))
    config = {"architectures": [LLAVA], "text_config": {}, "quantization_config": settings}
    tensors = {f"{prefix}layers.{layer}.mlp.{part}_proj.{kind}": np.zeros((2, 2), np.int32)
               for layer in (0, 1) for part in ("up", "down") for kind in kinds}  # fmt: skip
    save_file(tensors | {"vision_tower.x.weight": np.zeros(1, np.float32)}, tmp_path / SINGLE_FILE)
    stored = stored_quantization(tmp_path, config)
    checkpoint = Checkpoint.open(tmp_path, describe(config).names)
    assert stored is not None and all(name.startswith("model.layers.") for name in checkpoint.tensors)
    formats = CheckpointFormats(stored.scheme, checkpoint, FUSED_MODULES)
    found: list[Any] = [formats.stored_format(f"model.layers.{layer}.mlp.up_proj") for layer in (0, 1)]
    assert [one.bits for one in found] == [4, 8]
    assert formats.stored_format("model.layers.0.mlp.down_proj") is None, "it is left out by name"


@pytest.mark.slow
def test_every_served_wrapper_is_compared_with_transformers() -> None:
    from tests.golden import cases, tiny_wrappers

    compared = {tiny_wrappers.WRAPPERS.get(case.family, {}).get("class") for case in cases.CASES.values()}
    assert compared - {None} == SERVED.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        (name, kind)
        for name, classes in SERVED.items()
        for kind, part in TEXT_PARTS.items()
        if part.architecture in classes and (kind == WRAPPERS[name].text or not part.is_own)
    ],
)
def test_omitted_settings_are_the_defaults_of_transformers(architecture: str, kind: str) -> None:
    """The same decoder from an empty `text_config`, and from one in which transformers wrote every default."""
    import transformers

    config_class = getattr(transformers, architecture).config_class
    text = {"model_type": kind, **POSSIBLE.get(kind, {})}
    theirs = config_class(text_config=dict(text), architectures=[architecture]).to_dict()
    written = json.loads(json.dumps(theirs, default=str))
    assert describe(written) == describe({"architectures": [architecture], "text_config": text})
