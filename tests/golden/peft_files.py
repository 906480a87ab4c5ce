"""PEFT's files of random adapters, with the names of transformers' modules; PEFT itself is not installed."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Chooses = Callable[[str], bool]


def write_peft(
    directory: Path,
    model: PreTrainedModel,
    rank: int = 4,
    *,
    size: float = 0.3,
    seed: int = 1,
    updates: Chooses = lambda name: True,
    dtype: torch.dtype = torch.float32,
    single_experts: bool = False,
    **settings: Any,
) -> Path:
    """Write an adapter of all linear layers, and if they are named by `updates`, of the embedding and the head.

    `size`: of an update's results, of the results of a weight. Experts are adapted if `settings` have
    `target_parameters`, or one by one, as older adapters name them, with `single_experts`. `rank_pattern` in `settings`
    sets the ranks of modules.
    """
    draw, tensors = torch.Generator().manual_seed(seed), {}
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    named = [re.sub(r".*\.", "", one) for one in settings.get("target_parameters", ())]
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear | Conv1D) and module is not head
        if (is_linear or module in (head, table)) and updates(name):
            weight: Tensor = module.weight
            rows, columns = weight.shape if not isinstance(module, nn.Embedding | Conv1D) else weight.shape[::-1]
            own = _rank(settings, name, rank)
            a, b = _halves(draw, own, rows, columns, size * weight.std().item() * columns**0.5)
            kind = "lora_embedding_" if module is table else "lora_"
            end = "" if module is table else ".weight"
            tensors |= {f"base_model.model.{name}.{kind}A{end}": a, f"base_model.model.{name}.{kind}B{end}": b}
        if single_experts and name.endswith("experts"):
            for number, ((gate, up), down) in enumerate(
                zip((both.chunk(2) for both in module.gate_up_proj), module.down_proj, strict=True)
            ):
                for part, weight in (("gate", gate), ("up", up), ("down", down)):
                    a, b = _halves(draw, rank, *weight.shape, size * weight.std().item() * weight.shape[1] ** 0.5)
                    before = f"base_model.model.{name}.{number}.{part}_proj.lora_"
                    tensors |= {f"{before}A.weight": a, f"{before}B.weight": b}
        for depth, parameter in enumerate(named if name.endswith("experts") and updates(name) else ()):
            stack: Tensor = getattr(module, parameter)
            count, *sizes = stack.shape
            rows, columns = sizes[::-1] if getattr(module, "is_transposed", False) else sizes
            a, b = _halves(draw, rank * count, rows, columns, size * stack.std().item() * columns**0.5)
            around = ".base_layer" * (len(named) - 1 - depth)
            before = f"base_model.model.{name}{around}.lora_"
            tensors |= {f"{before}A.weight": a, f"{before}B.weight": b}
    directory.mkdir()
    save_file(
        {name: each.to(dtype).contiguous() for name, each in tensors.items()}, directory / "adapter_model.safetensors"
    )
    every = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": None, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(every | settings))
    return directory


def _rank(settings: dict[str, Any], module: str, usual: int) -> int:
    patterns = settings.get("rank_pattern", {})
    return next((rank for end, rank in patterns.items() if module.endswith(end)), usual)


def _halves(draw: torch.Generator, rank: int, rows: int, columns: int, size: float) -> tuple[Tensor, Tensor]:
    """Draw A and B, whose update of rows of unit variance is about as large as `size`."""
    a = torch.randn((rank, columns), generator=draw) / math.sqrt(columns)
    return a, torch.randn((rows, rank), generator=draw) * size / math.sqrt(rank)
