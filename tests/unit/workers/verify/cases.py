"""A verification in one process: transformers' side recorded once, our ranks as threads, faults planted in a copy.

It writes the same files as `oarlock verify`.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.placement import Placement
from oarlock.workers.models.registry import read_spec
from oarlock.workers.preflight import preflight
from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.method import LinearWeight, WeightShard
from oarlock.workers.verify.compare import VerifyResults, compare
from oarlock.workers.verify.diagnosis import explain
from oarlock.workers.verify.expert_choices import ranks_choose_otherwise
from oarlock.workers.verify.rank import run_rank
from oarlock.workers.verify.reference import record_reference
from oarlock.workers.verify.request import NUM_SLOTS, VerifyRequest
from oarlock.workers.weights.source import WeightSource
from tests.golden.paged_run import on_ranks

PROMPTS = [[7, 3, 250, 41, 9, 9, 112, 300, 5, 77, 18, 260, 33, 4, 201, 90, 64, 2, 150], [11, 290, 6, 31], [299]]


class VerifyCase:
    """One model's reference, against which any number of variants of the same model can be run."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        dtype: str = "float32",
        new_tokens: int = 3,
        prompts: list[list[int]] = PROMPTS,
        max_model_len: int = 64,
        block_size: int = 8,
        quantization: str = "none",
        *,
        dequantize: bool = False,
        adapter: Path | None = None,
    ) -> None:
        self.model = model
        self.adapter = adapter
        self.dequantize = dequantize
        self.quantization = quantization
        self.block_size = block_size
        self.folder = folder
        self.dtype = dtype
        self.max_model_len = max_model_len
        folder.mkdir()
        self.quantization = self._config(1, model).quantization  # a stored form has a name, too
        self.request = VerifyRequest(
            str(model), dtype, "cpu", prompts, new_tokens, num_threads=1, quantization=self.quantization,
            dequantize=dequantize, adapter=None if adapter is None else str(adapter),
        )  # fmt: skip
        self.request.write(folder)
        record_reference(self.request, folder, lambda line: None)

    def run(self, size: int, model: Path | None = None, plant: Callable[[TensorParallel], None] | None = None):
        """Our side on `size` ranks, from `model` if it is another; `plant` is first called with every rank's group."""
        config = self._config(size, model or self.model)

        def work(tp: TensorParallel) -> Tensor:
            if plant is not None:
                plant(tp)
            run_rank(config, tp, self.folder, lambda line: None)
            return torch.zeros(1)

        on_ranks(size, work)
        if ranks_choose_otherwise(self.folder, read_spec(str(self.model))):
            record_reference(replace(self.request, follows_choices=True), self.folder, lambda line: None)
        return self.compared(size)

    def _config(self, size: int, model: Path) -> WorkerConfig:
        return preflight(
            WorkerConfig(
                str(model),
                device="cpu",
                dtype=self.dtype,
                quantization=self.quantization,
                dequantize=self.dequantize,
                tensor_parallel_size=size,
                max_model_len=self.max_model_len,
                max_num_seqs=8,
                max_num_batched_tokens=128,
                block_size=self.block_size,
                num_threads=1,
                kv_cache_bytes=1 << 22,
                max_loras=0 if self.adapter is None else NUM_SLOTS,
                max_lora_rank=16,
            )
        )

    def compared(self, size: int) -> tuple[VerifyResults, list[str]]:
        spec = read_spec(str(self.model))
        has_scales = self.quantization != "none" and not self.dequantize
        comparison = compare(self.folder, spec, size, self.dtype, has_scales=has_scales)
        return comparison, explain(comparison, self.folder, self.model, spec, size, self.quantization)


def altered(model: Path, into: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    """A copy of a checkpoint with one tensor changed."""
    shutil.copytree(model, into)
    tensors = load_file(into / "model.safetensors")
    tensors[name] = change(tensors[name].clone()).contiguous()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return into


def reconfigured(model: Path, into: Path, **changes: object) -> Path:
    """A copy of a checkpoint with other values in its config.json."""
    shutil.copytree(model, into)
    path = into / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return into


def cut_scales_wrongly(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Give rank 1 each output's scales from the output before, in the weight that is loaded as `name`."""
    load = Placement.load

    def shifted(place: Placement, shard: WeightShard, weights: WeightSource) -> LinearWeight:
        weight: Any = load(place, shard, weights)
        if place.tp.rank == 1 and (shard.fused or shard.parts[0].name) == name:
            for part in getattr(weight, "parts", (weight,)):
                _shift_scales(part)
        return weight

    monkeypatch.setattr(Placement, "load", shifted)


def _shift_scales(weight: Any) -> None:
    if isinstance(weight, GroupedWeight):
        groups = weight.weight
        weight.weight = replace(groups, scales=groups.scales.roll(1, 0), factors=groups.factors.roll(1, 0))
    elif isinstance(weight, Fp8Weight) and weight.scales.shape[1] > 1:  # blocks have nearly the same scales
        weight.scales = weight.scales * (1 + torch.arange(weight.scales.shape[1]) % 2)
    else:
        weight.scales = weight.scales.roll(1, 0)
