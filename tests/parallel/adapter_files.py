"""LoRA adapters with random values for any model, in PEFT's files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from oarlock.workers.adapter_digest import adapter_digest
from oarlock.workers.layers.decoder_spec import tensors_of
from oarlock.workers.lora.adapted_modules import EMBEDDING, HEAD, AdaptedModules
from oarlock.workers.lora.target_modules import can_be_adapted
from oarlock.workers.model_files.checkpoint import read_header
from oarlock.workers.models.registry import read_spec


class AdapterFiles(NamedTuple):
    name: str
    digest: str
    directory: str


def is_plain(module: str) -> bool:
    """Whether a module belongs to attention or to an MLP without routed experts."""
    return module not in (EMBEDDING, HEAD) and ".experts." not in module


def write_adapter(
    directory: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    keep: Callable[[str], bool] = lambda module: True,
) -> AdapterFiles:
    """Write an adapter of all modules of `model` that `keep` accepts. Updates are about as large as the weights."""
    spec, tensors, draw = read_spec(str(model)), {}, torch.Generator().manual_seed(seed)
    modules = AdaptedModules(spec)
    fixed = {one.name.removesuffix(".weight") for one in tensors_of(spec) if not can_be_adapted(one)}
    files = sorted(model.glob("*.safetensors"))
    stored = {name.removesuffix(".weight"): None for file in files for name in read_header(file)}
    for name in stored | {HEAD: None}:  # a head that is tied to the embedding is not stored
        parts = modules.find(name)
        if not isinstance(parts, list) or not parts or parts[0].module in fixed or not keep(name):
            continue
        shape = modules.shape(parts[0].module)
        assert shape is not None
        a = torch.randn((rank, shape[1]), generator=draw) * (1.0 if name == EMBEDDING else 0.1)
        b = torch.randn((parts[0].rows.stored, rank), generator=draw) * 0.3
        halves = ("embedding_A", "embedding_B") if name == EMBEDDING else ("A.weight", "B.weight")
        tensors |= {f"base_model.model.{name}.lora_{half}": values for half, values in zip(halves, (a, b), strict=True)}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank // 2, "target_modules": None}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return AdapterFiles(directory.name, adapter_digest(directory), str(directory))
