"""The weights of a quantised checkpoint as plain numbers, for checking what ranks load and compute.

Written from the formats' descriptions, over whole tensors, one operation after the other. It shares no code with the
readers in `workers/quantization/`, so that a mistake in one of them shows.

    GPTQ                W = (q - z) * scale, words of 32 bits packed along the inputs, zeros along the outputs
    AWQ                 the same, packed along the outputs, eight numbers of a word in the order 0 2 4 6 1 3 5 7
    compressed-tensors  W = (q - z) * scale: packed along the inputs with 2 ** (bits - 1) added, or plain int8 or float8
    fp8                 W = float8 * scale, a scale for a tensor or a block of it
    bitsandbytes        W = code[q] * absmax, four bits each, the first number in the high half of a byte
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from oarlock.workers.errors import StartupError
from oarlock.workers.weights.checkpoint import Checkpoint

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each group of four bits in a word, the lowest first


def dequantised(directory: Path, name: str) -> Tensor:
    """The weight of a linear module, e.g. `model.layers.0.mlp.up_proj`, as it is stored: float64 [N, K].

    A module that the checkpoint does not quantise gives its weight as well. Raises `StartupError` for a missing one.
    """
    module = _Module(directory, name)
    for kind, values in _KINDS.items():
        if module.has(kind):
            return values(module)
    raise StartupError(f"{directory} holds no weight of {name!r}.", "Use a complete checkpoint.")


class _Module:
    """The tensors of one module, and what config.json says about the checkpoint."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.settings = _settings(directory)
        self._checkpoint = Checkpoint.open(directory)

    def has(self, kind: str) -> bool:
        return self._checkpoint.find(f"{self.name}.{kind}") is not None

    def get(self, kind: str) -> Tensor:
        found = self._checkpoint.find(f"{self.name}.{kind}")
        if found is None:
            raise StartupError(
                f"{self._checkpoint.directory} holds no tensor '{self.name}.{kind}'.", "Use a complete checkpoint."
            )
        with safe_open(found.path, "pt") as file:
            return file.get_tensor(f"{self.name}.{kind}")


def _settings(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text("utf-8"))
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            return config[key]
    for file in ("quantize_config.json", "quant_config.json"):
        if (directory / file).exists():
            return json.loads((directory / file).read_text("utf-8"))
    return {}


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [R, C] -> the numbers in each word, the lowest bits first: int64 [R, C, 32 / bits]."""
    unsigned = words.long() & 0xFFFFFFFF
    return torch.stack([unsigned >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)], 2)


def _gptq_or_awq(module: _Module) -> Tensor:
    if module.settings.get("quant_method", "gptq" if "desc_act" in module.settings else "awq") == "awq":
        return _awq(module)
    return _gptq(module)


def _gptq(module: _Module) -> Tensor:
    words, scales = module.get("qweight"), module.get("scales").double()  # [K * bits / 32, N], [groups, N]
    inputs = len(module.get("g_idx"))
    bits = 32 * len(words) // inputs
    numbers = _unpacked(words, bits).transpose(1, 2).flatten(0, 1)  # [K, N]
    zeros = module.get("qzeros").long()  # [groups, N * bits / 32]
    if module.settings.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))  # stored less one, as one number of 32 bits
    zeros = _unpacked(zeros, bits).flatten(1)  # [groups, N]
    group = module.get("g_idx").long()  # of each input
    return ((numbers - zeros[group]) * scales[group]).T


def _awq(module: _Module) -> Tensor:
    scales = module.get("scales").double()  # [groups, N]

    def columns(words: Tensor) -> Tensor:
        stored = _unpacked(words, 4)  # [R, N / 8, 8]
        ordered = torch.empty_like(stored)
        ordered[:, :, list(_AWQ_ORDER)] = stored
        return ordered.flatten(1)

    numbers, zeros = columns(module.get("qweight")), columns(module.get("qzeros"))  # [K, N], [groups, N]
    group = torch.arange(len(numbers)) // (len(numbers) // len(scales))
    return ((numbers - zeros[group]) * scales[group]).T


def _packed(module: _Module) -> Tensor:
    words = module.get("weight_packed")  # [N, K * bits / 32]
    outputs, inputs = module.get("weight_shape").tolist()
    bits = 8 if words.shape[1] == -(-inputs // 4) else 4
    numbers = _unpacked(words, bits).flatten(1)[:, :inputs] - (1 << bits - 1)
    scales = _at_each(module, module.get("weight_scale").double(), outputs, inputs)
    if not module.has("weight_zero_point"):
        return numbers * scales
    zeros = _unpacked(module.get("weight_zero_point").T, bits).flatten(1)[:, :outputs].T - (
        1 << bits - 1
    )  # [N, groups]
    return (numbers - _at_each(module, zeros, outputs, inputs)) * scales


def _at_each(module: _Module, values: Tensor, outputs: int, inputs: int) -> Tensor:
    """One number for a tensor, an output, a group of its inputs or a block -> one for each weight: [N, K]."""
    if values.numel() == 1:
        return values.reshape(1, 1).expand(outputs, inputs)
    if values.dim() == 1:
        return values.unsqueeze(1).expand(outputs, inputs)
    if len(values) != outputs:
        height, width = _block(module.settings)
        return values.repeat_interleave(height, 0)[:outputs].repeat_interleave(width, 1)[:, :inputs]
    if module.has("weight_g_idx") and (group := module.get("weight_g_idx").long()).min() >= 0:
        return values[:, group]
    return values.repeat_interleave(inputs // values.shape[1], 1)


def _block(settings: dict[str, Any]) -> tuple[int, int]:
    if "weight_block_size" in settings:
        height, width = settings["weight_block_size"]
        return height, width
    blocks = [group["weights"].get("block_structure") for group in settings["config_groups"].values()]
    height, width = next(block for block in blocks if block)
    return height, width


def _scaled(module: _Module) -> Tensor:
    """Numbers of 8 bits that are not packed, or an ordinary weight."""
    weight = module.get("weight")
    if weight.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return weight.double()
    scales = module.get("weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale").double()
    numbers = weight.double()
    if module.has("weight_zero_point"):
        numbers = numbers - _at_each(module, module.get("weight_zero_point").double(), *weight.shape)
    return numbers * _at_each(module, scales, *weight.shape)


def _four_bits(module: _Module) -> Tensor:
    kind = "nf4" if module.has("weight.quant_state.bitsandbytes__nf4") else "fp4"
    state = json.loads(bytes(module.get(f"weight.quant_state.bitsandbytes__{kind}").tolist()))
    largest = module.get("weight.absmax")
    if "nested_blocksize" in state:
        code, outer = module.get("weight.nested_quant_map"), module.get("weight.nested_absmax")
        block = torch.arange(len(largest)) // state["nested_blocksize"]
        largest = code[largest.long()] * outer[block] + state["nested_offset"]  # float32, as the tool computes it
    stored = module.get("weight").flatten().long()  # two numbers in each
    numbers = torch.stack((stored >> 4, stored & 15), 1).flatten()[: state["shape"][0] * state["shape"][1]]
    block = torch.arange(len(numbers)) // state["blocksize"]
    values = module.get("weight.quant_map").double()[numbers] * largest.double()[block]
    return values.reshape(state["shape"])


# The tensor by which each form is recognised, the most specific one first.
_KINDS: dict[str, Callable[[_Module], Tensor]] = {
    "qweight": _gptq_or_awq,
    "weight_packed": _packed,
    "weight.absmax": _four_bits,
    "weight": _scaled,
}
