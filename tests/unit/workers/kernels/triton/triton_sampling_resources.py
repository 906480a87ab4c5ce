"""Compiles the sampler's kernels for kinds of CUDA device, without one, and prints the resources that each takes.

    python -m tests.unit.workers.kernels.triton.triton_sampling_resources 80 90

One line of JSON, as of `triton_resources`.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from oarlock.workers.sampling.columns import SamplingColumns, Variant
from oarlock.workers.sampling.device_sampler import DeviceOutputs, DeviceSampler
from oarlock.workers.sampling.sharded_sampler import ShardSampler
from oarlock.workers.sampling.token_histories import DenseHistories
from tests.unit.workers.kernels.triton.triton_resources import resources
from tests.unit.workers.sampling_cases import step_of

CPU = torch.device("cpu")
VOCAB = 151_936
_TYPES = {torch.float32: "*fp32", torch.int32: "*i32", torch.float64: "*fp64"}


class Recorded:
    """A module of kernels: a launch only notes kernel and arguments."""

    def __init__(self, module: Any, launches: list[tuple[str, Any, tuple, dict]]) -> None:
        self._module, self._launches = module, launches

    def __getattr__(self, name: str) -> dict:
        module, launches = self._module, self._launches

        class OfAnyGrid(dict):
            def __missing__(self, grid: tuple[int, ...]) -> Any:
                return lambda *args, **options: launches.append((name, getattr(module, name), args, options))

        return OfAnyGrid()


def recording_shard() -> tuple[ShardSampler, list[tuple[str, Any, tuple, dict]]]:
    """A sampler of the second of two ranks that launches nothing, and its launches."""
    launches: list[tuple[str, Any, tuple, dict]] = []
    own, histories = VOCAB // 2, DenseHistories(1, 0, VOCAB, CPU)
    sampler = ShardSampler(own, own, 1, histories, CPU, lambda found: torch.stack([found, found]))
    sampler._kernels = tuple(Recorded(module, launches) for module in sampler._kernels)
    sampler._shards = Recorded(sampler._shards, launches)
    sampler._shards.FOUND = 4
    return sampler, launches


def recording_sampler() -> tuple[DeviceSampler, list[tuple[str, Any, tuple, dict]]]:
    """A sampler that launches nothing, and its launches: name, kernel, arguments, constants with `num_warps`."""
    launches: list[tuple[str, Any, tuple, dict]] = []
    sampler = DeviceSampler(VOCAB, 1, DenseHistories(1, 0, VOCAB, CPU), CPU)
    sampler._kernels = tuple(Recorded(module, launches) for module in sampler._kernels)
    return sampler, launches


def launches_of(variant: Variant, recording: Callable = recording_sampler) -> list[tuple[str, Any, tuple, dict]]:
    """Kernel launches for one row."""
    sampler, launches = recording()
    columns, outputs = SamplingColumns.of_step(step_of(1), CPU), DeviceOutputs.empty(1, CPU)
    sampler.sample(torch.zeros(1, VOCAB), columns, outputs, variant)
    sampler.count(columns, outputs, 1)
    return launches


def main() -> None:
    found = {}
    whole, shard = (
        launches_of(Variant(True, True, True, True)),
        launches_of(Variant(True, False, True), recording_shard),
    )
    for name, kernel, args, options in (*whole, *(launch for launch in shard if "shard" in launch[0])):
        warps = {"num_warps": options.pop("num_warps")}
        types = {
            argument: _TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            for argument, value in zip(kernel.arg_names, args, strict=False)
        }
        assert set(kernel.arg_names) == set(types) | set(options), name
        for kind in sys.argv[1:]:
            found[f"{kind} {name}"] = resources(kernel, kind, options, types, warps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
