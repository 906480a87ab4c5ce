"""Every tensor of an adapter lands at the module that it was trained for, with its scale, or is refused by its name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from oarlock.base.errors import StartupError
from oarlock.base.watched_reads import OnRead
from oarlock.workers.adapter_digest import WEIGHTS_FILE
from oarlock.workers.lora import adapter_file
from oarlock.workers.lora.adapter_file import Adapter
from tests.unit.workers.lora.adapter_cases import halves, spec_of, updates, write

LAYER = "model.layers.1"


def test_rank_and_scale_of_each_module_follow_patterns(tmp_path: Path) -> None:
    q, k, o = (f"{LAYER}.self_attn.{part}_proj" for part in "qko")
    shapes = halves(q, 8, 8, 3) | halves(k, 8, 4, 4) | halves(o, 8, 8)
    patterns = {"rank_pattern": {"q_proj": 3, r"layers\.1\.self_attn\.[qk]_proj": 4}, "alpha_pattern": {"k_proj": 5.0}}
    write(tmp_path, shapes, **patterns)
    adapter = Adapter.open(tmp_path, spec_of("LlamaForCausalLM"))
    assert [(pair.module, pair.rank, pair.scale) for pair in adapter.pairs] == [(q, 3, 2.0), (k, 4, 1.25), (o, 2, 3.0)]
    assert (adapter.max_rank, adapter.name, adapter.num_bytes) == (4, tmp_path.name, 4 * (16 * 3 + 12 * 4 + 16 * 2))
    write(tmp_path, shapes, use_rslora=True, **patterns)
    scales = [pair.scale for pair in Adapter.open(tmp_path, spec_of("LlamaForCausalLM")).pairs]
    assert scales == pytest.approx([6 / math.sqrt(3), 5 / 2, 6 / math.sqrt(2)])


def test_rows_of_fused_projections_go_to_their_modules(tmp_path: Path) -> None:
    phi, neox, gpt2 = f"{LAYER}.self_attn.qkv_proj", "gpt_neox.layers.1.attention.query_key_value", "transformer.h.1"
    cases = (
        ("Phi3ForCausalLM", halves(phi, 8, 16), {"q": range(8), "k": range(8, 12), "v": range(12, 16)}),
        ("GPTNeoXForCausalLM", halves(neox, 8, 24), {
            part: [6 * head + 2 * place + row for head in range(4) for row in range(2)]
            for place, part in enumerate("qkv")
        }),
        ("GPT2LMHeadModel", halves(f"{gpt2}.attn.c_attn", 8, 24), {
            part: range(8 * place, 8 * place + 8) for place, part in enumerate("qkv")
        }),
    )  # fmt: skip
    for number, (architecture, shapes, rows) in enumerate(cases):
        a, b = write(tmp_path / str(number), shapes).values()
        found = updates(Adapter.open(tmp_path / str(number), spec_of(architecture)))
        assert found.keys() == {f"{LAYER}.self_attn.{part}_proj" for part in "qkv"}
        for part, taken in rows.items():
            torch.testing.assert_close(found[f"{LAYER}.self_attn.{part}_proj"], 3 * b[list(taken)] @ a)


def test_projections_of_a_gated_delta_net_and_of_gated_attention(tmp_path: Path) -> None:
    linear, attention = "model.layers.1.linear_attn", "model.layers.3.self_attn"
    shapes = (
        halves(f"{linear}.in_proj_qkvz", 8, 52)
        | halves(f"{linear}.in_proj_ba", 8, 8)
        | halves(f"{attention}.q_proj", 8, 32)
    )
    tensors = write(tmp_path, shapes)
    found = updates(Adapter.open(tmp_path, spec_of("Qwen3NextForCausalLM")))
    names = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    halves_of = {name: [tensors[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB"] for name in names}
    whole = {name: 3 * b @ a for name, (a, b) in halves_of.items()}
    q, k, v, z = whole[f"{linear}.in_proj_qkvz"].view(2, 26, 8).split((3, 3, 10, 10), 1)
    b, a = whole[f"{linear}.in_proj_ba"].view(2, 4, 8).split((2, 2), 1)
    query, gate = whole[f"{attention}.q_proj"].view(4, 8, 8).split((4, 4), 1)
    wanted = {f"{linear}.in_proj_{part}": one for part, one in zip("qkvzba", (q, k, v, z, b, a), strict=True)}
    wanted |= {f"{attention}.q_proj": query, f"{attention}.gate_proj": gate}
    assert found.keys() == wanted.keys()
    for module, update in wanted.items():
        torch.testing.assert_close(found[module], update.reshape(-1, 8))


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize(
    ("architecture", "width"), [("MixtralForCausalLM", 12), ("GptOssForCausalLM", 12), ("Qwen3MoeForCausalLM", 6)]
)
def test_stacked_experts(tmp_path: Path, architecture: str, width: int, is_swapped: bool) -> None:
    """A has the rows expert after expert, and B has the columns of all experts in turn: as PEFT's ParamWrapper."""
    module, experts = f"{LAYER}.mlp.experts", 3
    sizes = {"gate_up_proj": (8, 2 * width), "down_proj": (width, 8)}
    wraps = {"gate_up_proj": f"{module}.base_layer", "down_proj": module}
    shapes: dict[str, tuple[int, ...]] = {}
    for part, (inputs, outputs) in sizes.items():
        ends = (outputs, inputs) if is_swapped else (inputs, outputs)
        shapes |= halves(wraps[part], *ends, rank=2 * experts)
    tensors = write(
        tmp_path, shapes, target_modules=[], target_parameters=["mlp.experts.down_proj", "experts.gate_up_proj"]
    )
    adapter = Adapter.open(tmp_path, spec_of(architecture))
    found = updates(adapter)
    assert len(found) == 9 and {pair.expert for pair in adapter.pairs} == {0, 1, 2}
    for part in sizes:
        a = tensors[f"base_model.model.{wraps[part]}.lora_A.weight"].view(experts, 2, -1)
        b = tensors[f"base_model.model.{wraps[part]}.lora_B.weight"]
        b = b.view(b.shape[0], 2, experts)
        whole = 3 * torch.einsum("ore,eri->eoi", b, a)
        whole = whole.mT if is_swapped else whole
        for expert in range(experts):
            inside = f"{module}.{expert}"
            if part == "down_proj":
                torch.testing.assert_close(found[f"{inside}.down_proj"], whole[expert])
                continue
            gate, up = whole[expert].chunk(2)
            if architecture == "GptOssForCausalLM":
                gate, up = whole[expert][::2], whole[expert][1::2]
            torch.testing.assert_close(found[f"{inside}.gate_proj"], gate)
            torch.testing.assert_close(found[f"{inside}.up_proj"], up)


