"""Names of adapters' modules, for every family: the rows of each linear layer of transformers are the rows of ours."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oarlock.workers.layers.decoder_spec import fused_modules, tensor_shapes
from oarlock.workers.lora.adapted_modules import EMBEDDING, AdaptedModules, ExpertStack, Part
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.models.registry import read_spec
from oarlock.workers.weights.reader import WeightReader
from tests.golden.tiny_models import DESCRIBED, FAMILIES, LATENT, MIXTURES, RECURRENT, make_tiny, tiny_model
from tests.golden.tiny_wrappers import WRAPPERS

# Families whose modules differ most from ours: in their names, their fused and alternating rows, and their experts.
DIFFERENT = ("gpt2", "gpt_neox", "phi3", "granitemoeshared", "gpt_oss", "llama4_text", "qwen3_next", "olmo_hybrid",
             "nemotron_h", "gemma4", "qwen3_vl_moe")  # fmt: skip


class _Weights:
    """The matrices of our modules in a checkpoint, which may store some of them as one."""

    def __init__(self, path: Path) -> None:
        self.spec = read_spec(str(path))
        self._shapes = tensor_shapes(self.spec)
        self._checkpoint = Checkpoint.open(path, self.spec.names)
        self._fused = {part: (fused, parts) for fused, parts in fused_modules(self.spec) for part in parts}

    def matrix(self, module: str) -> Tensor:
        with WeightReader(self._checkpoint) as reader:
            if module == "lm_head" and self.spec.tie_word_embeddings:
                module = EMBEDDING
            if self._checkpoint.find(f"{module}.weight") is not None:
                return self._taken(reader, module, self._shapes[f"{module}.weight"])
            fused, parts = self._fused[module]
            rows = [self._shapes[f"{part}.weight"][0] for part in parts if f"{part}.weight" in self._shapes]
            whole = self._taken(reader, fused, (sum(rows), *self._shapes[f"{module}.weight"][1:]))
            return whole.split(rows)[parts.index(module)]

    @staticmethod
    def _taken(reader: WeightReader, module: str, shape: tuple[int, ...]) -> Tensor:
        into = torch.empty(shape)
        reader.take(f"{module}.weight", into, shape=shape)
        return into


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.soak)
        for name in (*FAMILIES, *MIXTURES, *DESCRIBED, *RECURRENT, *LATENT, *WRAPPERS)
    ],
)
def test_rows_of_linear_layers_of_transformers_are_the_rows_of_our_modules(tmp_path: Path, family: str) -> None:
    weights, model = _Weights(make_tiny(tmp_path, family)), tiny_model(family)
    modules = AdaptedModules(weights.spec)
    found = set()
    for name, parameter, matrix in _matrices(model):
        parts = modules.find(name)
        assert parts != [], name
        if isinstance(parts, ExpertStack):
            found |= _check_experts(name, parameter, matrix, parts, weights)
        elif parts is not None:
            assert matrix.dim() == 2, name
            _check(name, matrix, parts, weights)
            found |= {part.module for part in parts}
    linear = {name.removesuffix(".weight") for name in tensor_shapes(weights.spec) if name.endswith(".weight")}
    # Every linear layer is found, and so are the embedding and the head.
    assert {module for module in linear if modules.shape(module) is not None} <= found | {"lm_head"}


def _matrices(model: PreTrainedModel) -> list[tuple[str, str, Tensor]]:
    """Return (module, parameter, matrix [outputs, inputs] or a stack of them) of all that adapters may update."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            found.append((name, "weight", module.weight.T))
        elif isinstance(module, nn.Linear) or module is model.get_input_embeddings():
            found.append((name, "weight", module.weight))
        elif not isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            own = dict(module.named_parameters(recurse=False)).items()  # experts, and routers of a class of their own
            found += [(name, key, one) for key, one in own if one.dim() == 3 or (key == "weight" and one.dim() == 2)]
    return [(name, key, matrix.detach()) for name, key, matrix in found]


def _check(name: str, matrix: Tensor, parts: list[Part], weights: _Weights) -> None:
    for part in parts:
        if part.module != EMBEDDING:
            assert part.rows.stored == len(matrix), name
            matrix_of_part = matrix[list(part.rows.numbers())]
        else:
            matrix_of_part = matrix
        assert torch.equal(weights.matrix(part.module), matrix_of_part), f"{name}: {part.module}"


def _check_experts(name: str, parameter: str, stack: Tensor, experts: ExpertStack, weights: _Weights) -> set[str]:
    parameter, found = experts.only or parameter, set()
    inputs, outputs = experts.sizes(parameter)
    if stack.shape[1:] != (outputs, inputs):
        stack = stack.transpose(1, 2)
    for expert in range(experts.experts):
        parts = list(experts.parts(parameter, expert))
        _check(name, stack[expert], parts, weights)
        found |= {part.module for part in parts}
    return found
