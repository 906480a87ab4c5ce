"""A planted fault is named: the layer, the projection, the rank. Each fault is one that a real server could have."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers import attention, linear
from oarlock.workers.layers.experts import Experts
from oarlock.workers.models.registry import read_spec
from tests.golden import mutations_of_values as of_values
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.verify.cases import PROMPTS, VerifyCase, altered, reconfigured
from tests.unit.workers.verify.faults import SIZE, WEIGHTS, rows

TWO_LAYERS = {"num_hidden_layers": 2}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "enable_moe_block": True,
    "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 40,
}  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VerifyCase]:
    """By name; each model is made, and its reference run, when it is first asked for."""
    made: dict[str, VerifyCase] = {}
    special = {
        "qwen2": ("qwen2", {}),
        "qwen3": ("qwen3", {"tie_word_embeddings": True}),
        "llama": ("llama", {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
        "mistral": ("mistral", {"sliding_window": 12}),
        "olmo2": ("olmo2", {}),
        "cohere2": ("cohere2", {"layer_types": ["sliding_attention", "full_attention"]}),
        "qwen2_moe": ("qwen2_moe", {}),
        "gpt2": ("gpt2", {}),
        "gpt_neox": ("gpt_neox", {}),
        "gpt_oss": ("gpt_oss", {}),
        "phi": ("phi", {}),
        "nemotron": ("nemotron", {}),
        "starcoder2": ("starcoder2", {}),
        "olmo": ("olmo", {}),
        "afmoe": ("afmoe", {"layer_types": ["sliding_attention", "full_attention"]}),
        "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
        "hunyuan_v1_moe": ("hunyuan_v1_moe", {}),
        "llama4_text": ("llama4_text", {"no_rope_layer_interval": 2}),
        "ministral3": ("ministral3", {}),
        "nemotron_h": ("nemotron_h", {"num_hidden_layers": None}),
        "gemma4_text": ("gemma4_text", _GEMMA4),
    }

    def case(name: str) -> VerifyCase:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            family, overrides = special[name]
            made[name] = VerifyCase(make_tiny(folder, family, seed=5, **(TWO_LAYERS | overrides)), folder / "verify")
        return made[name]

    return case


@pytest.mark.parametrize(("name", "tensor", "change", "cause"), WEIGHTS, ids=[f"{w[0]}-{w[3]}" for w in WEIGHTS])
@pytest.mark.slow
def test_a_damaged_tensor_is_named(cases, tmp_path: Path, name: str, tensor: str, change, cause: str) -> None:
    case = cases(name)
    comparison, causes = case.run(SIZE, altered(case.model, tmp_path / "copy", tensor, change))
    assert not comparison.ok
    assert len(causes) == 1
    assert cause in causes[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "found"), [("nemotron", "relu"), ("starcoder2", "gelu")])
def test_another_activation_is_named(cases, monkeypatch: pytest.MonkeyPatch, name: str, found: str) -> None:
    case, original = cases(name), linear.activated
    right = read_spec(str(case.model)).layers[0].mlp.activation
    monkeypatch.setattr(linear, "activated", lambda multiply, activation: original(multiply, found))
    _, causes = case.run(SIZE)
    assert causes == [f"model.layers.0.mlp.up_proj: the activation on ranks 0, 1 is {found}, not {right}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (
            of_values.queries_keys_and_values_not_limited,
            [f"{letter} of layer 0 on ranks 0, 1: its limit of 0.5" for letter in "qk"],
        ),
        (of_values.layer_norm_without_its_mean, ["model.layers.0.input_layernorm: the norm itself"]),
    ],
    ids=["limit", "norm"],
)
def test_a_lost_limit_and_a_norm_without_a_weight_are_named(
    cases, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], found: list[str]
) -> None:
    case = cases("olmo")
    plant(monkeypatch)
    _, causes = case.run(SIZE)
    assert len(causes) == len(found)
    assert all(cause.startswith(expected) for cause, expected in zip(causes, found, strict=True)), causes


@pytest.mark.slow
def test_an_expert_with_the_weights_of_another_is_named(cases, tmp_path: Path) -> None:
    copy, stored = tmp_path / "copy", "model.layers.1.mlp.experts"
    shutil.copytree(cases("qwen2_moe").model, copy)
    tensors = load_file(copy / "model.safetensors")
    for part in ("gate", "up", "down"):
        tensors[f"{stored}.0.{part}_proj.weight"] = tensors[f"{stored}.4.{part}_proj.weight"].clone()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    _, causes = cases("qwen2_moe").run(SIZE, copy)
    assert causes == ["model.layers.1.mlp.experts: expert 0 (it has the values of expert 4)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "change", "cause"),
    [
        ("unrounded", lambda self, x, step: self.sums(x)[0], "the residual after experts and shared_expert"),
        (
            "run_shared_expert",
            lambda self, x: torch.zeros_like(x),
            "model.layers.1.mlp.shared_expert: its weights, its gate",
        ),
    ],
    ids=["left out of the sum", "not computed"],
)
def test_a_shared_expert_that_is_dropped_is_named(
    cases, monkeypatch: pytest.MonkeyPatch, method, change, cause
) -> None:
    monkeypatch.setattr(Experts, method, change)
    _, causes = cases("qwen2_moe").run(SIZE)
    assert cause in causes[0]


@pytest.mark.slow
def test_a_single_small_entry_is_enough(cases, tmp_path: Path) -> None:
    """One of 4096 numbers, wrong by a tenth of the weights' own spread."""
    case = cases("qwen2")

    def change(weight: Tensor) -> Tensor:
        weight[40, 3] += 0.008
        return weight

    copy = altered(case.model, tmp_path / "copy", "model.layers.1.self_attn.q_proj.weight", change)
    comparison, causes = case.run(SIZE, copy)
    assert causes == ["model.layers.1.self_attn.q_proj.weight: the rows of rank 1"]
    assert comparison.first_fault is not None and comparison.first_fault.name == "1.q"