def test_square_experts_need_another_parameter_that_shows_the_layout(tmp_path: Path) -> None:
    spec, module = spec_of("Qwen3MoeForCausalLM", moe_intermediate_size=8), f"{LAYER}.mlp.experts"
    down = halves(module, 8, 8, 6)
    write(tmp_path, down, target_parameters=["experts.down_proj"])
    with pytest.raises(StartupError, match=r"experts\.lora_A.*does not show which half"):
        Adapter.open(tmp_path, spec)
    both = down | halves(f"{module}.base_layer", 16, 8, 6)
    write(tmp_path, both, target_parameters=["experts.down_proj", "experts.gate_up_proj"])
    assert all(pair.a.transposed for pair in Adapter.open(tmp_path, spec).pairs)


def test_single_experts_embedding_and_head(tmp_path: Path) -> None:
    experts = f"{LAYER}.block_sparse_moe.experts.2"
    shapes = halves(f"{experts}.w1", 8, 12) | halves(f"{experts}.w2", 12, 8) | halves(f"{experts}.w3", 8, 12)
    table = {
        "base_model.model.model.embed_tokens.lora_embedding_A": (2, 20),
        "base_model.model.model.embed_tokens.lora_embedding_B": (8, 2),
    }
    base = {
        "base_model.model.model.embed_tokens.base_layer.weight": (20, 8),
        "base_model.model.lm_head.base_layer.weight": (20, 8),
    }
    tensors = write(tmp_path, shapes | table | halves("lm_head", 8, 20) | base)
    for tied in (False, True):  # the head may have a pair of its own though its matrix is the embedding's
        found = updates(Adapter.open(tmp_path, spec_of("MixtralForCausalLM", tie_word_embeddings=tied)))
        inside = f"{LAYER}.mlp.experts.2."
        assert found.keys() == {
            "model.embed_tokens",
            "lm_head",
            *(f"{inside}{part}_proj" for part in ("gate", "up", "down")),
        }
        a, b, *_ = (one for name, one in tensors.items() if "embedding" in name)
        torch.testing.assert_close(found["model.embed_tokens"], 3 * b @ a)
        a, b = (tensors[f"base_model.model.{experts}.w3.lora_{half}.weight"] for half in "AB")
        torch.testing.assert_close(found[f"{inside}up_proj"], 3 * b @ a)


def test_the_bias_of_an_adapted_head_is_the_models_own(tmp_path: Path) -> None:
    base = {"base_model.model.lm_head.base_layer.weight": (20, 8), "base_model.model.lm_head.base_layer.bias": (20,)}
    write(tmp_path, halves("lm_head", 8, 20) | base)
    spec = spec_of("PhiForCausalLM")
    assert [pair.module for pair in Adapter.open(tmp_path, spec).pairs] == ["lm_head"]


