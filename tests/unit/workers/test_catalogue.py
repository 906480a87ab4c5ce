"""The catalogue has facts about every class that the registry serves and no other, and the registry serves enough."""

import json

import gguf
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oarlock.server.hub.local_model import HUB_ID
from oarlock.workers.catalogue import (
    BASE,
    BIN,
    CATALOGUE,
    EXPERTS,
    GATED,
    LATENT,
    RECURRENT,
    SHORT,
    TEXT,
    WINDOW,
    as_markdown,
    by_family,
    clause,
)
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.memory_spec import SlotsSpec
from oarlock.workers.models.encoders.registry import ENCODERS, is_encoder
from oarlock.workers.models.registry import FAMILIES, GGUF_FAMILIES, architectures, describe
from oarlock.workers.models.wrappers import served_wrappers
from tests.golden import gguf_latent, gguf_mamba
from tests.golden.cases import CASES
from tests.golden.gguf_writer import _ARCHITECTURES, _NEWER
from tests.golden.tiny_models import tiny_config
from tests.golden.tiny_wrappers import WRAPPERS

# The classes that people serve most, in order, by downloads of their checkpoints.
MOST_SERVED = (
    "Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "GptOssForCausalLM", "Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3MoeForCausalLM",
    "MistralForCausalLM", "DeepseekV3ForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "OPTForCausalLM",
    "Mistral3ForConditionalGeneration", "Phi3ForCausalLM", "MiniMaxM2ForCausalLM", "DeepseekV4ForCausalLM",
    "GlmMoeDsaForCausalLM", "Kimi_K25ForConditionalGeneration", "NemotronHForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "Gemma2ForCausalLM", "Qwen3NextForCausalLM", "Lfm2ForCausalLM",
    "GraniteMoeHybridForCausalLM", "Gemma3nForConditionalGeneration", "DeepseekV32ForCausalLM", "SmolLM3ForCausalLM",
    "HYV3ForCausalLM", "MiMoV2FlashForCausalLM", "Llama4ForConditionalGeneration", "InternVLForConditionalGeneration",
    "MixtralForCausalLM", "GraniteForCausalLM", "Olmo3ForCausalLM", "Qwen3VLMoeForConditionalGeneration",
)  # fmt: skip
LEAST_CAUSAL, LEAST_MOST_SERVED = 96, 38


def test_it_has_every_class_of_the_registry_and_no_other():
    assert CATALOGUE.keys() == set(architectures())
    assert len(CATALOGUE) == len(architectures())
    assert FAMILIES.keys() | ENCODERS.keys() <= CATALOGUE.keys()


def test_most_classes_that_people_serve_are_served():
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert len(causal) == 181 and len(set(MOST_SERVED)) == 40
    served = {name for name, entry in CATALOGUE.items() if entry.task == "text"}
    assert len(served & causal) >= LEAST_CAUSAL
    assert len(served & set(MOST_SERVED)) >= LEAST_MOST_SERVED


def test_every_class_has_a_checkpoint_of_the_hub_and_known_notes():
    for entry in CATALOGUE.values():
        owner, _, name = entry.checkpoint.partition("/")
        assert owner and name and HUB_ID.fullmatch(entry.checkpoint), entry
        assert set(entry.notes) <= {GATED, BASE, EXPERTS, WINDOW, RECURRENT, LATENT, SHORT, TEXT, BIN}, entry
        assert len(set(entry.notes)) == len(entry.notes), entry
    assert {entry.task for entry in CATALOGUE.values()} == {"text", "embeddings", "scores"}
    assert sum(map(len, by_family(CATALOGUE.values()).values())) == len(CATALOGUE)


def test_gguf_names_are_the_names_of_the_converter():
    named = {name: entry.gguf for name, entry in CATALOGUE.items() if entry.gguf}
    kinds = _ARCHITECTURES | gguf_mamba.ARCHITECTURES | gguf_latent.ARCHITECTURES
    converted = {name: gguf.MODEL_ARCH_NAMES[kind] for name, kind in kinds.items()}
    converted |= _NEWER | gguf_latent.NEWER
    assert {name: known for name, known in converted.items() if known not in named[name]} == {}
    assert {one for names in named.values() for one in names} == GGUF_FAMILIES.keys()


@pytest.mark.parametrize(
    "family",
    sorted({case.family for case in CASES.values()} & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - WRAPPERS.keys()),
)
def test_a_class_with_experts_or_recurrent_layers_has_the_note(family):
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    spec = describe(
        json.loads(tiny_config(family).get_text_config().to_json_string()) | {"architectures": [architecture]}
    )
    has_experts = any(isinstance(branch.sublayer, ExpertsSpec) for layer in spec.layers for branch in layer.branches)
    is_recurrent = any(isinstance(group.memory, SlotsSpec) for group in spec.groups)
    assert has_experts == (EXPERTS in CATALOGUE[architecture].notes)
    assert is_recurrent == (RECURRENT in CATALOGUE[architecture].notes)
    has_latents = any(isinstance(one, LatentAttentionSpec) for one in spec.sublayers)
    assert has_latents == (LATENT in CATALOGUE[architecture].notes)
    assert (spec.length_limit is not None) == (SHORT in CATALOGUE[architecture].notes)


def test_the_text_part_of_a_multimodal_class_has_the_note_and_its_class_decides_the_others():
    for name, text_classes in served_wrappers(FAMILIES).items():
        text, whole = CATALOGUE[text_classes[0]], CATALOGUE[name]
        assert TEXT in whole.notes, name
        assert all((note in whole.notes) == (note in text.notes) for note in (EXPERTS, RECURRENT, LATENT)), name


def test_one_clause_about_a_class():
    assert clause("LlamaForCausalLM") == "described as LlamaForCausalLM, the class of meta-llama/Llama-3.1-8B-Instruct"
    for name, entry in CATALOGUE.items():
        assert clause(name).endswith(f", {TEXT}") == (TEXT in entry.notes)


def test_the_tables_of_the_documentation_have_each_class_once():
    lines = [line for encoders in (True, False) for line in as_markdown(encoders=encoders).splitlines()]
    assert all(sum(f"`{name}`" in line for line in lines) == 1 for name in CATALOGUE)
    scores = [name for name, entry in CATALOGUE.items() if entry.task == "scores"]
    assert scores and all(is_encoder({"architectures": [name]}) and "Classification" in name for name in scores)
