"""GGUF files of every family against the safetensors checkpoints that they were made from.

A file that describes the same model and holds the same numbers under the same names needs no comparison of logits.
"""

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from oarlock.base.errors import StartupError
from oarlock.workers.gguf_config import gguf_checkpoint, hf_config
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec, tensor_shapes
from oarlock.workers.layers.rotary import RotaryTable
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.gguf_header import GROUP_LAYOUTS, SERVED, GroupLayout
from oarlock.workers.model_files.gguf_model import GGUFCheckpoint, GGUFModel
from oarlock.workers.models.registry import describe, read_spec
from oarlock.workers.verify.dequantise import dequantised_gguf
from oarlock.workers.weights.gguf_reader import GGUFReader, Groups
from oarlock.workers.weights.reader import WeightReader
from tests.golden import gguf_writer
from tests.golden.cases import CASES
from tests.golden.gguf_blocks import dequantized, quantized
from tests.golden.gguf_writer import all_of, write_gguf
from tests.golden.tiny_models import make_tiny

pytestmark = pytest.mark.slow

# What no GGUF file says is at the families' defaults here.
_GEMMA3 = {"query_pre_attn_scalar": 24, "num_hidden_layers": 7, "layer_types": None}
_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [3.0, 3.3, 3.9, 5.1]}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **_FACTORS}
_PHI4 = {"hidden_size": 128, "tie_word_embeddings": True, "vocab_size": 307, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"vocab_size": 317}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", CASES["llama-linear"].special),
    "llama-wide-heads": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", CASES["qwen2-yarn"].special),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "phi3": ("phi3", {"sliding_window": 20}),
    "phi3-longrope": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": _LONGROPE}),
    "phi4": ("phi3", _PHI4 | {"original_max_position_embeddings": 16, "rope_parameters":
                               _LONGROPE | {"partial_rotary_factor": 0.5}}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma2-27b": ("gemma2", {"query_pre_attn_scalar": 8, "num_hidden_layers": 46}),
    "gemma3": ("gemma3_text", _GEMMA3),
    "gemma3-scaled": ("gemma3_text", _GEMMA3 | {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "arcee": ("arcee", {}),
    "arcee-yarn": ("arcee", {"hidden_size": 128, "mlp_bias": False, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}}),
    "nemotron": ("nemotron", {}),
    "nemotron-biased": ("nemotron", {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.25}}),
    "jais2": ("jais2", {}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-unbiased": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False, "sliding_window": None}),
    "olmo": ("olmo", {}),
    "olmo-unclipped": ("olmo", {"clip_qkv": None, "tie_word_embeddings": True}),
    "cohere": ("cohere", {"vocab_size": 311}),
    "cohere2": ("cohere2", {"layer_types": None, "num_hidden_layers": 5}),
    "ernie4-5": ("ernie4_5", {"tie_word_embeddings": False}),
    "exaone4": ("exaone4", {}),
    "exaone4-no-windows": ("exaone4", CASES["exaone4-no-windows"].special),
    "gemma": ("gemma", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {"attention_bias": False}),
    "granite": ("granite", {}),
    "granite-biased-tied": ("granite", CASES["granite-biased-tied"].special),
    "olmo3": ("olmo3", {}),
    "seed-oss": ("seed_oss", {"attention_out_bias": True}),
    "smollm3": ("smollm3", {"no_rope_layers": None, "num_hidden_layers": 5}),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": ("stablelm", CASES["stablelm-parallel"].special),
    "ministral3": ("ministral3", {}),
    "qwen3-5": ("qwen3_5_text", {}),
    "qwen3-5-equal-heads": ("qwen3_5_text", {"linear_num_value_heads": 4, "tie_word_embeddings": True}),
    "lfm2": ("lfm2", {}),
    "lfm2-moe": ("lfm2_moe", {}),
    "lfm2-biased": ("lfm2", {"conv_bias": True, "layer_types": ["full_attention", "conv", "conv"]}),
    "gemma4": ("gemma4_text", {"rope_parameters": None}),
    "gemma4-keys-as-values": ("gemma4_text", {
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0, "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}},
        "attention_k_eq_v": True, "num_global_key_value_heads": 2, "final_logit_softcapping": 2.5}),
}  # fmt: skip
_LLAMA4 = {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "floor_scale": 8192, "attn_scale": 0.1,
           "num_hidden_layers": 4}  # fmt: skip
PARTS = (1, 2, 4)  # into which tensors are cut


def opened(path: Path) -> tuple[DecoderSpec, GGUFCheckpoint]:
    model = GGUFModel.open(path)
    return describe(hf_config(model)), gguf_checkpoint(path.parent, model)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors checkpoint, under our names."""
    tensors, names = {}, read_spec(str(directory)).names
    for file in directory.glob("*.safetensors"):
        tensors |= {str(names.rename(name)): tensor for name, tensor in load_file(file).items()}
    # Converters leave rows of two modules alternating only in Qwen3.5's query projection.
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        if (blocks := names.blocks_of(name.removesuffix(".weight"))) is not None and "q_proj" in blocks.parts:
            whole = tensors[name]
            tensors |= {name.replace("q_proj", part): whole[blocks.rows_of(part)] for part in blocks.parts}
    # Weights of convolutions are matrices in GGUF.
    tensors = {
        name: tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor for name, tensor in tensors.items()
    }
    if json.loads((directory / "config.json").read_text()).get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    return tensors


def assembled(reader: GGUFReader, name: str, shape: tuple[int, ...], dim: int, parts: int) -> torch.Tensor:
    """A tensor read in parts along `dim`, as ranks read it, and put together."""
    length = -(-shape[dim] // parts)
    found = []
    for start in range(0, shape[dim], length):
        sizes = [min(length, size - start) if axis == dim else size for axis, size in enumerate(shape)]
        found.append(torch.empty(sizes))
        reader.take(name, found[-1], shape=shape, dim=dim, start=start)
    return torch.cat(found, dim)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_describes_the_same_model_and_holds_the_same_numbers(tmp_path: Path, name: str) -> None:
    family, special = MODELS[name]
    directory = make_tiny(tmp_path, family, seed=5, **special)
    spec, checkpoint = opened(write_gguf(directory, tmp_path / "model.gguf", all_of("F32")))
    original = read_spec(str(directory))
    # A number that the file has in float32.
    assert spec.attentions[0].rope.attention_factor == pytest.approx(
        original.attentions[0].rope.attention_factor, rel=2**-23
    )
    factor = original.attentions[0].rope.attention_factor
    same = with_rope(spec, lambda rope: replace(rope, attention_factor=factor) if rope.kind == "longrope" else rope)
    assert replace(same, dtype=None) == replace(original, dtype=None)
    tensors = stored(directory)
    assert checkpoint.tensors.keys() == tensors.keys()
    with GGUFReader(checkpoint) as reader:
        for tensor_name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            layer = re.search(r"layers\.(\d+)\.", tensor_name)
            # Layers beyond the fourth are as those before, and taken whole.
            is_deep = layer is not None and int(layer[1]) > 3
            dimensions = range(min(len(shape), 2) if "conv1d" not in tensor_name else 1)
            for dim, parts in itertools.product(dimensions, (1,) if is_deep else PARTS):
                unit = spec.attentions[0].head_dim if "self_attn" in tensor_name else 1  # ranks hold whole heads
                if parts > 1 and shape[dim] // parts % unit:
                    continue
                cut = assembled(reader, tensor_name, shape, dim, parts)
                # Weights of norms lose their last bits when 1 is added to them.
                is_added = spec.norm.offset and "norm.weight" in tensor_name
                tolerance = 1.2e-7 if is_added else 0.0
                # Decays are stored in place of their logarithms.
                tolerance = 1e-6 if tensor_name.endswith("A_log") else tolerance
                torch.testing.assert_close(cut, tensor, rtol=0, atol=tolerance)
            if not is_deep:  # the whole header is read for each
                plain = dequantised_gguf(checkpoint.tensors[tensor_name].path, tensor_name)
                torch.testing.assert_close(plain.float(), tensor, rtol=0, atol=tolerance)
        reader.finish(lambda _: False)


@pytest.mark.parametrize(
    ("family", "special"),
    [
        ("mixtral", {}),
        ("qwen2_moe", {"decoder_sparse_step": 1}),
        ("qwen3_moe", {}),
        ("olmoe", {}),
        ("granitemoe", {}),
        ("granitemoeshared", {}),
        ("glm4_moe", {}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": True}),
        ("ernie4_5_moe", {}),
        ("gpt_oss", {"swiglu_limit": 7.0}),
        ("hunyuan_v1_dense", {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
        ("hunyuan_v1_moe", {"tie_word_embeddings": True}),
        ("afmoe", {"layer_types": None, "num_hidden_layers": 5}),
        ("llama4_text", _LLAMA4),
        ("llama4_text", _LLAMA4 | {"num_local_experts": 128, "use_qk_norm": False, "attention_bias": True}),
        # The files of dots.llm1 have no window.
        ("dots1", {"sliding_window": None, "attention_bias": True}),
        ("exaone_moe", {}),
        ("solar_open", {"routed_scaling_factor": 1.0}),
        ("minimax_m2", {}),
        ("hy_v3", {"attention_bias": True}),
        ("mellum", {"mlp_layer_types": None}),
        ("phimoe", {"router_jitter_noise": 0.01}),
        ("cohere2_moe", {"expert_selection_fn": "sigmoid"}),
        ("cohere2_moe", {"expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-6, "norm_topk_prob": False}),
    ],
)
def test_experts_that_a_file_holds_in_one_tensor(tmp_path: Path, family: str, special: dict[str, Any]) -> None:
    directory = make_tiny(tmp_path, family, seed=5, **special)
    spec, checkpoint = opened(write_gguf(directory, tmp_path / "model.gguf", all_of("F32")))
    original = read_spec(str(directory))
    assert replace(spec, dtype=None) == replace(original, dtype=None)
    stored = Checkpoint.open(directory, original.names)
    tensors = tensor_shapes(spec)
    assert checkpoint.tensors.keys() == tensors.keys() == stored.tensors.keys()
    with GGUFReader(checkpoint) as ours, WeightReader(stored) as theirs:
        for name, shape in tensors.items():
            found, wanted = torch.empty(shape), torch.empty(shape)
            ours.take(name, found, shape=shape)
            theirs.take(name, wanted, shape=shape)
            assert torch.equal(found, wanted), name


@pytest.mark.parametrize(
    ("family", "architecture", "arch"),
    [
        ("qwen2", "Qwen2ForCausalLM", gguf.MODEL_ARCH.QWEN2VL),
        ("qwen3", "Qwen3ForCausalLM", gguf.MODEL_ARCH.QWEN3VL),
        ("qwen3_moe", "Qwen3MoeForCausalLM", gguf.MODEL_ARCH.QWEN3VLMOE),
    ],
)
def test_the_text_part_of_a_multimodal_file_is_a_text_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, architecture: str, arch: gguf.MODEL_ARCH
) -> None:
    """The file has the sections of its positions, and the number of layers that images are added in."""
    directory = make_tiny(tmp_path, family, seed=5)
    text, stored = opened(write_gguf(directory, tmp_path / "text.gguf", all_of("F32")))
    monkeypatch.setitem(gguf_writer._ARCHITECTURES, architecture, arch)
    name = gguf.MODEL_ARCH_NAMES[arch]
    own = {f"{name}__rope__dimension_sections": [2, 1, 1, 0], f"{name}__n_deepstack_layers": 1}
    spec, checkpoint = opened(write_gguf(directory, tmp_path / "model.gguf", all_of("F32"), **own))
    assert spec == text == replace(read_spec(str(directory)), dtype=spec.dtype)
    assert checkpoint.tensors.keys() == stored.tensors.keys() == tensor_shapes(spec).keys()


def with_rope(spec: DecoderSpec, change: Callable[[Any], Any]) -> DecoderSpec:
    """The model with another rotary embedding in each layer."""
    return spec.with_sublayers(
        lambda one: replace(one, rope=change(one.rope)) if isinstance(one, SelfAttentionSpec) and one.rope else one
    )


def test_a_mistral_in_the_architecture_of_ministral_has_no_query_scale(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, "ministral3", seed=5, rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    spec, _ = opened(write_gguf(directory, tmp_path / "model.gguf", all_of("F32")))
    original = read_spec(str(directory))
    assert original.attentions[0].query_scale is None
    assert replace(spec, dtype=None) == replace(original, dtype=None, architecture="MistralForCausalLM")


def test_a_stretched_base_of_hunyuan_is_the_one_in_the_file(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, "hunyuan_v1_dense", seed=5)
    original = read_spec(str(directory))
    theta = original.attentions[0].rope.theta
    assert theta > 1e5
    file = write_gguf(directory, tmp_path / "model.gguf", all_of("F32"), **{"hunyuan-dense__rope__freq_base": theta})
    spec, _ = opened(file)
    assert spec.attentions[0].rope.theta == pytest.approx(theta, rel=2**-23)
    same = with_rope(spec, lambda rope: original.attentions[0].rope)
    assert replace(same, dtype=None) == replace(original, dtype=None)


@pytest.mark.parametrize("family", ["llama", "exaone4"])
def test_llama3_factors_give_the_same_angles(tmp_path: Path, family: str) -> None:
    directory = make_tiny(tmp_path, family, seed=5, **CASES["llama-llama3"].special)
    spec, _ = opened(write_gguf(directory, tmp_path / "model.gguf", all_of("F32")))
    original = read_spec(str(directory))
    assert original.attentions[0].rope.kind == "llama3" and len(set(spec.attentions[0].rope.short_factors)) > 2
    same = with_rope(spec, lambda rope: original.attentions[0].rope)
    assert replace(same, dtype=None) == replace(original, dtype=None)
    positions = torch.arange(0, spec.longest_length)
    tables = [
        RotaryTable(rope, torch.device("cpu"))(positions, len(positions))
        for rope in (spec.attentions[0].rope, original.attentions[0].rope)
    ]
    for ours, theirs in zip(*tables, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows are whole blocks of 256; half of an MLP's inputs is not."""
    special = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1}
    return make_tiny(tmp_path_factory.mktemp("wide"), "llama", seed=9, **special)


