"""A look at a class in a process of its own: what it returns, and the one line if it fails."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from oarlock.base.errors import StartupError
from oarlock.workers.model_files.checkpoint import SINGLE_FILE
from oarlock.workers.transformers_backend import class_facts
from oarlock.workers.transformers_backend.class_facts import class_description
from tests.golden.tiny_models import make_tiny


def child(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    monkeypatch.setattr(class_facts.subprocess, "run", run)
    class_facts._looked_up.cache_clear()


def test_failures_of_the_process_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 1, b"", b"Traceback\n  File\nImportError: no numbers.\n")

    def hang(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1.0)

    def lack(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 0, b"{}\nthe checkpoint holds no tensor for 'a'\n", b"")

    for run, cause in ((crash, r"\(ImportError: no numbers\)\.$"), (hang, "not finished"), (lack, "no tensor for 'a'")):
        child(monkeypatch, run)
        with pytest.raises(StartupError) as failed:
            class_description(tmp_path, 1)
        assert re.search(cause, failed.value.cause) and "\n" not in failed.value.cause


CODE = """
print("a line of the checkpoint")
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.soak
def test_checkpoints_in_a_process(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, "llama", tie_word_embeddings=False)
    found = class_description(model, 2)
    assert found.refusal is None and found.ranks == 2 and all(call.is_divided for call in found.attention)
    assert class_description(model, 2) is found

    tensors = load_file(model / SINGLE_FILE)
    save_file({name: one for name, one in tensors.items() if "lm_head" not in name}, model / SINGLE_FILE)
    with pytest.raises(StartupError, match="holds no tensor for 'lm_head"):
        class_description(model, 2)

    save_file(tensors, model / SINGLE_FILE)
    path = model / "config.json"
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    changed = {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": own}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    (model / "own.py").write_text(CODE)
    assert class_description(model, 1, trusts_code=True).is_remote
    refused = class_description(model, 1).refusal
    assert refused is not None and "transformers cannot read its config.json" in refused
