"""The first start of a class compares it with its own code: right classes pass, and every kind of fault is refused."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oarlock.base.errors import EXIT_CONFIGURATION, StartupError
from oarlock.workers.transformers_backend import reference, remembered
from oarlock.workers.transformers_backend.linears import LinearPart
from oarlock.workers.transformers_backend.model import TransformersModel
from oarlock.workers.transformers_backend.reference import OwnForward
from tests.unit.workers.transformers_backend.started_class import make_checkpoint, start

CLASSES = {
    "llama": "LlamaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
STATES = ("kimi_linear", "lfm2")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = make_checkpoint(tmp_path_factory.mktemp("m"), CLASSES[model_type], model_type)
        return made[model_type]

    return checkpoint


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors are computed faster by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of remembered starts, which is empty."""
    monkeypatch.setattr(remembered, "_folder", lambda: tmp_path / "classes")
    return tmp_path / "classes"


@pytest.mark.parametrize(
    ("model_type", "ranks", "dtype"),
    [
        ("llama", 2, "bfloat16"),
        ("deepseek_v3", 2, "float32"),
        pytest.param("kimi_linear", 1, "float32", marks=pytest.mark.soak),
        ("lfm2", 1, "bfloat16"),
        ("gemma3_text", 1, "float32"),
        ("nanochat", 2, "float32"),
        ("gpt2", 1, "float32"),
    ],
)
def test_a_right_class_is_served(
    checkpoints: Callable[[str], Path], caplog: pytest.LogCaptureFixture, model_type: str, ranks: int, dtype: str
) -> None:
    with caplog.at_level(logging.INFO, "oarlock.runner"):
        start(checkpoints(model_type), ranks, dtype)
    (line,) = [one for one in caplog.messages if one.startswith("event=class_self_test ")]
    assert "layers=0" not in line and line.count("first layers") == (4 if model_type in STATES else 3)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING and one.name == "oarlock.runner"]


def attention(model: TransformersModel, **changed: Any) -> None:
    model._layers = {layer: replace(spec, **changed) for layer, spec in model._layers.items()}


def narrow(model: TransformersModel) -> None:
    """Make every window one token shorter."""
    windows = {layer: spec for layer, spec in model._layers.items() if spec.sliding_window is not None}
    assert windows
    model._layers |= {layer: replace(spec, sliding_window=spec.sliding_window - 1) for layer, spec in windows.items()}


def shift(model: TransformersModel) -> None:
    """Give the class positions that begin at one from the second token on, so that distances change."""
    run = model._class.hidden_of
    model._class.hidden_of = lambda ids, at, memory: run(ids, at + (at > 0), memory)


def offset(model: TransformersModel) -> None:
    """Count positions from two, as RoBERTa does."""
    run = model._class.hidden_of
    model._class.hidden_of = lambda ids, at, memory: run(ids, at + 2, memory)