def faulty(found: Groups, fault: str) -> Groups:
    """`found` as a reader with a planted fault would give it."""
    if fault == "scales of the next group":
        return replace(found, scales=found.scales.roll(1, 1))
    if fault == "no offsets":
        return replace(found, offsets=None)
    return replace(found, values=found.values.roll(1, 1))


def judged(cut: torch.Tensor, truth: torch.Tensor) -> bool:
    """Equal but for the rounding of one sum in float32."""
    return bool(((cut.double() - truth.double()).abs().max() <= 1e-6 * truth.abs().max()).item())


@pytest.mark.parametrize("kind", SERVED)
def test_every_type_is_what_the_gguf_package_makes_of_it(wide: Path, tmp_path: Path, kind: str) -> None:
    """Whole, cut along outputs and along inputs, as numbers and in groups, and with a scale cut wrongly."""
    path = write_gguf(wide, tmp_path / "model.gguf", all_of(kind))
    spec, checkpoint = opened(path)
    q, down = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
    originals = stored(wide)
    with GGUFReader(checkpoint) as reader:
        for name, heads in ((q, spec.attentions[0].num_heads), (down, 0)):
            numbers = originals[name]
            if heads:  # blocks lie along the inputs, so they do not care in which order rows are
                numbers = numbers.view(heads, 2, -1, numbers.shape[1]).transpose(1, 2).reshape(numbers.shape)
            truth = torch.from_numpy(dequantized(quantized(numbers.numpy(), kind), kind)).float()
            if heads:
                truth = truth.view(heads, -1, 2, truth.shape[1]).transpose(1, 2).reshape(truth.shape)
            shape = tuple(truth.shape)
            assert judged(dequantised_gguf(path, name), truth)
            for dim in (0, 1):
                for parts in PARTS:
                    assert judged(assembled(reader, name, shape, dim, parts), truth), f"{name} in {parts} along {dim}"
            if kind in GROUP_LAYOUTS:
                _check_groups(reader, name, truth, GROUP_LAYOUTS[kind])


