"""The checkpoint that benchmarks make, and the prompts they send."""

import math

import pytest

from benchmarks import checkpoint, mixtures


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return checkpoint.ensure("quick", folder=tmp_path_factory.mktemp("load"))


def test_every_id_of_the_checkpoint_can_be_decoded(tiny):
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    assert (config.tie_word_embeddings, len(tokenizer)) == (True, config.vocab_size)
    assert all(tokenizer.decode([number]) for number in range(config.vocab_size))


def test_the_checkpoint_is_made_once_and_always_the_same(tiny, tmp_path):
    before = (tiny / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.ensure("quick", folder=tiny.parent) == tiny
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before
    again = checkpoint.ensure("quick", folder=tmp_path)
    assert (again / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("shape", "published"), [("0.5b", 494_032_768), ("1.5b", 1_543_714_304)])
def test_the_true_shapes_are_the_published_ones(shape, published):
    values = checkpoint.SHAPES[shape]
    assert values["hidden_size"] % values["num_attention_heads"] == 0
    whole, inner = checkpoint.parameters(shape)
    assert whole == published and whole - inner == values["vocab_size"] * values["hidden_size"]


def test_the_number_of_parameters_is_that_of_the_file(tiny):
    from safetensors import safe_open

    with safe_open(tiny / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert stored == checkpoint.parameters("quick")[0]


@pytest.mark.parametrize(
    ("shape", "published"),
    [("granite-1b-a400m", 1_334_628_352), ("olmoe-1b-7b", 6_919_161_856), ("deepseek-v2-lite", 15_706_484_224)],
)
def test_mixtures_have_the_published_numbers_of_parameters(shape, published):
    """A token reads all of them but the experts that it does not choose, and an embedding that is no head."""
    sizes = {name: math.prod(size) for file in mixtures.tensors(shape) for name, size in file}
    assert sum(sizes.values()) == published
    s = mixtures.MIXTURES[shape]
    idle = (mixtures.experts(s) - s["num_experts_per_tok"]) / mixtures.experts(s)
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name or "put_linear" in name)
    read = published - idle * of_experts - (0 if s["tie_word_embeddings"] else sizes["model.embed_tokens.weight"])
    assert checkpoint.parameters(shape) == (read, read - s["vocab_size"] * s["hidden_size"])


def test_a_mixture_is_read_as_its_class_has_it(tmp_path):
    from transformers import AutoModelForCausalLM, GraniteMoeForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint.ensure("quick-mixture", folder=tmp_path), output_loading_info=True
    )
    assert isinstance(model, GraniteMoeForCausalLM)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_prompts_are_reproducible_and_hold_no_special_token():
    first = checkpoint.prompts(4, 16, 1024, seed=1)
    assert first == checkpoint.prompts(4, 16, 1024, seed=1) != checkpoint.prompts(4, 16, 1024, seed=2)
    assert all(257 <= number < 1024 for prompt in first for number in prompt)
