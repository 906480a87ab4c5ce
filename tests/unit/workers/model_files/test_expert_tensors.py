"""Experts by one name each, however a checkpoint stores them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.model_files.checkpoint import SINGLE_FILE, Checkpoint
from oarlock.workers.model_files.tensor_names import NO_NAMES, TensorNames
from oarlock.workers.models.granite_moe import granite_names
from oarlock.workers.models.mistral import MIXTRAL_NAMES
from oarlock.workers.weights.reader import WeightReader

EXPERTS, WIDTH, HIDDEN = 3, 4, 6
LAYER = "model.layers.0."


def opened(folder: Path, tensors: dict[str, Tensor], names: TensorNames = NO_NAMES) -> Checkpoint:
    save_file({f"{LAYER}{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)
    return Checkpoint.open(folder, names)


GATE_UP = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN)
DOWN = torch.randn(EXPERTS, HIDDEN, WIDTH)
STORED = {
    "joined": (NO_NAMES, "mlp", {"mlp.experts.gate_up_proj": GATE_UP, "mlp.experts.down_proj": DOWN}),
    "granite": (
        granite_names(None),
        "block_sparse_moe",
        {"block_sparse_moe.input_linear.weight": GATE_UP, "block_sparse_moe.output_linear.weight": DOWN},
    ),
    "mixtral": (
        MIXTRAL_NAMES,
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
    names, module, tensors = STORED[way]
    with WeightReader(opened(tmp_path, tensors, names)) as weights:
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
        opened(tmp_path, {**STORED["joined"][2], **one})


def _turns(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and of up in turn: [E, N, ...] twice -> [E, 2 * N, ...]."""
    return torch.stack((gate, up), 2).flatten(1, 2)


def test_rows_of_gate_and_up_that_take_turns_are_read_apart(tmp_path: Path) -> None:
    """gpt-oss: matrices [E, K, N] in floating point, and in bytes [E, N, K / 32, 16] in MXFP4."""
    bias, of_down = torch.randn(EXPERTS, 2 * WIDTH), torch.randn(EXPERTS, HIDDEN)
    gate, up = GATE_UP.split(WIDTH, 1)
    blocks = torch.randint(0, 255, (EXPERTS, 2 * WIDTH, 2, 16), dtype=torch.uint8)
    plain, packed = "mlp.experts.", "mlp.other.experts."  # as if one model had both
    tensors = {
        f"{plain}gate_up_proj": _turns(gate, up).transpose(1, 2),
        f"{plain}gate_up_proj_bias": _turns(*bias.split(WIDTH, 1)),
        f"{plain}down_proj": DOWN.transpose(1, 2),
        f"{plain}down_proj_bias": of_down,
        f"{packed}gate_up_proj_blocks": _turns(*blocks.split(WIDTH, 1)),
        f"{packed}gate_up_proj_scales": _turns(*blocks[..., 0].split(WIDTH, 1)),
        f"{packed}gate_up_proj_bias": _turns(*bias.split(WIDTH, 1)),
    }
    with WeightReader(opened(tmp_path, tensors)) as weights:
        for expert in range(EXPERTS):
            wanted = {
                "gate_proj.weight": gate[expert], "up_proj.weight": up[expert], "down_proj.weight": DOWN[expert],
                "gate_proj.bias": bias[expert, :WIDTH], "up_proj.bias": bias[expert, WIDTH:],
                "down_proj.bias": of_down[expert],
            }  # fmt: skip
            found = {f"{LAYER}{plain}{expert}.{name}": exact for name, exact in wanted.items()}
            for first, name in ((0, "gate_proj"), (WIDTH, "up_proj")):
                rows = blocks[expert, first : first + WIDTH]
                found[f"{LAYER}{packed}{expert}.{name}.blocks"] = rows.flatten(1)
                found[f"{LAYER}{packed}{expert}.{name}.scales"] = rows[..., 0]
                found[f"{LAYER}{packed}{expert}.{name}.bias"] = bias[expert, first : first + WIDTH]
            for name, exact in found.items():
                for dim in range(exact.dim()):
                    part = exact.narrow(dim, 1, exact.shape[dim] - 1)
                    into = torch.empty(part.shape, dtype=part.dtype)
                    weights.take(name, into, shape=exact.shape, dim=dim, start=1)
                    assert torch.equal(into, part), f"{name} along {dim}"
        weights.finish(lambda name: False)


def test_a_tensor_of_experts_of_another_shape_is_named(tmp_path: Path) -> None:
    odd = {"mlp.experts.gate_up_proj": torch.ones(2, 4, 5), "mlp.experts.gate_up_proj_bias": torch.ones(2, 5)}
    with (
        WeightReader(opened(tmp_path, odd)) as weights,
        pytest.raises(StartupError, match=r"does not use: model\.layers\.0\.mlp\.experts\.gate_up_proj"),
    ):
        weights.finish(lambda name: False)
