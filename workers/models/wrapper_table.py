"""Tables of multimodal models: the text part of each, its default settings, and the names of its tensors. Torch-free.

Defaults are those of transformers' config classes, which published checkpoints omit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text part of wrappers, by its `model_type`."""

    architecture: str  # class that the registry describes
    defaults: Mapping[str, Any]  # settings that `text_config` may omit
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings that `text_config` does not decide
    # Other names of settings -> the usual names of the settings that have that value.
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # settings that the class would use, and the described class does not
    is_own: bool = False  # its class is a part of one wrapper, and is not chosen by `model_type`
    has_usual_heads: bool = False  # heads have hidden_size / num_attention_heads elements, whatever `head_dim` is
    has_mrope: bool = False  # rotary positions have several axes, which are equal for text
    tied_by: str | None = None  # its class's other name of `tie_word_embeddings`, which goes first
    stores_inputs_first: bool = False  # checkpoints may hold experts as [experts, inputs, outputs]
    # Values of `model_type` with which it is this part, if wrappers with other parts have other classes; empty: any.
    model_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal class."""

    text: str  # `model_type` of its text part, unless `text_config` names another
    prefixes: Mapping[str, str]  # beginnings of stored names, and ours
    ignored: tuple[str, ...]  # modules of other parts, by their stored names
    is_tied: bool = False  # default of `tie_word_embeddings`
    tied_by: str | None = None  # its class's other name of `tie_word_embeddings`, which goes first
    adopts_tied: bool = False  # the head is also the embedding if only `text_config` has it so
    is_flat: bool = False  # older checkpoints have no `text_config`, but its settings next to the others
    of_head: tuple[str, ...] = ()  # its own settings of a head that is not the embedding; they must be the text part's


def _sizes(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """Return the settings for which families have no defaults, and `others`."""
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate}
    return sizes | {"num_hidden_layers": layers, "num_attention_heads": heads, **others}


_QWEN2_VL = TextPart(
    "Qwen2ForCausalLM",
    _sizes(152064, 8192, 29568, 80, 64, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6, max_window_layers=80),
    is_own=True,
    has_usual_heads=True,
    has_mrope=True,
)
# Wrappers have a plain head: transformers does not apply the factor or the limit of logits that some text models have.
TEXT_PARTS: dict[str, TextPart] = {
    "llama": TextPart("LlamaForCausalLM", _sizes(32000, 4096, 11008, 32, 32)),
    "mistral": TextPart("MistralForCausalLM", _sizes(32000, 4096, 14336, 32, 32)),
    "ministral3": TextPart("Ministral3ForCausalLM", _sizes(131072, 4096, 14336, 34, 32)),
    "qwen2": TextPart("Qwen2ForCausalLM", _sizes(151936, 4096, 22016, 32, 32)),
    "qwen3": TextPart("Qwen3ForCausalLM", _sizes(151936, 4096, 22016, 32, 32)),
    "qwen3_moe": TextPart("Qwen3MoeForCausalLM", _sizes(151936, 2048, 6144, 24, 32)),
    "gpt_oss": TextPart("GptOssForCausalLM", _sizes(201088, 2880, 2880, 36, 64)),
    "cohere2": TextPart(
        "Cohere2ForCausalLM", _sizes(256000, 8192, 22528, 40, 64, tie_word_embeddings=True), {"logit_scale": 1.0}
    ),
    "gemma3_text": TextPart(
        "Gemma3ForCausalLM", _sizes(262208, 2304, 9216, 26, 8), {"final_logit_softcapping": None}, is_own=True
    ),
    "gemma4_text": TextPart("Gemma4ForCausalLM", _sizes(262144, 2304, 9216, 30, 8), is_own=True),
    "gemma4_unified_text": TextPart("Gemma4UnifiedForCausalLM", _sizes(262144, 2304, 9216, 30, 8), is_own=True),
    "lfm2": TextPart(
        "Lfm2ForCausalLM", _sizes(65536, 2560, 12288, 32, 32, tie_word_embeddings=True), tied_by="tie_embedding"
    ),
    "lfm2_moe": TextPart(
        "Lfm2MoeForCausalLM", _sizes(65536, 2048, 7168, 32, 32, tie_word_embeddings=True), tied_by="tie_embedding"
    ),
    "lfm3": TextPart("Lfm3ForCausalLM", _sizes(128000, 2048, 7680, 24, 16, tie_word_embeddings=True)),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": TextPart(
        "Qwen3ForCausalLM",
        _sizes(151936, 4096, 22016, 32, 32, max_position_embeddings=128000, rope_theta=5e5),
        {"use_sliding_window": False, "layer_types": None},
        is_own=True,
        has_mrope=True,
    ),
    "qwen3_vl_moe_text": TextPart(
        "Qwen3MoeForCausalLM",
        _sizes(
            151936, 2048, 5632, 24, 16, num_key_value_heads=16, max_position_embeddings=128000, rope_theta=5e5,
            moe_intermediate_size=1408, num_experts_per_tok=4, num_experts=60,
        ),
        {"norm_topk_prob": True, "use_sliding_window": False},
        aliases={"num_local_experts": ("num_experts",)},
        is_own=True,
        has_mrope=True,
        stores_inputs_first=True,
    ),
    "qwen3_5_text": TextPart(
        "Qwen3_5ForCausalLM", _sizes(248320, 4096, 12288, 32, 16), is_own=True, has_mrope=True
    ),
    "qwen3_5_moe_text": TextPart(
        "Qwen3_5MoeForCausalLM",
        # It has experts in every layer, and so no `intermediate_size`.
        {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16},
        is_own=True,
        has_mrope=True,
    ),
    "glm4v_text": TextPart(
        "Glm4ForCausalLM",
        _sizes(
            151552, 4096, 13696, 40, 32, num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-5,
            partial_rotary_factor=1.0,
        ),
        {"attention_bias": True},
        is_own=True,
        has_usual_heads=True,
        has_mrope=True,
    ),
    "glm4v_moe_text": TextPart(
        "Glm4MoeForCausalLM",
        _sizes(151424, 4096, 10944, 46, 96, max_position_embeddings=65536, attention_bias=True),
        {"use_qk_norm": False},
        is_own=True,
        has_mrope=True,
    ),
    "paddleocr_vl_text": TextPart(
        "LlamaForCausalLM",
        _sizes(
            103424, 1024, 3072, 18, 16, num_key_value_heads=2, head_dim=128, max_position_embeddings=131072,
            rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True,
        ),
        aliases={"use_bias": ("attention_bias", "mlp_bias")},
        refused=("layer_types",),
        is_own=True,
        has_mrope=True,
    ),
    "cohere_compass_text": TextPart(
        "CohereCompassForCausalLM",
        _sizes(256000, 8192, 22528, 40, 64, tie_word_embeddings=True),
        is_own=True,
        has_mrope=True,
    ),
    "hunyuan_vl_text": TextPart(
        "HunYuanDenseV1ForCausalLM",
        _sizes(290943, 4096, 11008, 32, 32, tie_word_embeddings=True),
        aliases={"attention_head_dim": ("head_dim",), "org_vocab_size": ("vocab_size",)},
        is_own=True,
        has_mrope=True,
    ),
    "llama4_text": TextPart("Llama4ForCausalLM", _sizes(202048, 5120, 8192, 48, 40), is_own=True),
    "deepseek_v3": TextPart(
        "DeepseekV3ForCausalLM", _sizes(129280, 7168, 18432, 61, 128), is_own=True,
        model_types=("deepseek_v3", "kimi_k2"),
    ),
    # Its layers have experts for text and others for images, which are stored as one list.
    "ernie4_5_vl_moe_text": TextPart("Ernie4_5_VLMoeTextModel", {}, is_own=True),
    "step3p5": TextPart("Step3p5ForCausalLM", {}, is_own=True),
}  # fmt: skip


def _both(*modules: str) -> tuple[str, ...]:
    """Return the names of modules in older checkpoints and in newer ones, which add `model.`."""
    return tuple(name for module in modules for name in (module, f"model.{module}"))


# Older checkpoints hold a whole text model as `language_model`, newer ones only its layers, next to the head.
_LLAVA_NAMES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# transformers writes the layers of the text model under the name that the authors have for those of the tower.
_KIMI_NAMES = {"language_model.model.blocks.": "model.layers.", **_LLAVA_NAMES}
_LLAVA_OTHERS = _both("vision_tower", "multi_modal_projector")
_INSIDE = {"model.language_model.": "model."}
_TEXT_MODEL = {"model.text_model.": "model."}
_IDEFICS_OTHERS = ("model.vision_model", "model.connector")
_QWEN_OTHERS = _both("visual")
_GEMMA4_OTHERS = tuple(f"model.{part}" for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"))

WRAPPERS: dict[str, Wrapper] = {
    "AyaVisionForConditionalGeneration": Wrapper("cohere2", _LLAVA_NAMES, _LLAVA_OTHERS, is_tied=True),
    "CohereCompassForConditionalGeneration": Wrapper(
        "cohere_compass_text", _INSIDE, ("model.visual",)
    ),
    "DeepseekVLForConditionalGeneration": Wrapper(
        "llama", _INSIDE, ("model.vision_model", "model.aligner"), is_tied=True
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Wrapper("ernie4_5_vl_moe_text", {}, ()),
    "Gemma3ForConditionalGeneration": Wrapper(
        "gemma3_text", _LLAVA_NAMES, _LLAVA_OTHERS, is_tied=True
    ),
    "Gemma4ForConditionalGeneration": Wrapper("gemma4_text", _INSIDE, _GEMMA4_OTHERS, is_tied=True),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(
        "gemma4_unified_text", _INSIDE, (*_GEMMA4_OTHERS, *_both("vision_embedder")), is_tied=True
    ),
    "Glm4vForConditionalGeneration": Wrapper("glm4v_text", _INSIDE, _QWEN_OTHERS, adopts_tied=True),
    "Glm4vMoeForConditionalGeneration": Wrapper(
        "glm4v_moe_text", _INSIDE, _QWEN_OTHERS, adopts_tied=True
    ),
    "GotOcr2ForConditionalGeneration": Wrapper("qwen2", _LLAVA_NAMES, _LLAVA_OTHERS, is_tied=True),
    "HunYuanVLForConditionalGeneration": Wrapper(
        "hunyuan_vl_text", _INSIDE, ("vit", "model.vit", "model.vision_tower"),
        is_tied=True, adopts_tied=True, is_flat=True,
    ),
    "Idefics3ForConditionalGeneration": Wrapper("llama", _TEXT_MODEL, _IDEFICS_OTHERS),
    "InternVLForConditionalGeneration": Wrapper("qwen2", _LLAVA_NAMES, _LLAVA_OTHERS, is_tied=True),
    "Kimi_K25ForConditionalGeneration": Wrapper(
        "deepseek_v3", _KIMI_NAMES, _both("vision_tower", "mm_projector"), is_tied=True
    ),
    "Lfm2VlForConditionalGeneration": Wrapper(
        "lfm2", _INSIDE, _LLAVA_OTHERS, is_tied=True, tied_by="tie_embedding"
    ),
    "Lfm3VlForConditionalGeneration": Wrapper("lfm3", _INSIDE, _LLAVA_OTHERS, is_tied=True),
    "Llama4ForConditionalGeneration": Wrapper(
        "llama4_text", _LLAVA_NAMES, ("vision_model", "multi_modal_projector"), adopts_tied=True
    ),
    "LlavaForConditionalGeneration": Wrapper("llama", _LLAVA_NAMES, _LLAVA_OTHERS, adopts_tied=True),
    "LlavaNextForConditionalGeneration": Wrapper("llama", _LLAVA_NAMES, (*_LLAVA_OTHERS, *_both("image_newline"))),
    "LlavaOnevisionForConditionalGeneration": Wrapper(
        "qwen2", _LLAVA_NAMES, (*_LLAVA_OTHERS, *_both("image_newline")), adopts_tied=True
    ),
    "Mistral3ForConditionalGeneration": Wrapper("mistral", _LLAVA_NAMES, _LLAVA_OTHERS, is_tied=True),
    "Ovis2ForConditionalGeneration": Wrapper(
        "qwen2", _INSIDE, ("model.vision_tower", "model.visual_embeddings_table"),
        is_tied=True, of_head=("vocab_size", "hidden_size"),
    ),
    "PaddleOCRVLForConditionalGeneration": Wrapper(
        "paddleocr_vl_text", _INSIDE, (*_QWEN_OTHERS, "mlp_AR", "model.projector"),
        is_tied=True, adopts_tied=True, is_flat=True,
    ),
    "Qwen2VLForConditionalGeneration": Wrapper(
        "qwen2_vl_text", _INSIDE, _QWEN_OTHERS, adopts_tied=True, is_flat=True
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        "qwen2_5_vl_text", _INSIDE, _QWEN_OTHERS, adopts_tied=True, is_flat=True
    ),
    "Qwen3VLForConditionalGeneration": Wrapper("qwen3_vl_text", _INSIDE, _QWEN_OTHERS),
    "Qwen3VLMoeForConditionalGeneration": Wrapper("qwen3_vl_moe_text", _INSIDE, _QWEN_OTHERS),
    "Qwen3_5ForConditionalGeneration": Wrapper("qwen3_5_text", _INSIDE, _QWEN_OTHERS),
    "Qwen3_5MoeForConditionalGeneration": Wrapper("qwen3_5_moe_text", _INSIDE, _QWEN_OTHERS),
    "SmolVLMForConditionalGeneration": Wrapper("llama", _TEXT_MODEL, _IDEFICS_OTHERS),
    "Step3p7ForConditionalGeneration": Wrapper("step3p5", {}, ()),
}  # fmt: skip

# Names in published checkpoints of classes that transformers calls otherwise.
OTHER_NAMES = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}
# Wrappers that would be wrong as text models, and why.
REFUSED = {
    "MiniMaxM3SparseForConditionalGeneration": "its layers attend only to blocks of tokens that an indexer chooses",
    "PaliGemmaForConditionalGeneration": "its prompt is attended to in both directions",
}
