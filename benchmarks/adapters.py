"""LoRA adapters with random values for a checkpoint of `benchmarks/checkpoint.py`, in PEFT's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.mixtures import MIXTURES
from oarlock.workers.adapter_digest import adapter_digest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MODULES = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def target_modules(shape: str) -> tuple[str, ...]:
    """The modules of a model's shape that the adapters update, as `--lora-target-modules` takes them."""
    return (*ATTENTION, "experts") if shape in MIXTURES else MODULES


class AdapterFiles(NamedTuple):
    name: str
    digest: str
    directory: Path


def write_adapters(model: Path, folder: Path, rank: int, count: int, first: int = 0) -> list[AdapterFiles]:
    """Write `count` adapters of `MODULES` of all layers of `model`: `folder/rRANK-NUMBER`, numbered from `first`.

    They differ in the values of one tensor only, since drawing all values takes longer than loading them.
    """
    draw, tensors = torch.Generator().manual_seed(rank), {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - the file is no mapping
                module = name.removesuffix(".weight")
                if module == name or module.rpartition(".")[2] not in MODULES:
                    continue
                outputs, inputs = stored.get_slice(name).get_shape()
                before = f"base_model.model.{module}.lora_"
                tensors[f"{before}A.weight"] = (torch.randn((rank, inputs), generator=draw) * inputs**-0.5).bfloat16()
                tensors[f"{before}B.weight"] = (torch.randn((outputs, rank), generator=draw) * 0.01).bfloat16()
    if not tensors:
        raise ValueError(f"{model} has no modules named {', '.join(MODULES)}")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    written = []
    for number in range(first, first + count):
        directory = folder / f"r{rank}-{number}"
        directory.mkdir(parents=True)
        changed = next(iter(tensors))
        tensors[changed] = tensors[changed] + 0.01
        save_file(tensors, directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text(json.dumps(settings))
        written.append(AdapterFiles(directory.name, adapter_digest(directory), directory))
    return written
