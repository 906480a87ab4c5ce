"""Known checkpoints of every class that the registry serves, for `oarlock models --supported`, `oarlock doctor` and the
documentation. Torch-free; the registry alone decides which classes are served.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oarlock.workers.config import WorkerConfig
from oarlock.workers.gguf_config import hf_config
from oarlock.workers.model_files.gguf_model import GGUFModel
from oarlock.workers.models.encoders.registry import ENCODERS, describe_encoder, is_encoder, is_scored
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.hf_quantization import stored_quantization
from oarlock.workers.models.registry import GGUF_FAMILIES, describe, has_page
from oarlock.workers.transformers_backend.choice import class_by_name
from oarlock.workers.transformers_backend.tested import tested_classes

# Notes: the needs and the limits of a class or of its known checkpoint.
GATED = "gated download"  # the hub asks for acceptance of its licence
BASE = "no chat template"  # completes text, and is not trained for conversations
EXPERTS = "experts"
LATENT = "latent attention"
SHORT = "up to index_topk tokens"  # its indexer is not supported
WINDOW = "sliding window"  # in some or all layers
RECURRENT = "recurrent layers"  # some or all layers keep one state per sequence
TEXT = "text part only"
BIN = "stored as .bin"  # must be converted to safetensors

# Family -> class -> its known checkpoint, and notes.
_KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "Llama": {
        "LlamaForCausalLM": ("meta-llama/Llama-3.1-8B-Instruct", GATED),
        "Llama4ForCausalLM": ("meta-llama/Llama-4-Scout-17B-16E-Instruct", GATED, EXPERTS, WINDOW, TEXT),
        "Llama4ForConditionalGeneration": ("meta-llama/Llama-4-Scout-17B-16E-Instruct", GATED, EXPERTS, WINDOW, TEXT),
        "CwmForCausalLM": ("facebook/cwm", GATED, WINDOW),
        "InternLM3ForCausalLM": ("internlm/internlm3-8b-instruct",),
        "IQuestCoderForCausalLM": ("IQuestLab/IQuest-Coder-V1-40B-Instruct",),
    },
    "Qwen": {
        "Qwen2ForCausalLM": ("Qwen/Qwen2.5-7B-Instruct",),
        "Qwen2MoeForCausalLM": ("Qwen/Qwen1.5-MoE-A2.7B-Chat", EXPERTS),
        "Qwen3ForCausalLM": ("Qwen/Qwen3-8B",),
        "Qwen3MoeForCausalLM": ("Qwen/Qwen3-30B-A3B-Instruct-2507", EXPERTS),
        "Qwen3NextForCausalLM": ("Qwen/Qwen3-Next-80B-A3B-Instruct", EXPERTS, RECURRENT),
        "Qwen3_5ForCausalLM": ("Qwen/Qwen3.5-9B", RECURRENT, TEXT),
        "Qwen3_5ForConditionalGeneration": ("Qwen/Qwen3.5-9B", RECURRENT, TEXT),
        "Qwen3_5MoeForCausalLM": ("Qwen/Qwen3.5-35B-A3B", EXPERTS, RECURRENT, TEXT),
        "Qwen3_5MoeForConditionalGeneration": ("Qwen/Qwen3.5-35B-A3B", EXPERTS, RECURRENT, TEXT),
        "Qwen2VLForConditionalGeneration": ("Qwen/Qwen2-VL-7B-Instruct", TEXT),
        "Qwen2_5_VLForConditionalGeneration": ("Qwen/Qwen2.5-VL-7B-Instruct", TEXT),
        "Qwen3VLForConditionalGeneration": ("Qwen/Qwen3-VL-8B-Instruct", TEXT),
        "Qwen3VLMoeForConditionalGeneration": ("Qwen/Qwen3-VL-30B-A3B-Instruct", EXPERTS, TEXT),
    },
    "Mistral": {
        "MistralForCausalLM": ("mistralai/Mistral-7B-Instruct-v0.3",),
        "MixtralForCausalLM": ("mistralai/Mixtral-8x7B-Instruct-v0.1", EXPERTS),
        "MinistralForCausalLM": ("mistralai/Ministral-8B-Instruct-2410", GATED, WINDOW),
        "Ministral3ForCausalLM": ("mistralai/Ministral-3-8B-Instruct-2512-GGUF",),
        "Mistral3ForConditionalGeneration": ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", TEXT),
    },
    "Gemma": {
        "GemmaForCausalLM": ("google/gemma-7b-it", GATED),
        "Gemma2ForCausalLM": ("google/gemma-2-9b-it", GATED, WINDOW),
        "Gemma3ForCausalLM": ("google/gemma-3-1b-it", GATED, WINDOW),
        "Gemma3ForConditionalGeneration": ("google/gemma-3-4b-it", GATED, WINDOW, TEXT),
        "Gemma4ForCausalLM": ("google/gemma-4-E2B-it", WINDOW, TEXT),
        "Gemma4ForConditionalGeneration": ("google/gemma-4-E2B-it", WINDOW, TEXT),
        "Gemma4UnifiedForCausalLM": ("google/gemma-4-12B-it", WINDOW, TEXT),
        "Gemma4UnifiedForConditionalGeneration": ("google/gemma-4-12B-it", WINDOW, TEXT),
        "VaultGemmaForCausalLM": ("google/vaultgemma-1b", GATED, WINDOW, BASE),
    },
    "GPT": {
        "GptOssForCausalLM": ("openai/gpt-oss-20b", EXPERTS, WINDOW),
        "GPT2LMHeadModel": ("openai-community/gpt2", BASE),
        "GPTNeoForCausalLM": ("EleutherAI/gpt-neo-1.3B", BASE, WINDOW),
        "GPTJForCausalLM": ("EleutherAI/gpt-j-6b", BASE, BIN),
        "GPTNeoXForCausalLM": ("EleutherAI/pythia-1.4b", BASE),
        "OPTForCausalLM": ("facebook/opt-1.3b", BASE, BIN),
    },
    "StarCoder": {
        "GPTBigCodeForCausalLM": ("bigcode/starcoder", GATED, BASE),
        "Starcoder2ForCausalLM": ("bigcode/starcoder2-7b", BASE, WINDOW),
    },
    "Phi": {
        "PhiForCausalLM": ("microsoft/phi-2", BASE),
        "Phi3ForCausalLM": ("microsoft/Phi-4-mini-instruct",),
        "PhimoeForCausalLM": ("microsoft/Phi-3.5-MoE-instruct", EXPERTS),
        "PhiMoEForCausalLM": ("microsoft/Phi-3.5-MoE-instruct", EXPERTS),
        "Phi4MMForCausalLM": ("microsoft/Phi-4-multimodal-instruct", TEXT),
        "Phi4MultimodalForCausalLM": ("microsoft/Phi-4-multimodal-instruct", TEXT),
    },
    "GLM": {
        "GlmForCausalLM": ("zai-org/glm-4-9b-chat-hf",),
        "Glm4ForCausalLM": ("zai-org/GLM-4-9B-0414",),
        "Glm4MoeForCausalLM": ("zai-org/GLM-4.5-Air", EXPERTS),
        "Glm4MoeLiteForCausalLM": ("zai-org/GLM-4.7-Flash", EXPERTS, LATENT),
        "GlmMoeDsaForCausalLM": ("zai-org/GLM-5", EXPERTS, LATENT, SHORT),
        "Glm4vForConditionalGeneration": ("zai-org/GLM-4.1V-9B-Thinking", TEXT),
        "Glm4vMoeForConditionalGeneration": ("zai-org/GLM-4.5V", EXPERTS, TEXT),
    },
    "DeepSeek": {
        "DeepseekV2ForCausalLM": ("deepseek-ai/DeepSeek-V2-Lite-Chat", EXPERTS, LATENT),
        "DeepseekV3ForCausalLM": ("deepseek-ai/DeepSeek-V3.1", EXPERTS, LATENT),
        "DeepseekV32ForCausalLM": ("deepseek-ai/DeepSeek-V3.2", EXPERTS, LATENT, SHORT),
        "DeepseekVLForConditionalGeneration": ("deepseek-community/deepseek-vl-1.3b-chat", TEXT),
    },
    "Kimi": {
        "KimiK25ForConditionalGeneration": ("moonshotai/Kimi-K2.5", EXPERTS, LATENT, TEXT),
        "Kimi_K25ForConditionalGeneration": ("moonshotai/Kimi-K2.5", EXPERTS, LATENT, TEXT),
        "KimiLinearForCausalLM": ("moonshotai/Kimi-Linear-48B-A3B-Instruct", EXPERTS, RECURRENT, LATENT),
    },
    "LongCat": {
        "LongcatFlashForCausalLM": ("meituan-longcat/LongCat-Flash-Chat", EXPERTS, LATENT),
    },
    "Granite": {
        "GraniteForCausalLM": ("ibm-granite/granite-3.3-8b-instruct",),
        "GraniteSWAForCausalLM": ("ibm-granite/granite-swash-2b", WINDOW),
        "GraniteMoeForCausalLM": ("ibm-granite/granite-3.1-3b-a800m-instruct", EXPERTS),
        "GraniteMoeHybridForCausalLM": ("ibm-granite/granite-4.0-h-tiny", EXPERTS, RECURRENT),
        "GraniteMoeSharedForCausalLM": ("ibm-research/moe-7b-1b-active-shared-experts", EXPERTS, BASE),
        "GraniteMoeSWAForCausalLM": ("ibm-granite/granite-swash-3b-a600m", EXPERTS, WINDOW),
    },
    "OLMo": {
        "OlmoForCausalLM": ("allenai/OLMo-7B-0724-Instruct-hf",),
        "Olmo2ForCausalLM": ("allenai/OLMo-2-1124-7B-Instruct",),
        "Olmo3ForCausalLM": ("allenai/Olmo-3-7B-Instruct", WINDOW),
        "OlmoHybridForCausalLM": ("allenai/Olmo-Hybrid-7B", RECURRENT, BASE),
        "OlmoeForCausalLM": ("allenai/OLMoE-1B-7B-0924-Instruct", EXPERTS),
        "FlexOlmoForCausalLM": ("allenai/FlexOlmo-7x7B-1T", EXPERTS, BASE),
    },
    "Command": {
        "CohereForCausalLM": ("CohereLabs/c4ai-command-r-v01", GATED),
        "Cohere2ForCausalLM": ("CohereLabs/c4ai-command-r7b-12-2024", GATED, WINDOW),
        "Cohere2MoeForCausalLM": ("CohereLabs/command-a-plus-05-2026", EXPERTS, WINDOW),
        "CohereCompassForCausalLM": ("CohereLabs/North-Micro-Vision-Instruct", WINDOW, TEXT),
        "CohereCompassForConditionalGeneration": ("CohereLabs/North-Micro-Vision-Instruct", WINDOW, TEXT),
        "AyaVisionForConditionalGeneration": ("CohereLabs/aya-vision-8b", GATED, WINDOW, TEXT),
    },
    "Ernie": {
        "Ernie4_5ForCausalLM": ("baidu/ERNIE-4.5-0.3B-PT",),
        "Ernie4_5_ForCausalLM": ("baidu/ERNIE-4.5-0.3B-PT",),
        "Ernie4_5_MoeForCausalLM": ("baidu/ERNIE-4.5-21B-A3B-PT", EXPERTS),
        "PaddleOCRVLForConditionalGeneration": ("PaddlePaddle/PaddleOCR-VL", TEXT),
    },
    "EXAONE": {
        "Exaone4ForCausalLM": ("LGAI-EXAONE/EXAONE-4.0-32B", WINDOW),
        "ExaoneMoeForCausalLM": ("LGAI-EXAONE/K-EXAONE-236B-A23B", EXPERTS, WINDOW),
        "ExaoneMoEForCausalLM": ("LGAI-EXAONE/K-EXAONE-236B-A23B", EXPERTS, WINDOW),
    },
    "Hunyuan": {
        "HunYuanDenseV1ForCausalLM": ("tencent/Hunyuan-7B-Instruct",),
        "HunYuanMoEV1ForCausalLM": ("tencent/Hunyuan-A13B-Instruct", EXPERTS),
        "HYV3ForCausalLM": ("tencent/Hy3-preview", EXPERTS),
        "HunYuanVLForConditionalGeneration": ("tencent/HunyuanOCR", TEXT),
    },
    "Arcee": {
        "ArceeForCausalLM": ("arcee-ai/AFM-4.5B",),
        "AfmoeForCausalLM": ("arcee-ai/Trinity-Mini", EXPERTS, WINDOW),
    },
    "LFM": {
        "Lfm2ForCausalLM": ("LiquidAI/LFM2-1.2B", RECURRENT),
        "Lfm2MoeForCausalLM": ("LiquidAI/LFM2-8B-A1B", EXPERTS, RECURRENT),
        "Lfm3ForCausalLM": ("LiquidAI/LFM3-1.7B", WINDOW, RECURRENT),
        "Lfm2VlForConditionalGeneration": ("LiquidAI/LFM2-VL-1.6B", RECURRENT, TEXT),
        "Lfm3VlForConditionalGeneration": ("LiquidAI/LFM3-VL-2B", WINDOW, RECURRENT, TEXT),
    },
    "SmolLM": {
        "SmolLM3ForCausalLM": ("HuggingFaceTB/SmolLM3-3B",),
        "SmolVLMForConditionalGeneration": ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", TEXT),
        "Idefics3ForConditionalGeneration": ("HuggingFaceM4/Idefics3-8B-Llama3", TEXT),
    },
    "LLaVA": {
        "LlavaForConditionalGeneration": ("llava-hf/llava-1.5-7b-hf", TEXT),
        "LlavaNextForConditionalGeneration": ("llava-hf/llava-v1.6-mistral-7b-hf", TEXT),
        "LlavaOnevisionForConditionalGeneration": ("llava-hf/llava-onevision-qwen2-7b-ov-hf", TEXT),
    },
    "Others": {
        "AXK1ForCausalLM": ("skt/A.X-K1", EXPERTS, LATENT),
        "BailingHybridForCausalLM": ("inclusionAI/Ling-3.0-tiny", EXPERTS, RECURRENT, LATENT),
        "BailingMoeV3ForCausalLM": ("inclusionAI/Ling-3.0-tiny", EXPERTS, RECURRENT, LATENT),
        "BambaForCausalLM": ("ibm-ai-platform/Bamba-9B-v2", RECURRENT, BASE),
        "BioGptForCausalLM": ("microsoft/biogpt", BASE, BIN),
        "Dots1ForCausalLM": ("rednote-hilab/dots.llm1.inst", EXPERTS),
        "Emu3ForCausalLM": ("BAAI/Emu3-Chat-hf", TEXT),
        "FalconH1ForCausalLM": ("tiiuae/Falcon-H1-1.5B-Instruct", RECURRENT),
        "FlintForCausalLM": ("RecursiveSI/flint", EXPERTS, WINDOW),
        "GotOcr2ForConditionalGeneration": ("stepfun-ai/GOT-OCR-2.0-hf", TEXT),
        "HeliumForCausalLM": ("kyutai/helium-1-preview-2b", BASE),
        "HyperCLOVAXForCausalLM": ("naver-hyperclovax/HyperCLOVAX-SEED-Think-14B",),
        "InternVLForConditionalGeneration": ("OpenGVLab/InternVL3-8B-hf", TEXT),
        "Jais2ForCausalLM": ("inceptionai/Jais-2-8B-Chat",),
        "Kolibri1ForCausalLM": ("Aleph-Alpha/Kolibri-1", EXPERTS, WINDOW),
        "LagunaForCausalLM": ("poolside/laguna-XS.2", EXPERTS, WINDOW),
        "Mamba2ForCausalLM": ("mistralai/Mamba-Codestral-7B-v0.1", RECURRENT, BASE),
        "MellumForCausalLM": ("JetBrains/Mellum2-12B-A2.5B-Base", EXPERTS, WINDOW, BASE),
        "MiniCPM3ForCausalLM": ("openbmb/MiniCPM3-4B", LATENT),
        "MiMoV2FlashForCausalLM": ("XiaomiMiMo/MiMo-V2-Flash", EXPERTS, WINDOW),
        "MiniMaxM2ForCausalLM": ("MiniMaxAI/MiniMax-M2", EXPERTS),
        "NemotronForCausalLM": ("nvidia/Nemotron-Mini-4B-Instruct",),
        "NemotronHForCausalLM": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", EXPERTS, RECURRENT),
        "Ovis2ForConditionalGeneration": ("thisisiron/Ovis2-2B-hf", TEXT),
        "SeedOssForCausalLM": ("ByteDance-Seed/Seed-OSS-36B-Instruct",),
        "SolarOpenForCausalLM": ("upstage/Solar-Open-100B", EXPERTS),
        "StableLmForCausalLM": ("stabilityai/stablelm-2-zephyr-1_6b",),
        "YoutuForCausalLM": ("tencent/Youtu-LLM-2B", LATENT),
    },
    "BERT": {
        "BertModel": ("sentence-transformers/all-MiniLM-L6-v2",),
        "BertForMaskedLM": ("google-bert/bert-base-uncased",),
        "BertForSequenceClassification": ("cross-encoder/ms-marco-MiniLM-L6-v2",),
    },
    "RoBERTa": {
        "RobertaModel": ("sentence-transformers/stsb-roberta-base-v2",),
        "RobertaForMaskedLM": ("sentence-transformers/all-roberta-large-v1",),
        "RobertaForSequenceClassification": ("cross-encoder/quora-roberta-base",),
    },
    "XLM-RoBERTa": {
        "XLMRobertaModel": ("intfloat/multilingual-e5-small",),
        "XLMRobertaForMaskedLM": ("FacebookAI/xlm-roberta-base",),
        "XLMRobertaForSequenceClassification": ("BAAI/bge-reranker-v2-m3",),
    },
    "CamemBERT": {
        "CamembertModel": ("dangvantuan/sentence-camembert-base",),
        "CamembertForMaskedLM": ("almanach/camembert-base",),
        "CamembertForSequenceClassification": ("antoinelouis/crossencoder-camembert-base-mmarcoFR",),
    },
    "ModernBERT": {
        "ModernBertModel": ("Alibaba-NLP/gte-modernbert-base",),
        "ModernBertForMaskedLM": ("answerdotai/ModernBERT-base",),
        "ModernBertForSequenceClassification": ("Alibaba-NLP/gte-reranker-modernbert-base",),
    },
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One class that is served."""

    architecture: str  # name of the class in `architectures` of config.json
    family: str
    checkpoint: str  # hub id of a known checkpoint
    task: str  # text, embeddings or scores
    gguf: tuple[str, ...]  # architectures of GGUF files with such a model
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "architecture": self.architecture,
            "family": self.family,
            "checkpoint": self.checkpoint,
            "task": self.task,
            "gguf": list(self.gguf),
            "notes": list(self.notes),
        }