@pytest.mark.parametrize("name", [
    "base_model.model.{}.lora_{}.default.weight", "{}.lora_{}.weight", "base_model.model._orig_mod.{}.lora_{}.weight",
    "module.base_model.model.{}.lora_{}.weight",
])  # fmt: skip
def test_other_names_of_halves(tmp_path: Path, name: str) -> None:
    for module in (f"{LAYER}.mlp.down_proj", "layers.1.mlp.down_proj"):  # the second: of a model without a head
        write(tmp_path, {name.format(module, "A"): (2, 12), name.format(module, "B"): (8, 2)})
        adapter = Adapter.open(tmp_path, spec_of("LlamaForCausalLM"))
        assert [pair.module for pair in adapter.pairs] == [f"{LAYER}.mlp.down_proj"]


_UP = halves(f"{LAYER}.mlp.up_proj", 8, 12)
_A, _B = _UP
_LINEAR_TABLE = halves("model.embed_tokens", 20, 8)


@pytest.mark.parametrize(("shapes", "config", "message"), [
    (halves("model.layers.2.mlp.up_proj", 8, 12), {}, "model.layers.2.mlp.up_proj.lora_A.weight' fits nowhere"),
    (halves(f"{LAYER}.input_layernorm", 8, 8), {}, "input_layernorm.lora_A.weight' fits nowhere"),
    (_UP | {"base_model.model.score.weight": (2, 8)}, {}, "'base_model.model.score.weight' is not a half of a pair"),
    (_UP | {f"{_B[:-6]}bias": (12,)}, {}, "lora_B.bias' is not a half"),
    (_UP | {_A.replace("lora_A", "lora_magnitude_vector"): (12,)}, {}, "lora_magnitude_vector.weight' is not a half"),
    ({_A: (2, 8)}, {}, "up_proj.lora_A.weight' without its lora_B"),
    ({_B: (12, 2)}, {}, "up_proj.lora_B.weight' without its lora_A"),
    (_UP | {_A: (3, 8)}, {}, r"lora_A.weight' has shape \[3, 8\], but .* imply \[2, 8\]"),
    (_UP | {_B: (11, 2)}, {}, r"lora_B.weight' has shape \[11, 2\], but .* imply \[12, 2\]"),
    (_UP, {"rank_pattern": {"up_proj": 4}}, r"imply \[4, 8\]"),
    (_UP, {"target_modules": ["down_proj"]}, "up_proj.lora_A.weight' belongs to a module that .* does not target"),
    (_UP, {"layers_to_transform": 0, "target_modules": ["up_proj"]}, "does not target"),
    (_UP | {_A.replace("lora_A", "lora_A.other"): (2, 8)}, {}, "up_proj.lora_A.*is stored twice"),
    (_UP | {_A: (2, 8, 1)}, {}, r"lora_A.weight' is F32 of shape \[2, 8, 1\]"),
    (_LINEAR_TABLE, {}, "embed_tokens.lora_A.weight' has a name that model.embed_tokens cannot have"),
    ({"base_model.model.model.embed_tokens.base_layer.weight": (21, 8)}, {}, "base_layer.weight' is not a half"),
    ({"base_model.model.lm_head.base_layer.bias": (20,)}, {}, "base_layer.bias' is not a half"),  # it has no bias
    ({"x" * 2000 + ".lora_A.weight": (2, 8)}, {}, "is not a half"),
])  # fmt: skip
def test_refusals_name_the_tensor(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any], message: str
) -> None:
    write(tmp_path, shapes, **config)
    with pytest.raises(StartupError, match=message) as error:
        Adapter.open(tmp_path, spec_of("LlamaForCausalLM"))
    assert str(tmp_path) in error.value.cause and len(str(error.value)) < 1000


def test_only_safetensors_are_read_and_the_digest_is_of_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path, on_read: OnRead) -> str:
        raise OSError(0, "is read twice")

    spec, weights, config = spec_of("LlamaForCausalLM"), tmp_path / WEIGHTS_FILE, tmp_path / "adapter_config.json"
    write(tmp_path, _UP)
    first, adapter = Adapter.open(tmp_path, spec).digest, Adapter.open(tmp_path, spec, "other name")
    with monkeypatch.context() as patch:
        patch.setattr(adapter_file, "adapter_digest", refuse)
        with pytest.raises(StartupError, match="is read twice"):  # so `open` has not read it
            adapter.digest  # noqa: B018 reads the files
    assert adapter.digest == first and len(bytes.fromhex(first)) == 16
    monkeypatch.setattr(adapter_file, "adapter_digest", refuse)
    assert adapter.digest == first
    monkeypatch.undo()
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 7}))
    assert Adapter.open(tmp_path, spec).digest != first
    (tmp_path / "new_embeddings.safetensors").touch()
    with pytest.raises(StartupError, match="adds tokens to the vocabulary"):
        Adapter.open(tmp_path, spec)
    (tmp_path / "new_embeddings.safetensors").unlink()
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(StartupError, match=r"adapter_model\.bin is a pickle.*save_pretrained"):
        Adapter.open(tmp_path, spec)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(StartupError, match=r"has settings, but no adapter_model\.safetensors"):
        Adapter.open(tmp_path, spec)
