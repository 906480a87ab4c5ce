"""The code that computes a model: chosen by --model-impl, the families here, the tested table and the look."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.model_files.checkpoint import SINGLE_FILE
from oarlock.workers.preflight import check_without_weights, preflight
from oarlock.workers.transformers_backend import choice, tested
from oarlock.workers.transformers_backend.class_description import AttentionCall, ClassDescription, ClassTensor
from tests.golden.tiny_models import make_tiny

CLASS = ClassDescription(
    "OtherForCausalLM",
    "other",
    layers=1,
    vocab_size=32,
    hidden_size=16,
    longest_length=64,
    attention=(AttentionCall(0, "model.layers.0.attn", 2, 2, 8, 8, None, None, None, has_sinks=False),),
    tensors=(
        ClassTensor("model.embed_tokens.weight", (32, 16), "embedding"),
        ClassTensor("model.layers.0.attn.q_proj.weight", (16, 16), "linear"),
        ClassTensor("lm_head.weight", (32, 16), "head"),
    ),
)
TABLE = {
    "OtherForCausalLM": tested.Tested(1, None),
    "LlamaForCausalLM": tested.Tested(2, None),
    "WrongForCausalLM": tested.Tested(0, "it was wrong in a second chunk"),
}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int, bool]]:
    """The looks that were made: each finds `CLASS` under the name in config.json."""
    made: list[tuple[Path, int, bool]] = []

    def found(directory: Path, ranks: int, *, trusts_code: bool = False) -> ClassDescription:
        made.append((directory, ranks, trusts_code))
        name = json.loads((directory / "config.json").read_text())["architectures"][0]
        return replace(CLASS, architecture=name, ranks=ranks, is_remote=trusts_code)

    monkeypatch.setattr(choice, "class_description", found)
    monkeypatch.setattr(choice, "tested_classes", lambda: TABLE)
    return made


def directory(tmp_path: Path, name: str, **settings: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "dtype": "bfloat16"} | settings))
    return tmp_path


def config(model: Path, **changes: Any) -> WorkerConfig:
    return WorkerConfig(str(model), device="cpu", load_format="dummy").with_(**changes)


def test_a_class_without_a_page_is_looked_at_once(tmp_path: Path, looks: list) -> None:
    model = config(directory(tmp_path, "OtherForCausalLM"))
    check_without_weights(model)
    resolved = preflight(model)
    assert resolved.served_class is not None and resolved.max_model_len == 64
    assert ClassDescription.decoded(resolved.served_class) == CLASS
    looks.clear()
    assert resolved.enforce_eager, "no graph can hold the code of a class"
    assert preflight(resolved) == resolved and not looks, "ranks and later checks start no process"


def test_a_described_family_is_computed_here_unless_forced(tmp_path: Path, looks: list) -> None:
    model = make_tiny(tmp_path, "llama")
    assert preflight(WorkerConfig(str(model), device="cpu")).served_class is None and not looks
    assert choice.chosen_code(config(model, model_impl="transformers")).served_class is not None
    assert looks == [(model, 1, False)]


@pytest.mark.parametrize(
    ("name", "settings", "changes", "cause", "fix"),
    [
        ("NewForCausalLM", {}, {}, "'NewForCausalLM' is not supported", "lists all"),
        (
            "OtherForCausalLM",
            {},
            {"model_impl": "oarlock"},
            "is not supported",
            "--model-impl oarlock serves described",
        ),
        ("NewForCausalLM", {"auto_map": {"A": "b"}}, {}, "runs only with --trust-remote-code", ""),
        ("NewForCausalLM", {}, {"model_impl": "transformers"}, "not among the classes that were tested", ""),
        ("QwenForCausalLM", {}, {"model_impl": "fast"}, "model_impl is 'fast'", "auto, oarlock, transformers"),
        ("WrongForCausalLM", {}, {}, "cannot be served: it was wrong in a second chunk", ""),
        ("OtherForCausalLM", {}, {"tensor_parallel_size": 2}, "right on one rank", "--tensor-parallel-size 1"),
        ("OtherForCausalLM", {}, {"pipeline_parallel_size": 2}, "all layers in one call", "Leave --pipeline"),
        ("OtherForCausalLM", {}, {"enable_expert_parallel": True}, "a part of every expert", "Leave --enable"),
        ("OtherForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, {}, "checkpoint is quantised", ""),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "odd"}}, {}, "", "Or try --model-impl transformers"),
        ("BertModel", {}, {"model_impl": "transformers"}, "", ""),
    ],
)
def test_refusals(
    tmp_path: Path, looks: list, name: str, settings: dict[str, Any], changes: dict[str, Any], cause: str, fix: str
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    with pytest.raises(StartupError) as refused:
        check_without_weights(config(directory(tmp_path, name, **(sizes | settings)), **changes))
    assert cause in refused.value.cause and fix in refused.value.fix and "\n" not in str(refused.value)


def test_code_of_the_checkpoint_needs_no_row_in_the_table(tmp_path: Path, looks: list) -> None:
    model = directory(tmp_path, "NewForCausalLM", auto_map={"AutoModelForCausalLM": "code.New"})
    assert choice.chosen_code(config(model, trust_remote_code=True)).spec.served_by == "checkpoint"
    assert looks == [(model, 1, True)]


def test_a_refusal_of_the_look_is_one_line(tmp_path: Path, looks: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "class_description", lambda *_, **__: replace(CLASS, refusal="its mask is odd"))
    with pytest.raises(StartupError, match="transformers' code for OtherForCausalLM cannot be served: its mask is odd"):
        preflight(config(directory(tmp_path, "OtherForCausalLM")))
    divided = replace(CLASS, refusal="it cannot be divided among 2 ranks (odd heads)")
    monkeypatch.setattr(choice, "class_description", lambda *_, **__: divided)
    with pytest.raises(StartupError, match=r"odd heads\)\. Use --tensor-parallel-size 1\.$"):
        preflight(config(directory(tmp_path, "LlamaForCausalLM"), model_impl="transformers", tensor_parallel_size=2))


def test_stored_tensors_of_a_class(tmp_path: Path, looks: list, monkeypatch: pytest.MonkeyPatch) -> None:
    model = config(directory(tmp_path, "OtherForCausalLM"), load_format="auto")
    tensors = {one.name: torch.ones(one.shape, dtype=torch.bfloat16) for one in CLASS.tensors}
    save_file(tensors | {"ids": torch.zeros(3, dtype=torch.int64)}, tmp_path / SINGLE_FILE)
    assert preflight(model).dtype == "bfloat16"
    save_file(tensors | {"lm_head.weight": torch.ones(32, 16).to(torch.float8_e4m3fn)}, tmp_path / SINGLE_FILE)
    with pytest.raises(StartupError, match=r"'lm_head\.weight' is F8_E4M3"):
        preflight(model)
    save_file(tensors | {"lm_head.weight": torch.zeros(32, 16, dtype=torch.bfloat16)}, tmp_path / SINGLE_FILE)
    monkeypatch.setattr(choice, "class_description", lambda *_, **__: replace(CLASS, is_tied=True))
    with pytest.raises(StartupError, match="a different lm_head"):
        preflight(model)


def test_rows_of_the_table_have_a_size_or_a_reason() -> None:
    for row in tested.tested_classes().values():
        assert (row.ranks >= 1) == (row.refused is None)
