"""GGUF files of families whose checkpoints have other names and layouts than ours: GPT-2, StarCoder, Phi 2, GPT-NeoX.

The file has the parts of q, k and v one after another, whatever the checkpoint does, so tensors are compared by parts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.gguf_config import gguf_checkpoint, hf_config
from oarlock.workers.layers.decoder_spec import DecoderSpec, fused_modules, tensor_shapes
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.gguf_model import GGUFModel
from oarlock.workers.models.registry import describe, read_spec
from oarlock.workers.weights.gguf_reader import GGUFReader
from oarlock.workers.weights.reader import CheckpointReader, WeightReader
from tests.golden.gguf_writer import all_of, write_gguf
from tests.golden.tiny_models import make_tiny

pytestmark = pytest.mark.slow

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 311}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "starcoder": ("gpt_bigcode", {"activation_function": "gelu"}),
    "phi2": ("phi", {"num_key_value_heads": 8, "hidden_act": "gelu_new"}),
    "pythia": ("gpt_neox", {"hidden_act": "gelu"}),
    "gpt-neox-sequential": ("gpt_neox", {"hidden_act": "gelu", "use_parallel_residual": False, "vocab_size": 307}),
}


def taken(reader: CheckpointReader, spec: DecoderSpec, name: str, first: int, count: int) -> Tensor:
    """Rows `first` to `first + count` of a tensor, which may be stored as a part of another."""
    shapes = tensor_shapes(spec)
    stored, start, shape = name, first, shapes[name]
    module, _, kind = name.rpartition(".")
    if not reader.has(name):
        whole, parts = next((whole, parts) for whole, parts in fused_modules(spec) if module in parts)
        lengths = [shapes[f"{part}.{kind}"][0] for part in parts]
        stored, start = f"{whole}.{kind}", first + sum(lengths[: parts.index(module)])
        shape = (sum(lengths), *shape[1:])
    into = torch.empty(count, *shape[1:])
    reader.take(stored, into, shape=shape, start=start)  # ty: ignore[unresolved-attribute]
    return into


@pytest.mark.parametrize("name", MODELS)
def test_a_file_describes_the_same_model_and_holds_the_same_numbers(tmp_path: Path, name: str) -> None:
    family, special = MODELS[name]
    directory = make_tiny(tmp_path, family, seed=5, **special)
    model = GGUFModel.open(write_gguf(directory, tmp_path / "model.gguf", all_of("F32")))
    spec, original = describe(hf_config(model)), read_spec(str(directory))
    assert replace(spec, dtype=None) == replace(original, dtype=None)
    with (
        GGUFReader(gguf_checkpoint(tmp_path, model)) as ours,
        WeightReader(Checkpoint.open(directory, original.names)) as theirs,
    ):
        for tensor, shape in tensor_shapes(spec).items():
            for first, count in ((0, shape[0]), (shape[0] // 2, shape[0] // 4)):
                found, wanted = (taken(reader, spec, tensor, first, count) for reader in (ours, theirs))
                assert torch.equal(found, wanted), tensor
        for reader in (ours, theirs):
            reader.finish(lambda tensor: tensor == "lm_head.weight" and spec.tie_word_embeddings)


def test_starcoder_with_a_key_for_each_head_is_refused(tmp_path: Path) -> None:
    """The converter writes its rows in the order of the checkpoint, which no reader of the file knows."""
    directory = make_tiny(tmp_path, "gpt_bigcode", seed=5, multi_query=False)
    model = GGUFModel.open(write_gguf(directory, tmp_path / "model.gguf", all_of("F32")))
    with pytest.raises(StartupError, match="num_key_value_heads = 8"):
        hf_config(model)