def swap(model: TransformersModel) -> None:
    """Swap the halves of the second rank's slice of one linear layer."""
    if model.placement.tp.rank == 1:
        part = model._built.model.get_submodule("model.layers.0.mlp.down_proj")
        assert isinstance(part, LinearPart)
        run = part.forward
        part.forward = lambda x: run(x.roll(x.shape[-1] // 2, -1))


def skip(model: TransformersModel) -> None:
    model._built.model.get_submodule("model.layers.1").forward = lambda hidden, *_, **__: hidden


def stale(model: TransformersModel) -> None:
    """Leave the state of a layer as the first chunk has left it."""
    states = model._states
    update = states.update_conv_state

    def once(inputs: Tensor, layer_idx: int, *others: Any, **named: Any) -> Tensor:
        kept = states.get_conv_state(layer_idx)
        before = None if kept is None else kept.clone()
        result = update(inputs, layer_idx, *others, **named)
        if before is not None:
            states.get_conv_state(layer_idx).copy_(before)
        return result

    states.update_conv_state = once


def crowd(model: TransformersModel) -> None:
    """Add the first row of each step's hidden states to the others: other sequences matter."""
    layer = model._built.model.get_submodule("model.layers.2")
    run = layer.forward
    layer.forward = lambda hidden, *given, **named: run(hidden + 0.1 * hidden[:, :1], *given, **named)


@pytest.mark.parametrize(
    ("model_type", "ranks", "plant", "message"),
    [
        ("gemma3_text", 1, narrow, "as a whole differs after layer 3 from the class's own forward"),
        ("llama", 1, shift, "as a whole differs"),
        ("llama", 1, lambda model: attention(model, scale=1.1 * model._layers[0].scale), "as a whole differs"),
        ("llama", 2, swap, "as a whole differs"),
        ("llama", 1, skip, "as a whole differs"),
        ("gpt2", 1, offset, "as a whole differs"),
        ("lfm2", 1, stale, "in chunks beside another sequence differs"),
        ("llama", 1, crowd, "differs"),
    ],
)
def test_a_fault_is_refused(
    checkpoints: Callable[[str], Path],
    cache: Path,
    model_type: str,
    ranks: int,
    plant: Callable[[TransformersModel], None],
    message: str,
) -> None:
    with pytest.raises(StartupError, match=message) as refusal:
        start(checkpoints(model_type), ranks, plant=plant)
    assert CLASSES[model_type] in refusal.value.cause and "\n" not in str(refusal.value)
    assert "another model" in refusal.value.fix and refusal.value.exit_code == EXIT_CONFIGURATION
    assert not list(cache.glob("*"))


def test_without_the_classs_own_forward_the_ways_are_compared(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reference, "free_host_bytes", lambda: 1000)
    with caplog.at_level(logging.INFO, "oarlock.runner"):
        start(checkpoints("llama"))
    assert any("event=class_reference_skipped" in one and "of 250 B at most" in one for one in caplog.messages)
    (line,) = [one for one in caplog.messages if one.startswith("event=class_self_test ")]
    assert "layers=0" in line and "first layers" not in line
    with pytest.raises(StartupError, match="after all layers from the same prompt"):
        start(make_checkpoint(checkpoints("llama").parent, CLASSES["llama"], "llama", 1), plant=crowd)


def test_only_the_first_layers_are_read(checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MOST_BYTES", 1)
    found: list[Any] = []
    remember = OwnForward.remember
    monkeypatch.setattr(OwnForward, "remember", lambda own, facts: (found.append(own.expected), remember(own, facts)))
    start(checkpoints("llama"))
    assert found[0].layers == 1


def test_a_success_is_remembered_until_something_changes(
    checkpoints: Callable[[str], Path], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    run = OwnForward._run

    def counted(own: OwnForward, layers: Any, *given: Any) -> Tensor:
        runs.append(layers.last)
        return run(own, layers, *given)

    monkeypatch.setattr(OwnForward, "_run", counted)
    path = make_checkpoint(tmp_path, CLASSES["llama"], "llama", seed=3)

    def computes() -> bool:
        before = len(runs)
        start(path)
        return len(runs) > before

    assert computes() and not computes()
    (file,) = cache.glob("*.json")
    assert json.loads(file.read_text("utf-8"))["class"] == CLASSES["llama"]
    file.write_text('{"right": tru', "utf-8")
    assert computes() and not computes()
    weights = load_file(path / "model.safetensors")
    save_file({name: 1.01 * tensor for name, tensor in weights.items()}, path / "model.safetensors")
    assert computes() and not computes()
    config = json.loads((path / "config.json").read_text("utf-8"))
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}), "utf-8")
    assert computes() and not computes()
    monkeypatch.setattr(remembered.fingerprint, "versions", lambda: {"transformers": "another"})
    assert computes() and not computes()


def test_a_folder_that_cannot_be_written_is_a_warning(
    checkpoints: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(remembered, "_folder", lambda: tmp_path / "file" / "classes")
    start(checkpoints("llama"))
    assert any("event=class_self_test_not_remembered" in one for one in caplog.messages)