def _entry(family: str, architecture: str, checkpoint: str, *notes: str) -> Entry:
    gguf = tuple(name for name, known in GGUF_FAMILIES.items() if architecture in known.architectures)
    task = "text" if architecture not in ENCODERS else "scores" if is_scored(architecture) else "embeddings"
    return Entry(architecture, family, checkpoint, task, gguf, notes)


CATALOGUE = {
    architecture: _entry(family, architecture, *facts)
    for family, classes in _KNOWN.items()
    for architecture, facts in classes.items()
}


def classes_of_transformers() -> list[str]:
    """Return the classes without a description here that transformers' code computes right (`tested_classes`)."""
    tested = tested_classes().items()
    return sorted(name for name, result in tested if result.refused is None and not has_page(name))


def served_as(config: WorkerConfig, gguf: Path | None = None) -> str:
    """Return a clause about the model of `config`: the class that describes it, and a known checkpoint of that class;
    or the class whose code would compute it.

    Reads `config.json`, or the settings of the GGUF file `gguf`; neither weights nor tokenizer. Raises `StartupError`
    if it is known already that the model is not served.
    """
    directory = Path(config.model_path)
    found = None if gguf is not None else class_by_name(config)
    if found is not None:
        return code_clause(found[0], "checkpoint" if found[1] else "transformers")
    settings = read_config(directory) if gguf is None else hf_config(GGUFModel.open(gguf))
    if is_encoder(settings):
        describe_encoder(settings)
    else:
        describe(settings)
    if gguf is None:
        stored_quantization(directory, settings)
    return clause(settings["architectures"][0])


