"""Checkpoints read by the names of their classes: every tensor, slice and expert, and what is wrong by name."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from oarlock.base.errors import StartupError
from oarlock.workers.checks.class_limits import check_ties
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.tensor_names import AS_STORED
from oarlock.workers.transformers_backend.class_description import ClassDescription, Tie
from oarlock.workers.transformers_backend.private_parts import Transpose, WeightConverter
from oarlock.workers.transformers_backend.text_parts import wrapper_without_weights
from oarlock.workers.transformers_backend.weights import ConvertedWeights, DummyClassWeights, names_fault, stored_ties
from oarlock.workers.weights.reader import WeightReader
from oarlock.workers.weights.source import DummyWeights
from tests.unit.workers.weights_in_memory import MemoryWeights

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GEMMA3N = {
    "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40,
}  # fmt: skip


def build(architecture: str, model_type: str, **settings: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a tiny model with random values, and the same class on the meta device."""
    kind: Any = getattr(transformers, architecture)
    config = CONFIG_MAPPING[model_type](**{**SIZES, **settings})
    model = kind._from_config(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_(generator=generator)
    with torch.device("meta"):
        return model, kind._from_config(config)


def stored(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint that transformers writes, in the layout of published ones."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def converted(meta: PreTrainedModel, tensors: dict[str, Tensor], **arguments: Any) -> ConvertedWeights:
    return ConvertedWeights(meta, MemoryWeights(tensors), shapes(tensors), **arguments)


def check_all(weights: ConvertedWeights, wanted: dict[str, Tensor]) -> None:
    """Take every tensor whole, then the later half along each dimension, and each entry of a stack."""
    for name, tensor in wanted.items():
        shape, whole = tuple(tensor.shape), torch.empty(tensor.shape, dtype=tensor.dtype)
        weights.take(name, whole, shape=shape)
        assert torch.equal(whole, tensor), name
        for dim, length in enumerate(shape):
            half = tensor.narrow(dim, length // 2, length - length // 2)
            part = torch.empty(half.shape, dtype=tensor.dtype)
            weights.take(name, part, shape=shape, dim=dim, start=length // 2)
            assert torch.equal(part, half), (name, dim)
        if name.endswith(("gate_up_proj", "down_proj")):
            for expert, entry in enumerate(tensor):
                part = torch.empty(entry.shape[0], entry.shape[1] // 2)
                weights.take_expert(
                    name, expert, part, shape=tuple(entry.shape), dim=1, start=entry.shape[1] - part.shape[1]
                )
                assert torch.equal(part, entry[:, -part.shape[1] :]), (name, expert)
                part = torch.empty(entry.shape[0] // 2, entry.shape[1])
                weights.take_expert(name, expert, part, shape=tuple(entry.shape), start=entry.shape[0] // 4)
                assert torch.equal(part, entry.narrow(0, entry.shape[0] // 4, part.shape[0])), (name, expert)


@pytest.mark.parametrize(
    ("architecture", "model_type", "settings"),
    [
        ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
        ("MixtralForCausalLM", "mixtral", EXPERTS),  # experts one by one, in modules of another name
        ("HrmTextForCausalLM", "hrm_text", {}),  # gate, queries, keys and values in one matrix
        ("Gemma3nForCausalLM", "gemma3n_text", GEMMA3N),
        ("GPT2LMHeadModel", "gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    ],
)  # fmt: skip
def test_every_tensor_equals_the_models_own(
    architecture: str, model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model, meta = build(architecture, model_type, **settings)
    tensors = stored(model, tmp_path)
    assert names_fault(meta, shapes(tensors)) is None
    weights = converted(meta, tensors)
    check_all(weights, model.state_dict())
    weights.finish(lambda name: False)


class CountingWeights(MemoryWeights):
    """Counts the elements of the tensors it fills that are alive at the same time."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.alive: list[weakref.ref[Tensor]] = []
        self.most = 0

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        super().take(name, into, shape=shape, dim=dim, start=start)
        self.alive.append(weakref.ref(into))
        self.most = max(self.most, sum(one.numel() for ref in self.alive if (one := ref()) is not None))


def test_an_expert_reads_only_its_own_tensors_and_a_slice_only_itself(tmp_path: Path) -> None:
    model, meta = build("MixtralForCausalLM", "mixtral", **EXPERTS)
    source = CountingWeights(stored(model, tmp_path))
    weights = ConvertedWeights(meta, source, shapes(source.tensors))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weights.take_expert(name, 2, torch.empty(48, 16), shape=(48, 16))
    read = "model.layers.1.block_sparse_moe.experts.2.w"
    assert source.taken == {f"{read}1.weight": 24 * 16, f"{read}3.weight": 24 * 16}
    weights.take_expert(name, 2, torch.empty(12, 16), shape=(48, 16), start=36)
    assert source.taken.pop(f"{read}3.weight") == (24 + 12) * 16  # half of the rows, of up alone
    weights.take("model.embed_tokens.weight", torch.empty(10, 16), shape=(40, 16), start=30)
    assert source.taken.pop("model.embed_tokens.weight") == 10 * 16
    weights.take(name, torch.empty(4, 48, 16), shape=(4, 48, 16))
    assert source.most == 24 * 16  # tensors of experts are read to their places one by one


def test_of_all_conversions_only_the_newest_is_kept(tmp_path: Path) -> None:
    model, meta = build("HrmTextForCausalLM", "hrm_text")
    source = CountingWeights(stored(model, tmp_path))
    weights = ConvertedWeights(meta, source, shapes(source.tensors))
    largest = max(tensor.numel() for tensor in source.tensors.values())
    for name, tensor in sorted(model.state_dict().items()):
        weights.take(name, torch.empty_like(tensor), shape=tensor.shape)
        assert source.most <= largest
    reads = {name: read / source.tensors[name].numel() for name, read in source.taken.items()}
    assert max(reads.values()) <= 3  # gate, k and q share a conversion when they are asked for together


def _as_class(model: PreTrainedModel) -> dict[str, Tensor]:
    head = () if not model.config.tie_word_embeddings else ("lm_head.weight",)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in head}


def _of_base(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _old_norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    found = {}
    for name, tensor in tensors.items():
        for new, old in norms.items():
            name = name.replace(new, old)
        found[name] = tensor
    return found


@pytest.mark.parametrize(
    ("architecture", "model_type", "layout"),
    [
        ("LlamaForCausalLM", "llama", _of_base),
        ("MixtralForCausalLM", "mixtral", dict),  # experts in one tensor, as the class has them
        ("BertLMHeadModel", "bert", _old_norms),
    ],
)
def test_other_layouts_of_checkpoints_are_read(
    architecture: str, model_type: str, layout: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    settings = {**EXPERTS, "is_decoder": True, "tie_word_embeddings": False}
    model, meta = build(architecture, model_type, **settings)
    tensors = layout(_as_class(model))
    assert names_fault(meta, shapes(tensors)) is None
    check_all(converted(meta, tensors), model.state_dict())


def test_a_stored_stack_may_be_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, meta = build("MixtralForCausalLM", "mixtral", **EXPERTS)
    wanted = model.state_dict()
    tensors = {
        name.replace("gate_up_proj", "w13"): tensor.transpose(1, 2).contiguous() if "gate_up" in name else tensor
        for name, tensor in wanted.items()
    }
    transposed = WeightConverter("experts.w13", "experts.gate_up_proj", [Transpose(1, 2, check_dims=True)])
    module = "oarlock.workers.transformers_backend.weight_names.get_model_conversion_mapping"
    monkeypatch.setattr(module, lambda model: [transposed])
    assert names_fault(meta, shapes(tensors)) is None
    weights = converted(meta, tensors)
    check_all(weights, wanted)
    source = MemoryWeights(tensors)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    ConvertedWeights(meta, source, shapes(tensors)).take_expert(name, 3, torch.empty(48, 16), shape=(48, 16))
    assert source.taken == {"model.layers.0.mlp.experts.w13": 48 * 16}


def test_the_text_part_of_a_wrapper_is_read_from_the_wrappers_checkpoint(tmp_path: Path) -> None:
    text = CONFIG_MAPPING["persimmon"](**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    outer = {"text_config": text.to_dict(), "patch_size": 2, "image_size": 4, "num_channels": 1}
    wrapper, outside = build("FuyuForCausalLM", "fuyu", **outer)
    with torch.device("meta"):
        meta = transformers.PersimmonForCausalLM._from_config(wrapper.config.text_config)
    tensors = stored(wrapper, tmp_path)
    assert "language_model.model.embed_tokens.weight" in tensors
    assert names_fault(meta, shapes(tensors), wrapper=outside) is None
    weights = converted(meta, tensors, wrapper=outside)
    inside = {name.replace("language_model.", ""): one for name, one in wrapper.state_dict().items()}
    check_all(weights, {name: inside[name] for name in meta.state_dict()})
    weights.finish(lambda name: False)  # tensors of images are not the text part's
    tensors["language_model.model.layers.0.extra"] = torch.zeros(1)
    fault = names_fault(meta, shapes(tensors), wrapper=outside)
    assert fault is not None
    assert "layers.0.extra" in fault
    fault = names_fault(meta, shapes(tensors), wrapper=build("LlamaForCausalLM", "llama")[1])
    assert fault == "LlamaForCausalLM has no part that is the base of PersimmonForCausalLM."


def test_a_wrapper_whose_towers_cannot_be_built_is_built_without_them() -> None:
    model, meta = build("Gemma3nForCausalLM", "gemma3n_text", **GEMMA3N)
    config = CONFIG_MAPPING["gemma3n"](text_config=model.config.to_dict(), tie_word_embeddings=True)
    wrapper = wrapper_without_weights(transformers.Gemma3nForConditionalGeneration, config)
    wanted = _as_class(model)
    tensors = {name.replace("model.", "model.language_model."): tensor for name, tensor in wanted.items()}
    tensors["model.vision_tower.conv.weight"] = torch.zeros(1)
    assert names_fault(meta, shapes(tensors), wrapper=wrapper) is None
    weights = converted(meta, tensors, wrapper=wrapper)
    check_all(weights, model.state_dict())
    weights.finish(lambda name: False)


def test_parts_that_are_not_served_can_be_named() -> None:
    model, meta = build("Gemma3nForCausalLM", "gemma3n_text", **GEMMA3N)
    wanted = _as_class(model)
    tensors = {name.replace("model.", "model.language_model."): tensor for name, tensor in wanted.items()}
    tensors["model.vision_tower.conv.weight"] = torch.zeros(1)
    fault = names_fault(meta, shapes(tensors))
    assert fault is not None
    assert "'model.vision_tower.conv.weight', which the class does not know" in fault
    assert names_fault(meta, shapes(tensors), others=["model.vision_tower"]) is None
    weights = converted(meta, tensors, others=["model.vision_tower"])
    check_all(weights, wanted)
    weights.finish(lambda name: False)


def test_faults_name_the_first_tensor_and_count_the_others(tmp_path: Path) -> None:
    model, meta = build("MixtralForCausalLM", "mixtral", **EXPERTS)
    whole = shapes(stored(model, tmp_path))
    experts = "model.layers.0.block_sparse_moe.experts"

    def fault(**changed: tuple[int, ...] | None) -> str:
        tensors = {name: shape for name, shape in {**whole, **changed}.items() if shape is not None}
        found = names_fault(meta, tensors)
        assert found is not None
        return found

    assert fault(**{"model.norm.weight": None, "lm_head.weight": None}) == (
        "the checkpoint holds no tensor for 'model.norm.weight' (and 1 more)"
    )
    assert "holds 'model.extra', which the class does not know" in fault(**{"model.extra": (1,)})
    wrong = fault(**{"model.norm.weight": (8,)})
    assert wrong == "tensor 'model.norm.weight' has shape [8], but the class has [16]"
    one_less = fault(**{f"{experts}.3.w2.weight": None})
    assert f"experts.down_proj', stored as '{experts}.0.w2.weight' and 2 more, has shape [3, 16, 24]" in one_less
    assert "cannot be converted" in fault(**{f"{experts}.3.w1.weight": (4, 4)})
    assert "twice, as 'embed_tokens.weight' and as 'model.embed" in fault(**{"embed_tokens.weight": (40, 16)})


def test_missing_misshapen_and_unused_tensors_are_refused_by_both_names(tmp_path: Path) -> None:
    model, meta = build("MixtralForCausalLM", "mixtral", **EXPERTS)
    tensors = stored(model, tmp_path) | {"model.extra": torch.zeros(1)}
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path, AS_STORED)
    with WeightReader(checkpoint) as reader:
        weights = ConvertedWeights(meta, reader, shapes(tensors))
        with pytest.raises(StartupError, match=r"no tensor for 'model\.norm\.weight'"):
            weights.take("model.norm.weight", torch.empty(16), shape=(16,))
        name = "model.layers.0.mlp.experts.down_proj"
        message = rf"'{name}', stored as 'model\.layers\.0\.block_sparse_moe\.experts\.0\.w2\.weight' and 3 more"
        with pytest.raises(StartupError, match=message):
            weights.take(name, torch.empty(4, 16, 20), shape=(4, 16, 20))
        for one, tensor in meta.state_dict().items():
            if weights.has(one):
                weights.take(one, torch.empty(tensor.shape), shape=tuple(tensor.shape))
        with pytest.raises(StartupError, match=r"does not use: model\.extra"):
            weights.finish(lambda name: False)
        weights.finish(lambda name: name == "model.extra")


def test_a_stored_head_that_is_tied_need_not_be_taken() -> None:
    model, meta = build("LlamaForCausalLM", "llama", tie_word_embeddings=True)
    tensors = model.state_dict()  # with the head
    weights = converted(meta, tensors)
    for name, tensor in tensors.items():
        if name != "lm_head.weight":
            weights.take(name, torch.empty_like(tensor), shape=tensor.shape)
    weights.finish(lambda name: False)


def test_tied_tensors_of_any_name_are_stored_alike_or_refused(tmp_path: Path) -> None:
    model, meta = build("BioGptForCausalLM", "biogpt")
    tensors = stored(model, tmp_path)
    embedding = "biogpt.embed_tokens.weight"
    assert stored_ties(meta, shapes(tensors)) == (), "transformers stores one of them"
    tensors["output_projection.weight"] = tensors[embedding].clone()
    ties = stored_ties(meta, shapes(tensors))
    assert ties == (Tie(embedding, "output_projection.weight"),)
    for are_alike in (True, False):
        save_file(tensors, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.open(tmp_path, AS_STORED)
        with nullcontext() if are_alike else pytest.raises(StartupError, match="ties biogpt"):
            check_ties(checkpoint, ClassDescription("BioGptForCausalLM", "biogpt", ties=ties))
        tensors["output_projection.weight"][3, 5] += 1.0


def test_a_bias_that_the_class_lets_be_missing_is_zero() -> None:
    model, meta = build("LlamaForCausalLM", "llama", attention_bias=True)
    bias = "model.layers.0.self_attn.q_proj.bias"
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != bias}
    assert names_fault(meta, shapes(tensors)) == f"the checkpoint holds no tensor for {bias!r}"
    meta._keys_to_ignore_on_load_missing = ["q_proj.bias"]
    assert names_fault(meta, shapes(tensors)) is None
    into = torch.ones(4)
    converted(meta, tensors).take(bias, into, shape=(16,), start=4)
    assert not into.any()


def test_noise_of_a_stack_is_that_of_its_experts() -> None:
    weights = DummyClassWeights(DummyWeights(0))
    whole, columns, rows = torch.empty(3, 4, 6), torch.empty(3, 4, 2), torch.empty(3, 2, 6)
    weights.take("w", whole, shape=(3, 4, 6))
    weights.take("w", columns, shape=(3, 4, 6), dim=2, start=4)
    weights.take("w", rows, shape=(3, 4, 6), dim=1, start=1)
    assert torch.equal(columns, whole[:, :, 4:])
    assert torch.equal(rows, whole[:, 1:3])
    expert, scalar = torch.empty(4, 3), torch.empty(())
    weights.take_expert("w", 1, expert, shape=(4, 6), dim=1, start=3)
    assert torch.equal(expert, whole[1][:, 3:])
    weights.take("scalar", scalar, shape=())
    assert scalar != 0
