"""Which architectures are served, and the page that describes each. Torch-free."""

from collections.abc import Callable
from typing import Any

from workers.errors import StartupError
from workers.layers.decoder_spec import DecoderSpec
from workers.models.gemma2 import describe_gemma2
from workers.models.gemma3 import describe_gemma3
from workers.models.hf_fields import Fields, shown
from workers.models.llama import describe_llama
from workers.models.mistral import describe_mistral
from workers.models.phi3 import describe_phi3
from workers.models.qwen2 import describe_qwen2
from workers.models.qwen3 import describe_qwen3

FAMILIES: dict[str, Callable[[Fields], DecoderSpec]] = {
    "Gemma2ForCausalLM": describe_gemma2,
    "Gemma3ForCausalLM": describe_gemma3,
    "LlamaForCausalLM": describe_llama,
    "MistralForCausalLM": describe_mistral,
    "Phi3ForCausalLM": describe_phi3,
    "Qwen2ForCausalLM": describe_qwen2,
    "Qwen3ForCausalLM": describe_qwen3,
}


def describe(hf_config: dict[str, Any]) -> DecoderSpec:
    """`config.json`, parsed -> the decoder it means. Raises `StartupError` for what is not served."""
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    supported = ", ".join(FAMILIES)
    if family is None:
        what = f"architecture {shown(name)} is not supported" if name else "config.json names no architecture"
        raise StartupError(f"{what}.", f"Supported: {supported}.")
    if hf_config.get("quantization_config") is not None:
        settings = hf_config["quantization_config"]
        method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else "unknown"
        raise StartupError(
            f"the checkpoint is quantised ({shown(method)} in quantization_config), which is not supported.",
            "Use the model's bfloat16, float16 or float32 checkpoint.",
        )
    return family(Fields(hf_config))