def test_the_shard_of_another_rank_is_recognised(cases, tmp_path: Path) -> None:
    case = cases("qwen2")
    copy = altered(case.model, tmp_path / "copy", "lm_head.weight", lambda w: torch.cat((w[:160], w[:160])))
    assert case.run(SIZE, copy)[1] == ["lm_head.weight: the rows of rank 1 (rank 1 holds the shard of rank 0)"]


@pytest.mark.slow
def test_a_tied_head_is_named_as_tied(cases, tmp_path: Path) -> None:
    case = cases("qwen3")
    damaged = altered(case.model, tmp_path / "copy", "model.embed_tokens.weight", rows(310, 311))
    causes = case.run(SIZE, damaged)[1]  # id 310 is in no prompt, so only the head sees it
    assert causes == ["model.embed_tokens.weight (tied head): the rows of rank 1"]


@pytest.mark.slow
def test_a_wrong_rotation_is_distinguished_from_a_wrong_projection(cases, tmp_path: Path) -> None:
    case = cases("qwen3")
    rope = json.loads((case.model / "config.json").read_text())["rope_parameters"]
    copy = reconfigured(case.model, tmp_path / "copy", rope_parameters=rope | {"rope_theta": 1000.0})
    causes = case.run(SIZE, copy)[1]
    right_at_0 = "(position 0, which is not rotated, is right)"
    assert causes == [f"rotary embedding of {x} in layer 0 on ranks 0, 1 {right_at_0}" for x in "qk"]


@pytest.mark.slow
def test_a_rotation_where_there_is_none_is_named(cases, tmp_path: Path) -> None:
    """Layer 1 of Cohere 2 sees all, and is not rotated."""
    case = cases("cohere2")
    kinds = ["sliding_attention", "sliding_attention"]
    causes = case.run(SIZE, reconfigured(case.model, tmp_path / "copy", layer_types=kinds, sliding_window=12))[1]
    assert causes == [f"{x} of layer 1 on ranks 0, 1: rotated, in a layer without rotary embedding" for x in "qk"]


@pytest.mark.slow
def test_a_wrong_window_is_named(cases, tmp_path: Path) -> None:
    case = cases("mistral")
    copy = reconfigured(case.model, tmp_path / "copy", sliding_window=400)
    assert "attention of layer 0 on ranks 0, 1: the sliding window of 12 tokens" in case.run(SIZE, copy)[1][0]


@pytest.mark.slow
def test_wrong_chunks_are_named(cases, tmp_path: Path) -> None:
    copy = reconfigured(cases("llama4_text").model, tmp_path / "copy", attention_chunk_size=16)
    causes = cases("llama4_text").run(SIZE, copy)[1]
    assert "attention of layer 0 on ranks 0, 1: the chunks of 11 tokens (only later tokens are wrong)" in causes[0]


@pytest.mark.slow
def test_a_wrong_query_scale_is_named(cases, tmp_path: Path) -> None:
    """Its period is within the prompt, so that the factors of earlier tokens are right."""
    case = cases("ministral3")
    rope = json.loads((case.model / "config.json").read_text())["rope_parameters"]
    copy = reconfigured(case.model, tmp_path / "copy", rope_parameters=rope | {"llama_4_scaling_beta": 3.0})
    (cause,) = case.run(SIZE, copy)[1]
    assert cause.startswith("query scale of layer 0 on ranks 0, 1 (queries are 1 to ")


@pytest.mark.slow
def test_a_gate_that_is_left_out_is_named(cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "gate_rows", lambda x, gate: x)
    causes = cases("afmoe").run(SIZE)[1]
    assert causes == ["attention of layer 0 on ranks 0, 1: the gate on its result is left out"]


@pytest.mark.slow
def test_a_sum_that_forgets_a_rank_is_found_by_comparing_ranks(cases) -> None:
    """Rank 1 keeps its own share in place of one sum, each time the text is run."""
    case = cases("qwen2")
    sums_of_a_run = 1 + 2 * read_spec(str(case.model)).num_layers

    def plant(tp: TensorParallel) -> None:
        all_reduce, prefill = tp.all_reduce, []

        def forgetful(x: Tensor) -> Tensor:
            own, total = x.clone(), all_reduce(x)
            if len(x) == sum(map(len, PROMPTS)):
                prefill.append(x)
            # of each run, the embedding's sum is the first, then layer 0's o_proj
            forgets = tp.rank == 1 and len(prefill) % sums_of_a_run == 2
            return own if forgets else total

        tp.all_reduce = forgetful  # ty: ignore[invalid-assignment]

    comparison, causes = case.run(SIZE, plant=plant)
    fault = comparison.first_fault
    assert fault is not None and fault.name == "0.o_proj" and not fault.ranks_agree
    assert causes == ["the all-reduce after model.layers.0.self_attn.o_proj"]


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", "llama", "mistral", "olmo2", "cohere2", "hunyuan_v1_dense", "ministral3"]
)
@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_wrong(cases, name: str, size: int) -> None:
    comparison, causes = cases(name).run(size)
    assert comparison.ok, comparison.first_fault
    assert causes == []


@pytest.mark.parametrize("name", ["afmoe", "hunyuan_v1_moe", "llama4_text"])
@pytest.mark.slow
def test_nothing_is_found_in_experts_where_nothing_is_wrong(cases, name: str) -> None:
    comparison, causes = cases(name).run(SIZE)
    assert comparison.ok, comparison.first_fault
    assert causes == []
