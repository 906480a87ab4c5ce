"""Models that cannot be verified are refused before a weight is read: one line of cause, one of fix, exit code 3."""

import json
import shutil
from pathlib import Path

import pytest

from oarlock.workers.verify import __main__ as command
from tests.golden.tiny_models import make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen2")


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    return make_tiny(tmp_path_factory.mktemp("with_tokenizer"), "qwen2", tokenizer=True, max_position_embeddings=64)


def rename_class(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))


MISTAKES = {
    "no directory": (["{folder}/nowhere"], "nowhere does not exist"),
    "no config": (["{folder}"], "has no config.json"),
    "family": (["{folder}/other"], "architecture 'OtherForCausalLM' is not supported"),
    "no description": (["{folder}/class"], "transformers' code computes NanoChatForCausalLM"),
    "no weights": (["{folder}/empty-model"], "empty-model"),
    "size that does not divide": (["{model}", "--tensor-parallel-size=3"], "tensor_parallel_size 3 does not fit"),
    "no rank": (["{model}", "--tensor-parallel-size=0"], "tensor_parallel_size is 0"),
    "dtype": (["{model}", "--dtype=int4"], "dtype is 'int4'"),
    "device": (["{model}", "--device=tpu"], "device is 'tpu'"),
    "no prompts file": (["{model}", "--prompts={folder}/nothing"], "nothing does not exist"),
    "a directory of prompts": (["{model}", "--prompts={folder}"], "cannot be read"),
    "prompts not text": (["{model}", "--prompts={folder}/binary"], "is not UTF-8 text (byte 0)"),
    "empty prompts": (["{model}", "--prompts={folder}/empty"], "holds no prompt"),
    "prompts without tokenizer": (["{model}", "--prompts={folder}/good"], "has no tokenizer"),
    "prompt too long": (
        ["{with_tokenizer}", "--prompts={folder}/long"],
        "prompt 2 has 200 tokens; the model has room for 52",
    ),
    "too many prompts": (["{with_tokenizer}", "--prompts={folder}/many"], "the limit is 512"),
    "output in no directory": (["{model}", "--output={folder}/no/report.json"], "--output: the directory"),
    "a directory as output": (["{model}", "--output={folder}"], "is a directory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_two_lines(tmp_path: Path, tiny: Path, with_tokenizer: Path, name: str, capsys) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00hello")
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "good").write_text("hello\n")
    (tmp_path / "long").write_text("short\n" + "x" * 200 + "\n")
    (tmp_path / "many").write_text(("x" * 40 + "\n") * 20)
    rename_class(Path(shutil.copytree(tiny, tmp_path / "other")), "OtherForCausalLM")
    rename_class(Path(shutil.copytree(tiny, tmp_path / "class")), "NanoChatForCausalLM")
    shutil.copytree(tiny, tmp_path / "empty-model", ignore=shutil.ignore_patterns("*.safetensors"))
    words, cause = MISTAKES[name]
    code = command.main([word.format(folder=tmp_path, model=tiny, with_tokenizer=with_tokenizer) for word in words])
    out, error = capsys.readouterr()
    lines = error.splitlines()
    assert (code, out, len(lines)) == (3, "", 2), error
    assert lines[0].startswith("error: ") and cause in lines[0]
    assert lines[1].startswith("fix: ")


def test_without_a_tokenizer_token_ids_are_drawn_and_always_the_same(tiny: Path) -> None:
    arguments = command._parser().parse_args([str(tiny)])
    config, prompts = command.checked(arguments)
    assert prompts == command.checked(arguments)[1]
    assert [len(prompt) for prompt in prompts] == [19, 11, 5]
    assert config.max_model_len == 19 + command.NEW_TOKENS
    assert all(0 <= token < 320 for prompt in prompts for token in prompt)
