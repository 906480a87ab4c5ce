"""Tiny multimodal models: the settings of each family, and the names that older checkpoints have.

Their parts for images are as small as transformers builds them; nothing here runs them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

_SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 16, "patch_size": 8}  # fmt: skip
_SIGLIP = {**_SMALL, "model_type": "siglip_vision_model", "vision_use_head": False}
_CLIP = {**_SMALL, "model_type": "clip_vision_model", "projection_dim": 16}
_DEEP = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64}
_DEEP_POSITIONS = {**_DEEP, "num_position_embeddings": 16}
_DEEPSTACK = {**_DEEP, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1]}  # of heads with 8 rotated elements
_INTERLEAVED = {"rope_type": "default", "mrope_section": [4, 4, 4], "mrope_interleaved": True}

# Families whose text part is of any class, which `model_type` names.
_CHOOSING = ("aya_vision", "deepseek_vl", "got_ocr2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision",
             "lfm2_vl", "lfm3_vl", "mistral3", "ovis2", "smolvlm")  # fmt: skip
# Family -> its class, the family of its text part in `tiny_models.py`, and settings of its parts and of itself.
WRAPPERS: dict[str, dict[str, Any]] = {
    "aya_vision": {"class": "AyaVisionForConditionalGeneration", "like": "cohere2", "vision_config": _SIGLIP},
    "cohere_compass": {"class": "CohereCompassForConditionalGeneration", "like": "cohere_compass_text",
                       "vision_config": _DEEPSTACK},
    "deepseek_vl": {"class": "DeepseekVLForConditionalGeneration", "like": "llama", "vision_config": _SIGLIP},
    "gemma3": {"class": "Gemma3ForConditionalGeneration", "like": "gemma3_text", "vision_config": _SIGLIP,
               "mm_tokens_per_image": 4, "image_token_index": 310},
    "gemma4": {"class": "Gemma4ForConditionalGeneration", "like": "gemma4_text", "audio_config": None,
               "text_config": {"pad_token_id": 0}, "vision_config": {
        **_SMALL, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}},
    "gemma4_unified": {"class": "Gemma4UnifiedForConditionalGeneration", "like": "gemma4_unified_text",
                       "text_config": {"pad_token_id": 0}, "audio_config": {"audio_embed_dim": 16}, "vision_config": {
                           "mm_embed_dim": 16, "mm_posemb_size": 16, "patch_size": 2, "output_proj_dims": 16}},
    "glm4v": {"class": "Glm4vForConditionalGeneration", "like": "glm4", "vision_config": {**_DEEP, "image_size": 16},
              "text_config": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": {
                  "rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}},
    "glm4v_moe": {"class": "Glm4vMoeForConditionalGeneration", "like": "glm4_moe", "vision_config": {
        **_DEEP, "image_size": 16}, "text_config": {
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5}}},
    "got_ocr2": {"class": "GotOcr2ForConditionalGeneration", "like": "qwen2", "vision_config": {
        **_SMALL, "output_channels": 8, "window_size": 2, "global_attn_indexes": [0], "mlp_dim": 16}},
    "hunyuan_vl": {"class": "HunYuanVLForConditionalGeneration", "like": "hunyuan_v1_dense", "vision_config": {
        **_SMALL, "out_hidden_size": 64, "max_vit_seq_len": 64}, "text_config": {"rope_parameters": {
            "rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 1e4, "mrope_section": [3, 3, 3, 3]}}},
    "idefics3": {"class": "Idefics3ForConditionalGeneration", "like": "llama", "vision_config": _SMALL},
    "internvl": {"class": "InternVLForConditionalGeneration", "like": "qwen3", "vision_config": {
        **_SMALL, "image_size": [16, 16], "patch_size": [8, 8]}},
    "kimi_k25": {"class": "Kimi_K25ForConditionalGeneration", "like": "deepseek_v3", "tie_word_embeddings": False,
                 "vision_config": {**_SMALL, "pos_emb_height": 2, "pos_emb_width": 2}},
    "lfm2_vl": {"class": "Lfm2VlForConditionalGeneration", "like": "lfm2", "vision_config": {
        **_SMALL, "num_patches": 16}, "projector_hidden_size": 16},
    "lfm3_vl": {"class": "Lfm3VlForConditionalGeneration", "like": "lfm3", "projector_hidden_size": 16,
                "vision_config": {**_SMALL, "num_key_value_heads": 2}},
    "llama4": {"class": "Llama4ForConditionalGeneration", "like": "llama4_text", "vision_config": {
        **_SMALL, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}},
    "llava": {"class": "LlavaForConditionalGeneration", "like": "llama", "vision_config": _CLIP},
    "llava_next": {"class": "LlavaNextForConditionalGeneration", "like": "mistral", "vision_config": _CLIP},
    "llava_onevision": {"class": "LlavaOnevisionForConditionalGeneration", "like": "qwen2", "vision_config": _SIGLIP},
    "mistral3": {"class": "Mistral3ForConditionalGeneration", "like": "mistral", "vision_config": {
        **_SMALL, "model_type": "pixtral", "head_dim": 8}},
    "ovis2": {"class": "Ovis2ForConditionalGeneration", "like": "qwen2", "vision_config": {
        **_SMALL, "vocab_size": 32}, "hidden_size": 64, "vocab_size": 320},
    "paddleocr_vl": {"class": "PaddleOCRVLForConditionalGeneration", "like": "llama", "vision_config": _SMALL,
                     "text_config": {"head_dim": 24, "use_bias": True, "rope_parameters": {
                         "rope_type": "default", "mrope_section": [4, 4, 4]}}},
    "qwen2_vl": {"class": "Qwen2VLForConditionalGeneration", "like": "qwen2", "text_config": {
        "rope_parameters": _SECTIONS}, "vision_config": {
            "depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8}},
    "qwen2_5_vl": {"class": "Qwen2_5_VLForConditionalGeneration", "like": "qwen2", "text_config": {
        "rope_parameters": _SECTIONS}, "vision_config": {**_DEEP, "fullatt_block_indexes": [0]}},
    "qwen3_vl": {"class": "Qwen3VLForConditionalGeneration", "like": "qwen3", "vision_config": _DEEPSTACK,
                 "text_config": {"rope_parameters": _INTERLEAVED}},
    "qwen3_vl_moe": {"class": "Qwen3VLMoeForConditionalGeneration", "like": "qwen3_moe", "vision_config": _DEEPSTACK,
                     "text_config": {"rope_parameters": _INTERLEAVED}},
    "qwen3_5": {"class": "Qwen3_5ForConditionalGeneration", "like": "qwen3_5_text", "vision_config": _DEEP_POSITIONS},
    "qwen3_5_moe": {"class": "Qwen3_5MoeForConditionalGeneration", "like": "qwen3_5_moe_text",
                    "vision_config": _DEEP_POSITIONS},
    "smolvlm": {"class": "SmolVLMForConditionalGeneration", "like": "llama", "vision_config": _SMALL},
}  # fmt: skip


def wrapper_settings(family: str, text: Mapping[str, Any], **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """The class of a family, and the arguments of its config class. `text`: of the text model that its part is like."""
    given = {**WRAPPERS[family], **overrides}
    chosen = {"model_type": given["like"]} if family in _CHOOSING else {}
    own = {**text, **chosen, **WRAPPERS[family].get("text_config", {}), **overrides.get("text_config", {})}
    others = {name: value for name, value in given.items() if name not in ("class", "like", "text_config")}
    return getattr(transformers, given["class"]), {**others, "text_config": own}


def rename_stored(path: Path, prefixes: Mapping[str, str]) -> None:
    """Give the tensors of a checkpoint of one file other names: the first prefix that fits is replaced."""
    file = path / "model.safetensors"
    found = {}
    for name, tensor in load_file(file).items():
        prefix = next((one for one in prefixes if name.startswith(one)), "")
        found[prefixes.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(found, file, {"format": "pt"})


def store_inputs_first(path: Path) -> None:
    """Transpose the matrices of all experts, as Qwen3-VL's checkpoints have them; transformers writes the others."""
    file = path / "model.safetensors"
    found = load_file(file)
    experts = {name: one.transpose(1, 2).contiguous() for name, one in found.items() if ".experts." in name}
    assert experts
    save_file(found | experts, file, {"format": "pt"})


def flatten_config(path: Path) -> None:
    """Write the settings of the text part next to the wrapper's own, as the first Qwen2-VL had them."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    old = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": "mrope"}}
    old["rope_scaling"].pop("rope_type")
    file.write_text(json.dumps({**text, **old, **config}))