def _check_groups(reader: GGUFReader, name: str, truth: torch.Tensor, form: GroupLayout) -> None:
    rows, inputs = truth.shape
    for first, count in ((0, inputs), (inputs // 2, inputs // 2), (16, 48), (48, 32)):
        found = Groups.empty(rows // 4, count, math.gcd(form.group, first), offsets=form.has_offsets)
        reader.take_groups(name, found, shape=(rows, inputs), first_row=rows // 2, first_input=first)
        here = truth[rows // 2 : rows // 2 + rows // 4, first : first + count]
        assert judged(found.dequantised(), here), f"{name}, {count} inputs from {first} on"
        limits = (-12, 12) if form.is_float else (-8, 7) if form.bits == 4 else (-128, 127)
        assert limits[0] <= found.values.min() and found.values.max() <= limits[1]
        faults = ["scales of the next group", "the next input", *(["no offsets"] if form.has_offsets else [])]
        for fault in faults:
            assert not judged(faulty(found, fault).dequantised(), here), f"{fault} is not noticed"


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("granite", {"granite__rope__scaling__finetuned": False}, "no rotary embedding"),
        ("granite", {"granite__attention__scale": None}, "no setting 'granite.attention.scale'"),
        ("glm4", {"glm4__rope__dimension_sections": [8, 12, 12, 0]}, "vision model"),
        ("olmo3", {"olmo2__attention__sliding_window_pattern": [True, False]}, "a list of 3 flags"),
        ("smollm3", {"smollm3__rope__dimension_count": 4}, "rotates 4 of 8 elements"),
        ("minimax_m2", {"minimax-m2__expert_gating_func": 1}, "without sigmoid scores"),
        ("exaone_moe", {"exaone-moe__swiglu_clamp_exp": [0.0, 0.0, 7.0]}, "clamps its experts' activations"),
    ],
)
def test_a_file_that_means_another_model_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], message: str
) -> None:
    directory = make_tiny(tmp_path, family)
    path = write_gguf(directory, tmp_path / "model.gguf", all_of("F32"), **settings)
    with pytest.raises(StartupError, match=message):
        opened(path)


@pytest.mark.parametrize("pattern", [2, None])
def test_a_period_of_windows_is_a_pattern_of_layers(tmp_path: Path, pattern: int | None) -> None:
    """Without either, every fourth layer has full attention, as in llama.cpp."""
    directory = make_tiny(tmp_path, "exaone4", num_hidden_layers=5, layer_types=None)
    changed = {"exaone4__attention__sliding_window_pattern": pattern}
    spec, _ = opened(write_gguf(directory, tmp_path / "model.gguf", all_of("F32"), **changed))
    is_full = [layer.attention.window is None for layer in spec.layers]
    assert is_full == [(index + 1) % (pattern or 4) == 0 for index in range(5)]
    assert [layer.attention.rope is None for layer in spec.layers] == is_full


def test_chatglm_files_hold_q_k_and_v_in_one_tensor(tmp_path: Path) -> None:
    """ChatGLM's own checkpoints, which llama.cpp converts to the architecture of `GlmForCausalLM`."""
    directory = make_tiny(tmp_path, "glm", seed=5)
    file = directory / "model.safetensors"
    apart, fused = load_file(file), {}
    for name, tensor in apart.items():
        parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        if "q_proj" in name:
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat([apart[part] for part in parts])
        elif "k_proj" not in name and "v_proj" not in name:
            fused[name] = tensor
    save_file(fused, file)
    spec, checkpoint = opened(write_gguf(directory, tmp_path / "model.gguf", all_of("F32")))
    assert replace(spec, dtype=None) == replace(read_spec(str(directory)), dtype=None) and spec.attentions[0].qkv_bias
    assert checkpoint.tensors.keys() == fused.keys()