def clause(architecture: str) -> str:
    """Return the clause about a class that is served."""
    entry = CATALOGUE[architecture]
    limit = f", {TEXT}" if TEXT in entry.notes else ""
    return f"described as {architecture}, the class of {entry.checkpoint}{limit}"


def code_clause(architecture: str, served_by: str) -> str:
    """Return the clause about a class without a description. `served_by`: see `DecoderSpec`."""
    code = "the checkpoint's own" if served_by == "checkpoint" else "transformers'"
    return f"computed by {code} code ({architecture})"


def code_limits(*, is_replicated: bool) -> str:
    """Return the costs of serving a class with transformers' code. `is_replicated`: see `DecoderSpec`."""
    weights = "every rank holds the weights of all layers, because the class has no plan for tensor parallelism"
    limits = ["slower than a described family", "no pipeline stages", "other numbers of ranks may give other bits"]
    return "; ".join([*limits, *([weights] if is_replicated else [])])


def code_line(architecture: str, served_by: str, *, is_replicated: bool) -> str:
    """Return a line about the code that computes a class without a description, with its costs."""
    return f"{code_clause(architecture, served_by)}: {code_limits(is_replicated=is_replicated)} (docs/models.md)"


def by_family(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of each family, in the order of the catalogue."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.family, []).append(entry)
    return found


def as_markdown(*, encoders: bool) -> str:
    """Return the table of the encoders, or of all other classes, for the documentation."""
    entries = [entry for entry in CATALOGUE.values() if (entry.architecture in ENCODERS) == encoders]
    head = ("family", "class", "checkpoint", *(("task",) if encoders else ("GGUF", "notes")))
    rows = [
        (
            family if number == 0 else "",
            f"`{entry.architecture}`",
            f"`{entry.checkpoint}`",
            *((entry.task,) if encoders else (", ".join(f"`{name}`" for name in entry.gguf), ", ".join(entry.notes))),
        )
        for family, members in by_family(entries).items()
        for number, entry in enumerate(members)
    ]
    lines = [f"| {' | '.join(cells)} |".replace("  ", " ") for cells in (head, *rows)]
    lines.insert(1, f"{'|---' * len(head)}|")
    return "\n".join([*lines, "", f"{len(entries)} classes."])
