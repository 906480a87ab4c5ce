"""Registry of architectures, and the `DecoderSpec` of a `config.json` or a model directory. Torch-free."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, head_differs
from oarlock.workers.models.cohere import GGUF_COHERE, GGUF_COHERE2, describe_cohere, describe_cohere2
from oarlock.workers.models.cohere2_moe import GGUF_COHERE2_MOE, describe_cohere2_moe
from oarlock.workers.models.dots1 import GGUF_DOTS1, describe_dots1, describe_solar_open
from oarlock.workers.models.encoders.registry import ENCODERS
from oarlock.workers.models.ernie4_5_moe import GGUF_ERNIE4_5_MOE, describe_ernie4_5_moe
from oarlock.workers.models.exaone_moe import GGUF_EXAONE_MOE, describe_exaone_moe
from oarlock.workers.models.flint import describe_flint, describe_kolibri1
from oarlock.workers.models.gemma import GGUF_GEMMA2, GGUF_GEMMA3, describe_gemma2, describe_gemma3
from oarlock.workers.models.glm4_moe import GGUF_GLM4_MOE, describe_glm4_moe
from oarlock.workers.models.gpt_oss import GGUF_GPT_OSS, describe_gpt_oss
from oarlock.workers.models.granite_moe import (
    GGUF_GRANITE_MOE,
    describe_granite_moe,
    describe_granite_moe_shared,
    describe_granite_moe_swa,
)
from oarlock.workers.models.hf_fields import Fields, read_config
from oarlock.workers.models.hy_v3 import GGUF_HY_V3, describe_hy_v3
from oarlock.workers.models.llama import GGUF_LLAMA, describe_llama
from oarlock.workers.models.mellum import GGUF_MELLUM, describe_mellum
from oarlock.workers.models.minimax_m2 import GGUF_MINIMAX_M2, describe_minimax_m2
from oarlock.workers.models.mistral import describe_mistral, describe_mixtral
from oarlock.workers.models.olmo import GGUF_OLMO2, GGUF_OLMOE, describe_flex_olmo, describe_olmo2, describe_olmoe
from oarlock.workers.models.phi3 import GGUF_PHI3, describe_phi3
from oarlock.workers.models.phimoe import GGUF_PHIMOE, describe_phimoe
from oarlock.workers.models.qwen import GGUF_QWEN2, GGUF_QWEN3, describe_qwen2, describe_qwen3
from oarlock.workers.models.qwen_moe import GGUF_QWEN2_MOE, GGUF_QWEN3_MOE, describe_qwen2_moe, describe_qwen3_moe

FAMILIES: dict[str, Callable[[Fields], DecoderSpec]] = {
    "Cohere2ForCausalLM": describe_cohere2,
    "Cohere2MoeForCausalLM": describe_cohere2_moe,
    "CohereForCausalLM": describe_cohere,
    "Dots1ForCausalLM": describe_dots1,
    "Ernie4_5_MoeForCausalLM": describe_ernie4_5_moe,
    "ExaoneMoeForCausalLM": describe_exaone_moe,
    "FlexOlmoForCausalLM": describe_flex_olmo,
    "FlintForCausalLM": describe_flint,
    "Gemma2ForCausalLM": describe_gemma2,
    "Gemma3ForCausalLM": describe_gemma3,
    "Glm4MoeForCausalLM": describe_glm4_moe,
    "GptOssForCausalLM": describe_gpt_oss,
    "GraniteMoeForCausalLM": describe_granite_moe,
    "GraniteMoeSharedForCausalLM": describe_granite_moe_shared,
    "GraniteMoeSWAForCausalLM": describe_granite_moe_swa,
    "HYV3ForCausalLM": describe_hy_v3,
    "Kolibri1ForCausalLM": describe_kolibri1,
    "LlamaForCausalLM": describe_llama,
    "MellumForCausalLM": describe_mellum,
    "MiniMaxM2ForCausalLM": describe_minimax_m2,
    "MistralForCausalLM": describe_mistral,
    "MixtralForCausalLM": describe_mixtral,
    "Olmo2ForCausalLM": describe_olmo2,
    "OlmoeForCausalLM": describe_olmoe,
    "Phi3ForCausalLM": describe_phi3,
    "PhimoeForCausalLM": describe_phimoe,
    "Qwen2ForCausalLM": describe_qwen2,
    "Qwen2MoeForCausalLM": describe_qwen2_moe,
    "Qwen3ForCausalLM": describe_qwen3,
    "Qwen3MoeForCausalLM": describe_qwen3_moe,
    "SolarOpenForCausalLM": describe_solar_open,
}
_GGUF = (
    GGUF_LLAMA, GGUF_QWEN2, GGUF_QWEN3, GGUF_PHI3, GGUF_GEMMA2, GGUF_GEMMA3, GGUF_OLMO2, GGUF_COHERE, GGUF_COHERE2,
    GGUF_GRANITE_MOE, GGUF_OLMOE, GGUF_QWEN2_MOE, GGUF_QWEN3_MOE, GGUF_GLM4_MOE, GGUF_ERNIE4_5_MOE, GGUF_GPT_OSS,
    GGUF_DOTS1, GGUF_EXAONE_MOE, GGUF_MINIMAX_M2, GGUF_HY_V3, GGUF_MELLUM, GGUF_COHERE2_MOE,
    GGUF_PHIMOE,
)  # fmt: skip
GGUF_FAMILIES = {family.name: family for family in _GGUF}


def describe(hf_config: dict[str, Any]) -> DecoderSpec:
    """Return the decoder that a parsed `config.json` describes. Raise `StartupError` if it is not supported."""
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    supported = ", ".join((*FAMILIES, *ENCODERS))
    if isinstance(name, str) and name in ENCODERS:
        raise StartupError(
            f"{name} is an encoder, which this command does not know.",
            "Serve it: `oarlock serve` answers /v1/embeddings, /v1/rerank and /v1/score with it.",
        )
    if family is None:
        what = f"architecture {shown(name)} is not supported" if name else "it names no architecture"
        code = ", and the checkpoint's own code (auto_map) never runs" if hf_config.get("auto_map") else ""
        raise StartupError(f"config.json: {what}{code}.", f"Supported: {supported}.")
    return family(Fields(hf_config))


def read_spec(model_path: str, max_model_len: int | None = None, *, tied: bool | None = None) -> DecoderSpec:
    """Return the spec of the model in `model_path`, from its `config.json`, for up to `max_model_len` tokens per
    sequence.

    `tied`: whether the output head is the embedding, if known. None: read it from `config.json` and, if true there,
    check the weights (see `workers/model_files/checkpoint.py`). Raise `StartupError` if the model is not supported.
    """
    directory = Path(model_path)
    spec = describe(read_config(directory))
    if tied is None:
        stored = any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
        tied = spec.tie_word_embeddings and not (stored and head_differs(Checkpoint.open(directory, spec.names)))
    return replace(spec, tie_word_embeddings=tied).for_length(max_model_len or spec.default_length)
