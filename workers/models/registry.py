"""Registry of architectures, and the `DecoderSpec` of a `config.json` or a model directory. Torch-free."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, head_differs
from oarlock.workers.model_files.gguf_model import GGUFFamily
from oarlock.workers.models import (
    afmoe,
    axk1,
    bamba,
    cohere,
    cohere2_moe,
    cohere_compass,
    cwm,
    deepseek,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    falcon_h1,
    flint,
    gemma,
    gemma4,
    glm4,
    glm4_moe,
    glm_latent,
    gpt2,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    granite_moe,
    helium,
    hunyuan,
    hy_v3,
    hyperclovax,
    kimi_linear,
    laguna,
    lfm2,
    llama,
    llama4,
    longcat,
    mamba2,
    mellum,
    mimo_v2,
    minicpm3,
    minimax_m2,
    ministral3,
    mistral,
    nemotron,
    nemotron_h,
    olmo,
    olmo_hybrid,
    opt,
    phi,
    phi3,
    phimoe,
    qwen,
    qwen_hybrid,
    qwen_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from oarlock.workers.models.encoders.registry import ENCODERS
from oarlock.workers.models.hf_fields import Describe, Fields, others_like, read_config
from oarlock.workers.models.wrapper_table import OTHER_NAMES, REFUSED
from oarlock.workers.models.wrappers import describe_text_part, is_wrapper, served_wrappers

# One page for each family, or for several that are alike.
_PAGES = (
    afmoe, axk1, bamba, cohere, cohere2_moe, cohere_compass, cwm, deepseek, dots1, ernie4_5, ernie4_5_moe, exaone4,
    exaone_moe, falcon_h1, flint, gemma, gemma4, glm4, glm4_moe, glm_latent, gpt2, gpt_neo, gpt_neox, gpt_oss, gptj,
    granite, granite_hybrid, granite_moe, helium, hunyuan, hy_v3, hyperclovax, kimi_linear, laguna, lfm2, llama, llama4,
    longcat, mamba2, mellum, mimo_v2, minicpm3, minimax_m2, ministral3, mistral, nemotron, nemotron_h, olmo,
    olmo_hybrid, opt, phi, phi3, phimoe, qwen, qwen_hybrid, qwen_moe, seed_oss, smollm3, stablelm, starcoder2,
)  # fmt: skip
FAMILIES: dict[str, Describe] = {name: describe for page in _PAGES for name, describe in page.FAMILIES.items()}
# Some families are not in llama.cpp, and their pages have none.
GGUF_FAMILIES: dict[str, GGUFFamily] = {
    family.name: family for page in _PAGES for family in vars(page).get("GGUF_FAMILIES", ())
}


def architectures() -> tuple[str, ...]:
    """Return the names of all classes that are served."""
    wrappers = served_wrappers(FAMILIES)
    others = [name for name, of in OTHER_NAMES.items() if of in wrappers]
    return (*FAMILIES, *wrappers, *others, *ENCODERS)


def has_page(architecture: str | None) -> bool:
    """Return whether a page here describes this class, or refuses it by name: a family or a multimodal model."""
    return architecture in architectures() or architecture in REFUSED


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
        code = (
            ", and the checkpoint's own code (auto_map) runs only with --trust-remote-code"
            if hf_config.get("auto_map")
            else ""
        )
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
