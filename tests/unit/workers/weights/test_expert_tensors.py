"""Experts by one name each, however a checkpoint stores them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from oarlock.workers.errors import StartupError
from oarlock.workers.weights.checkpoint import SINGLE_FILE, Checkpoint
from oarlock.workers.weights.reader import WeightReader

EXPERTS, WIDTH, HIDDEN = 3, 4, 6
LAYER = "model.layers.0."


def opened(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    save_file({f"{LAYER}{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)
    return Checkpoint.open(folder)


GATE_UP = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN)
DOWN = torch.randn(EXPERTS, HIDDEN, WIDTH)
STORED = {
    "joined": ("mlp", {"mlp.experts.gate_up_proj": GATE_UP, "mlp.experts.down_proj": DOWN}),
    "granite": (
        "block_sparse_moe",
        {"block_sparse_moe.input_linear.weight": GATE_UP, "block_sparse_moe.output_linear.weight": DOWN},
    ),
    "mixtral": (
        "mlp",
        {
            f"block_sparse_moe.experts.{expert}.{name}.weight": part
            for expert in range(EXPERTS)
            for name, part in (
                ("w1", GATE_UP[expert, :WIDTH]), ("w3", GATE_UP[expert, WIDTH:]), ("w2", DOWN[expert]),
            )
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", STORED)
def test_each_expert_is_read_by_its_own_name(tmp_path: Path, way: str) -> None:
    module, tensors = STORED[way]
    with WeightReader(opened(tmp_path, tensors)) as weights:
        for expert in range(EXPERTS):
            wanted = {"gate": GATE_UP[expert, :WIDTH], "up": GATE_UP[expert, WIDTH:], "down": DOWN[expert]}
            for part, exact in wanted.items():
                into = torch.empty(2, exact.shape[1])
                name = f"{LAYER}{module}.experts.{expert}.{part}_proj.weight"
                weights.take(name, into, shape=exact.shape, start=1)
                assert torch.equal(into, exact[1:3])
        weights.finish(lambda name: False)


def test_an_expert_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    one = {"mlp.experts.1.down_proj.weight": DOWN[1].clone()}
    with pytest.raises(StartupError, match=r"'model\.layers\.0\.mlp\.experts\.1\.down_proj\.weight' is stored twice"):
        opened(tmp_path, {**STORED["joined"][1], **one})
