"""`oarlock doctor`: its first line, whether this version serves the model, appears before anything slow begins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from oarlock.server.cli import doctor
from oarlock.server.cli import main as cli
from oarlock.server.config.settings import make_settings
from oarlock.server.hub.description import Description, description
from oarlock.server.hub.files import Snapshot
from oarlock.server.hub.local_model import cached_snapshot
from oarlock.server.llm import tokenizer
from oarlock.workers.transformers_backend import choice, tested
from tests.golden.gguf_writer import all_of, write_gguf
from tests.golden.tiny_encoders import make_encoder
from tests.house.rules import ROOT

DEMO = ROOT / "models" / "oarlock-demo"
COMMIT = "c0ffee" + "0" * 34
SERVED = "described as Qwen2ForCausalLM, the class of Qwen/Qwen2.5-7B-Instruct"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama.cpp"))
    return tmp_path / "hub"


def answer(model: str | Path | None, **settings: object) -> Description | None:
    return description(make_settings({"port": 0} | ({} if model is None else {"model": str(model)}) | settings))


def written(folder: Path, **changes: object) -> Path:
    """Write the demo model's config.json with changes, and nothing else."""
    folder.mkdir(parents=True)
    config = json.loads((DEMO / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_directory_and_the_demo_model(tmp_path):
    assert answer(None) == answer(DEMO) == answer(written(tmp_path / "bare")) == Description(SERVED)
    assert Description(SERVED).line == f"served: {SERVED}"


@pytest.mark.parametrize(
    ("changes", "cause", "fix"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supp", "`oarlock models --supported`"),
        ({"architectures": ["Qwen2ForTokenClassification"]}, "is not supported.", "similar name: Qwen2ForCausalLM"),
        ({"num_key_value_heads": 5}, "cannot share 5 key-value heads", "Repair"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq' in quantization_config", "Supported: awq"),
    ],
)
def test_a_model_that_is_refused(tmp_path, changes, cause, fix):
    found = answer(written(tmp_path / "model", **changes))
    assert found is not None and cause in found.text and fix in found.fix
    assert found.line == f"refused: {found.text} {found.fix}" and "\n" not in found.line


def test_a_class_without_a_description(tmp_path, monkeypatch):
    table = {"Qwen2ForCausalLM": tested.Tested(2, None), "NewForCausalLM": tested.Tested(1, None)}
    monkeypatch.setattr(choice, "tested_classes", lambda: table)
    new = written(tmp_path / "new", architectures=["NewForCausalLM"], auto_map={"AutoModelForCausalLM": "new.New"})
    assert answer(new) == Description("computed by transformers' code (NewForCausalLM)")
    assert answer(new, trust_remote_code=True) == Description("computed by the checkpoint's own code (NewForCausalLM)")
    assert answer(DEMO, model_impl="transformers") == Description("computed by transformers' code (Qwen2ForCausalLM)")
    assert answer(DEMO, model_impl="oarlock") == Description(SERVED)
    for settings in ({"tensor_parallel_size": 2}, {"model_impl": "oarlock"}):
        found = answer(new, **settings)
        assert found is not None and found.fix, settings


def test_an_adapter_that_cannot_be_served_is_not_a_model_to_fetch(monkeypatch):
    fake = SimpleNamespace(model=str(DEMO), load_tokenizer=lambda: SimpleNamespace(close=lambda: None))

    async def find_files(settings: object, on_progress: object) -> object:
        return fake

    monkeypatch.setattr(tokenizer, "find_files", find_files)
    model = {"model": "org/name", "enable_lora": True, "lora_modules": ("a=/nowhere/at/all",)}
    assert doctor._find(make_settings(model))[2][0].startswith('--model-wrong=["a: The adapter /nowhere/at/all is nei')


def test_wrong_names_and_damaged_files(tmp_path, cache):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    faults = {"cut.gguf": "has only 4 bytes", "empty": "no config.json", "none.gguf": "does not exist"}
    for model, cause in faults.items():
        found = answer(tmp_path / model)
        assert found is not None and cause in found.text and found.fix, model


@pytest.mark.slow
def test_a_gguf_file(tmp_path):
    file = write_gguf(DEMO, tmp_path / "demo.gguf", all_of("F16"))
    assert answer(file) == Description(SERVED)
    other = write_gguf(DEMO, tmp_path / "other.gguf", all_of("F16"), general__architecture="qwen3tts")
    found = answer(other)
    assert found is not None
    assert "architecture 'qwen3tts' is not supported" in found.text and "similar name: qwen3" in found.fix


@pytest.mark.slow
def test_an_encoder(tmp_path):
    found = answer(make_encoder(tmp_path, "bert"))
    assert found is not None and found.text.startswith("described as BertModel, the class of ") and not found.fix


def test_a_hub_id_in_the_cache(cache):
    assert answer("owner/model") is None
    folder = cache / "models--owner--model"
    written(folder / "snapshots" / COMMIT)
    assert answer("owner/model") is None, "no revision is known"
    (folder / "refs" / "a").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "refs" / "a" / "b").write_text("f" * 40)
    assert answer("owner/model") == answer("owner/model", revision=COMMIT) == Description(SERVED)
    assert answer("owner/model", revision="a/b") is None, "that revision was deleted"
    for revision in ("main", COMMIT, "a/b", "none"):
        other = Snapshot.remembered(cache, "owner/model", revision)
        assert cached_snapshot("owner/model", revision) == (other and other.directory), revision
    shutil.copytree(cache, cache.parent / "elsewhere")
    (folder / "snapshots" / COMMIT / "config.json").unlink()
    assert answer("owner/model") is None
    assert answer("owner/model", download_dir=str(cache.parent / "elsewhere")) == Description(SERVED)


@pytest.fixture
def words(monkeypatch):
    """Return the arguments of the program with the checks, which does not run."""
    given: list[str] = []

    def record(module, words):
        given[:] = words
        return 1

    monkeypatch.setattr("oarlock.server.cli.doctor.run_program", record)
    return given


@pytest.mark.slow
def test_the_first_line_and_the_json_object(tmp_path, cache, words, capsys):
    mamba = written(tmp_path / "mamba", architectures=["MambaForCausalLM"])
    assert cli.main(["doctor", str(mamba), "--port", "0"]) == 1
    refused = capsys.readouterr().out
    assert refused.startswith("refused: config.json: architecture 'MambaForCausalLM'") and refused.count("\n") == 1
    assert not any(word.startswith("--description") for word in words)
    assert cli.main(["doctor", "--port", "0"]) == 1
    assert capsys.readouterr().out == f"served: {SERVED}\n"
    assert cli.main(["doctor", str(mamba), "--port", "0", "--json"]) == 1
    assert capsys.readouterr().out == ""
    (passed,) = [json.loads(word.partition("=")[2]) for word in words if word.startswith("--description=")]
    assert passed["text"] in refused and passed["fix"] in refused
    assert cli.main(["doctor", "owner/model", "--port", "0"]) == 1
    assert capsys.readouterr().out == "" and any(word.startswith("--missing=") for word in words)


@pytest.mark.slow
def test_a_wrong_adapter_does_not_mean_that_a_model_of_the_hub_is_missing(tmp_path, cache, words, capsys):
    folder = cache / "models--owner--model"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "snapshots" / COMMIT).symlink_to(DEMO)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    adapter = f"a={tmp_path / 'none'}"
    assert cli.main(["doctor", "owner/model", "--port", "0", "--enable-lora", "--lora-modules", adapter]) == 1
    (wrong,) = [word for word in words if word.startswith(("--missing=", "--model-wrong="))]
    assert wrong.startswith("--model-wrong=") and str(tmp_path / "none") in wrong
