"""The stored values of an adapter, in float64: the updates of its modules by the rules of PEFT.

The linear layers, the embedding and the head in files of PEFT are read here once more, by the names of transformers'
modules and without the tables of `workers/lora/`. So a verification finds a module, a rank or a scale that our reader
gets wrong. Experts and GGUF adapters are read only by our reader (`pair_update`); tests compare them with PEFT's rules.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from oarlock.workers.lora.adapter_pair import AdapterMatrix, AdapterPair
from oarlock.workers.model_files.located import LocatedTensor

_SETTINGS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HALF = re.compile(r"(?:.*\bbase_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.\w+)?")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """The update of one module: `scale * b @ a` is added to its weight [outputs, inputs]."""

    scale: float
    a: Tensor  # float64 [rank, inputs]
    b: Tensor  # float64 [outputs, rank]

    @property
    def matrix(self) -> Tensor:
        """The update as one matrix: float64 [outputs, inputs]."""
        return self.scale * self.b @ self.a

    def of(self, x: Tensor) -> Tensor:
        """Return the update of the outputs for `x` [T, inputs]: float64 [T, outputs]."""
        return self.scale * (x @ self.a.T) @ self.b.T


def peft_updates(directory: Path) -> Mapping[str, StoredUpdate]:
    """Return the updates in PEFT's files by the names of transformers' modules; none if `directory` has others."""
    if not (directory / _WEIGHTS).is_file():
        return {}
    settings: dict[str, Any] = json.loads((directory / _SETTINGS).read_text("utf-8"))
    halves: dict[str, dict[str, Tensor]] = {}
    with safe_open(directory / _WEIGHTS, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            if match := _HALF.fullmatch(name.removesuffix(".weight").replace("_orig_mod.", "")):
                halves.setdefault(match[1], {})[match[2]] = file.get_tensor(name).double()
    whole = {name: both for name, both in halves.items() if len(both) == 2}
    return {name: StoredUpdate(_scale(settings, name), both["A"], both["B"]) for name, both in whole.items()}


def _scale(settings: Mapping[str, Any], module: str) -> float:
    """Return the factor of a module's update, as PEFT computes it."""
    rank = _of_pattern(settings.get("rank_pattern"), module, settings.get("r", 8))
    alpha = _of_pattern(settings.get("alpha_pattern"), module, settings.get("lora_alpha", 8))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _of_pattern(patterns: Mapping[str, float] | None, module: str, usual: float) -> float:
    """Return the value of the first pattern that the end of the module's name matches."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, usual)


def pair_update(pair: AdapterPair) -> StoredUpdate:
    """Read the values of one pair of ours."""
    return StoredUpdate(pair.scale, _read(pair.a), _read(pair.b))


def _read(half: AdapterMatrix) -> Tensor:
    """Return the rows and columns of a stored matrix that belong to half a pair: float64."""
    stored = _stored(half.located)
    chosen = stored[list(half.rows.numbers())][:, list(half.columns.numbers())]
    return chosen.T if half.transposed else chosen


def _stored(located: LocatedTensor) -> Tensor:
    entry = located.entry
    with located.path.open("rb") as file:
        start = 0
        if file.read(4) != b"GGUF":
            file.seek(0)
            start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start + entry.begin)
        data = bytearray(file.read(entry.end - entry.begin))
    return torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).view(entry.shape).double()
