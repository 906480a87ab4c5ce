"""Registry of architectures, and the `DecoderSpec` of a `config.json` or a model directory. Torch-free."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, head_differs
from oarlock.workers.models.afmoe import GGUF_AFMOE, describe_afmoe
from oarlock.workers.models.cohere import GGUF_COHERE, GGUF_COHERE2, describe_cohere, describe_cohere2
from oarlock.workers.models.cohere2_moe import GGUF_COHERE2_MOE, describe_cohere2_moe
from oarlock.workers.models.cohere_compass import describe_cohere_compass
from oarlock.workers.models.cwm import describe_cwm
from oarlock.workers.models.dots1 import GGUF_DOTS1, describe_dots1, describe_solar_open
from oarlock.workers.models.encoders.registry import ENCODERS
from oarlock.workers.models.ernie4_5 import GGUF_ERNIE4_5, describe_ernie4_5
from oarlock.workers.models.ernie4_5_moe import GGUF_ERNIE4_5_MOE, describe_ernie4_5_moe
from oarlock.workers.models.exaone4 import GGUF_EXAONE4, describe_exaone4
from oarlock.workers.models.exaone_moe import GGUF_EXAONE_MOE, describe_exaone_moe
from oarlock.workers.models.flint import describe_flint, describe_kolibri1
from oarlock.workers.models.gemma import (
    GGUF_GEMMA,
    GGUF_GEMMA2,
    GGUF_GEMMA3,
    describe_gemma,
    describe_gemma2,
    describe_gemma3,
    describe_vaultgemma,
)
from oarlock.workers.models.glm4 import GGUF_GLM, GGUF_GLM4, describe_glm, describe_glm4
from oarlock.workers.models.glm4_moe import GGUF_GLM4_MOE, describe_glm4_moe
from oarlock.workers.models.gpt2 import GGUF_GPT2, GGUF_STARCODER, describe_gpt2, describe_gpt_bigcode
from oarlock.workers.models.gpt_neo import describe_gpt_neo
from oarlock.workers.models.gpt_neox import GGUF_GPT_NEOX, describe_gpt_neox
from oarlock.workers.models.gpt_oss import GGUF_GPT_OSS, describe_gpt_oss
from oarlock.workers.models.gptj import describe_gptj
from oarlock.workers.models.granite import GGUF_GRANITE, describe_granite, describe_granite_swa
from oarlock.workers.models.granite_moe import (
    GGUF_GRANITE_MOE,
    describe_granite_moe,
    describe_granite_moe_shared,
    describe_granite_moe_swa,
)
from oarlock.workers.models.helium import describe_helium
from oarlock.workers.models.hf_fields import Fields, others_like, read_config
from oarlock.workers.models.hunyuan import (
    GGUF_HUNYUAN_DENSE,
    GGUF_HUNYUAN_MOE,
    describe_hunyuan_dense,
    describe_hunyuan_moe,
)
from oarlock.workers.models.hy_v3 import GGUF_HY_V3, describe_hy_v3
from oarlock.workers.models.hyperclovax import describe_hyperclovax
from oarlock.workers.models.llama import (
    GGUF_LLAMA,
    describe_emu3,
    describe_internlm3,
    describe_iquest_coder,
    describe_llama,
)
from oarlock.workers.models.llama4 import GGUF_LLAMA4, describe_llama4
from oarlock.workers.models.mellum import GGUF_MELLUM, describe_mellum
from oarlock.workers.models.minimax_m2 import GGUF_MINIMAX_M2, describe_minimax_m2
from oarlock.workers.models.ministral3 import GGUF_MISTRAL3, describe_ministral3
from oarlock.workers.models.mistral import describe_ministral, describe_mistral, describe_mixtral
from oarlock.workers.models.nemotron import (
    GGUF_ARCEE,
    GGUF_JAIS2,
    GGUF_NEMOTRON,
    describe_arcee,
    describe_jais2,
    describe_nemotron,
)
from oarlock.workers.models.olmo import (
    GGUF_OLMO,
    GGUF_OLMO2,
    GGUF_OLMOE,
    describe_flex_olmo,
    describe_olmo,
    describe_olmo2,
    describe_olmo3,
    describe_olmoe,
)
from oarlock.workers.models.opt import describe_biogpt, describe_opt
from oarlock.workers.models.phi import GGUF_PHI2, describe_phi
from oarlock.workers.models.phi3 import GGUF_PHI3, describe_phi3, describe_phi4_multimodal, describe_phi4mm
from oarlock.workers.models.phimoe import GGUF_PHIMOE, describe_phimoe
from oarlock.workers.models.qwen import (
    GGUF_QWEN2,
    GGUF_QWEN2_VL,
    GGUF_QWEN3,
    GGUF_QWEN3_VL,
    describe_qwen2,
    describe_qwen3,
)
from oarlock.workers.models.qwen_moe import (
    GGUF_QWEN2_MOE,
    GGUF_QWEN3_MOE,
    GGUF_QWEN3_VL_MOE,
    describe_qwen2_moe,
    describe_qwen3_moe,
)
from oarlock.workers.models.seed_oss import GGUF_SEED_OSS, describe_seed_oss
from oarlock.workers.models.smollm3 import GGUF_SMOLLM3, describe_smollm3
from oarlock.workers.models.stablelm import GGUF_STABLELM, describe_stablelm
from oarlock.workers.models.starcoder2 import GGUF_STARCODER2, describe_starcoder2
from oarlock.workers.models.wrappers import describe_text_part, is_wrapper, served_wrappers

FAMILIES: dict[str, Callable[[Fields], DecoderSpec]] = {
    "AfmoeForCausalLM": describe_afmoe,
    "ArceeForCausalLM": describe_arcee,
    "BioGptForCausalLM": describe_biogpt,
    "Cohere2ForCausalLM": describe_cohere2,
    "Cohere2MoeForCausalLM": describe_cohere2_moe,
    "CohereCompassForCausalLM": describe_cohere_compass,
    "CohereForCausalLM": describe_cohere,
    "CwmForCausalLM": describe_cwm,
    "Dots1ForCausalLM": describe_dots1,
    "Emu3ForCausalLM": describe_emu3,
    "Ernie4_5ForCausalLM": describe_ernie4_5,
    "Ernie4_5_ForCausalLM": describe_ernie4_5,  # Baidu's own name
    "Ernie4_5_MoeForCausalLM": describe_ernie4_5_moe,
    "Exaone4ForCausalLM": describe_exaone4,
    "ExaoneMoEForCausalLM": describe_exaone_moe,  # the name in published checkpoints
    "ExaoneMoeForCausalLM": describe_exaone_moe,
    "FlexOlmoForCausalLM": describe_flex_olmo,
    "FlintForCausalLM": describe_flint,
    "Gemma2ForCausalLM": describe_gemma2,
    "Gemma3ForCausalLM": describe_gemma3,
    "GemmaForCausalLM": describe_gemma,
    "Glm4ForCausalLM": describe_glm4,
    "Glm4MoeForCausalLM": describe_glm4_moe,
    "GPT2LMHeadModel": describe_gpt2,
    "GPTBigCodeForCausalLM": describe_gpt_bigcode,
    "GPTJForCausalLM": describe_gptj,
    "GPTNeoForCausalLM": describe_gpt_neo,
    "GPTNeoXForCausalLM": describe_gpt_neox,
    "GlmForCausalLM": describe_glm,
    "GptOssForCausalLM": describe_gpt_oss,
    "GraniteForCausalLM": describe_granite,
    "GraniteMoeForCausalLM": describe_granite_moe,
    "GraniteMoeSWAForCausalLM": describe_granite_moe_swa,
    "GraniteMoeSharedForCausalLM": describe_granite_moe_shared,
    "Jais2ForCausalLM": describe_jais2,
    "GraniteSWAForCausalLM": describe_granite_swa,
    "HYV3ForCausalLM": describe_hy_v3,
    "HeliumForCausalLM": describe_helium,
    "HyperCLOVAXForCausalLM": describe_hyperclovax,
    "IQuestCoderForCausalLM": describe_iquest_coder,
    "InternLM3ForCausalLM": describe_internlm3,
    "Kolibri1ForCausalLM": describe_kolibri1,
    "LlamaForCausalLM": describe_llama,
    "MellumForCausalLM": describe_mellum,
    "MiniMaxM2ForCausalLM": describe_minimax_m2,
    "MinistralForCausalLM": describe_ministral,
    "HunYuanDenseV1ForCausalLM": describe_hunyuan_dense,
    "HunYuanMoEV1ForCausalLM": describe_hunyuan_moe,
    "Llama4ForCausalLM": describe_llama4,
    "Ministral3ForCausalLM": describe_ministral3,
    "MistralForCausalLM": describe_mistral,
    "MixtralForCausalLM": describe_mixtral,
    "NemotronForCausalLM": describe_nemotron,
    "Olmo2ForCausalLM": describe_olmo2,
    "OlmoForCausalLM": describe_olmo,
    "Olmo3ForCausalLM": describe_olmo3,
    "OlmoeForCausalLM": describe_olmoe,
    "OPTForCausalLM": describe_opt,
    "PhiForCausalLM": describe_phi,
    "Phi3ForCausalLM": describe_phi3,
    "Phi4MMForCausalLM": describe_phi4mm,
    "Phi4MultimodalForCausalLM": describe_phi4_multimodal,
    "PhiMoEForCausalLM": describe_phimoe,  # the name in published checkpoints
    "PhimoeForCausalLM": describe_phimoe,
    "Qwen2ForCausalLM": describe_qwen2,
    "Qwen2MoeForCausalLM": describe_qwen2_moe,
    "Qwen3ForCausalLM": describe_qwen3,
    "Qwen3MoeForCausalLM": describe_qwen3_moe,
    "SolarOpenForCausalLM": describe_solar_open,
    "Starcoder2ForCausalLM": describe_starcoder2,
    "SeedOssForCausalLM": describe_seed_oss,
    "SmolLM3ForCausalLM": describe_smollm3,
    "StableLmForCausalLM": describe_stablelm,
    "VaultGemmaForCausalLM": describe_vaultgemma,
}
_GGUF = (
    GGUF_QWEN2_VL, GGUF_QWEN3_VL, GGUF_QWEN3_VL_MOE,
    GGUF_LLAMA, GGUF_QWEN2, GGUF_QWEN3, GGUF_PHI3, GGUF_GEMMA2, GGUF_GEMMA3, GGUF_OLMO2, GGUF_COHERE, GGUF_COHERE2,
    GGUF_GRANITE_MOE, GGUF_OLMOE, GGUF_QWEN2_MOE, GGUF_QWEN3_MOE, GGUF_GLM4_MOE, GGUF_ERNIE4_5_MOE, GGUF_GPT_OSS,
    GGUF_GPT2, GGUF_STARCODER, GGUF_PHI2, GGUF_GPT_NEOX,
    GGUF_ARCEE, GGUF_NEMOTRON, GGUF_JAIS2, GGUF_STARCODER2, GGUF_OLMO,
    GGUF_ERNIE4_5, GGUF_EXAONE4, GGUF_GEMMA, GGUF_GLM, GGUF_GLM4, GGUF_GRANITE, GGUF_SEED_OSS, GGUF_SMOLLM3,
    GGUF_STABLELM,
    GGUF_AFMOE, GGUF_HUNYUAN_DENSE, GGUF_HUNYUAN_MOE, GGUF_LLAMA4, GGUF_MISTRAL3,
    GGUF_DOTS1, GGUF_EXAONE_MOE, GGUF_MINIMAX_M2, GGUF_HY_V3, GGUF_MELLUM, GGUF_COHERE2_MOE, GGUF_PHIMOE,
)  # fmt: skip
GGUF_FAMILIES = {family.name: family for family in _GGUF}


def architectures() -> tuple[str, ...]:
    """Return the names of all classes that are served."""
    return (*FAMILIES, *served_wrappers(FAMILIES), *ENCODERS)


def describe(hf_config: dict[str, Any]) -> DecoderSpec:
    """Return the decoder that a parsed `config.json` describes. Raise `StartupError` if it is not supported."""
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if isinstance(name, str) and name in ENCODERS:
        raise StartupError(
            f"{name} is an encoder, which this command does not know.",
            "Serve it: `oarlock serve` answers /v1/embeddings, /v1/rerank and /v1/score with it.",
        )
    if isinstance(name, str) and is_wrapper(name):
        return describe_text_part(name, hf_config, FAMILIES)
    if family is None:
        what = f"architecture {shown(name)} is not supported" if name else "it names no architecture"
        code = ", and the checkpoint's own code (auto_map) never runs" if hf_config.get("auto_map") else ""
        raise StartupError(f"config.json: {what}{code}.", others_like(name, architectures()))
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
