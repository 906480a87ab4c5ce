"""GGUF files of models with Mamba 2 against the safetensors checkpoints that they were made from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.gguf_config import gguf_checkpoint, hf_config
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFCheckpoint, GGUFModel
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.registry import describe, read_spec
from oarlock.workers.verify.dequantise import dequantised_gguf
from oarlock.workers.weights.gguf_reader import GGUFReader
from tests.golden.cases import CASES
from tests.golden.gguf_mamba import write_mamba_gguf
from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.test_gguf_golden import stored
from tests.golden.tiny_models import make_tiny

pytestmark = pytest.mark.slow

_UNLIMITED: dict[str, Any] = {"time_step_limit": [0.0, float("inf")]}  # which no file records
_LEAST: dict[str, Any] = {"time_step_min": 0.001}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", _UNLIMITED),
    "mamba2-tied": ("mamba2", {**_UNLIMITED, "tie_word_embeddings": True, "use_conv_bias": False}),
    "granite-hybrid": ("granitemoehybrid", {"intermediate_size": 36}),
    "granite-hybrid-dense-rotated": ("granitemoehybrid", CASES["granite-hybrid-dense-rotated"].special),
    "nemotron-h": ("nemotron_h", _LEAST),
    "nemotron-h-dense": ("nemotron_h", {**_LEAST, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
}  # fmt: skip


def opened(path: Path) -> tuple[DecoderSpec, GGUFCheckpoint]:
    model = GGUFModel.open(path)
    return describe(hf_config(model)), gguf_checkpoint(path.parent, model)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_describes_the_same_model_and_holds_the_same_values(tmp_path: Path, name: str) -> None:
    family, special = MODELS[name]
    directory = make_tiny(tmp_path, family, seed=5, **special)
    spec, checkpoint = opened(write_mamba_gguf(directory, tmp_path / "model.gguf"))
    original, path = read_spec(str(directory)), tmp_path / "model.gguf"
    assert replace(spec, dtype=None) == replace(original, dtype=None)
    wanted = with_separate_experts(stored(directory))
    assert checkpoint.tensors.keys() == wanted.keys()
    with GGUFReader(checkpoint) as reader:
        for tensor_name, tensor in wanted.items():
            into = torch.empty(tensor.shape)
            reader.take(tensor_name, into, shape=tuple(tensor.shape))
            tolerance = 1e-6 if tensor_name.endswith("A_log") else 0.0  # its exponential is rounded
            torch.testing.assert_close(into, tensor, rtol=0, atol=tolerance)
            plain = dequantised_gguf(path, tensor_name).float().view(tensor.shape)
            torch.testing.assert_close(plain, tensor, rtol=0, atol=tolerance)
        reader.finish(lambda _: False)


def with_separate_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Granite's tensors of all experts, and of a shared expert, as separate matrices."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.removesuffix(".weight").rpartition(".")
        halves = zip(("gate_proj", "up_proj"), tensor.chunk(2, -2), strict=True) if part == "gate_up_proj" else ()
        parts = dict(halves) or {part: tensor}
        for inner, rows in parts.items():
            if tensor.dim() == 3 and module.endswith("experts"):
                found |= {f"{module}.{expert}.{inner}.weight": one for expert, one in enumerate(rows)}
            else:
                found[name if inner == part else f"{module}.{inner}.weight"] = rows
    return found


def test_falcon_h1_is_read_with_its_multipliers_in_the_weights(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, "falcon_h1", seed=5)
    link = tmp_path / "described"
    link.mkdir()
    write_mamba_gguf(directory, link / "model.gguf")
    spec = opened(link / "model.gguf")[0]
    assert all(branch.scale == branch.input_scale == 1.0 for layer in spec.layers for branch in layer.branches)
    tokens = list(range(5, 31))

    (theirs,) = on_ranks(1, lambda tp: PagedRun(load_decoder(directory, tp)).step({0: tokens})[0])
    ours = logits_of_file(link, spec, tokens)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


def logits_of_file(directory: Path, spec: DecoderSpec, tokens: list[int]) -> Tensor:
    """The logits of a file's model, whose description has no `config.json` here."""
    decoder = Decoder(spec, TensorParallel.solo(), torch.float32, torch.device("cpu"))
    with GGUFReader(opened(directory / "model.gguf")[1]) as reader, torch.inference_mode():
        decoder.load(reader, lambda share: None)
        return PagedRun(decoder).step({0: tokens})[0]


def test_files_whose_meaning_is_not_known_are_refused(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, "falcon_h1", tie_word_embeddings=True)
    with pytest.raises(StartupError, match="no output head, and its embedding is scaled"):
        opened(write_mamba_gguf(directory, tmp_path / "model.gguf"))
