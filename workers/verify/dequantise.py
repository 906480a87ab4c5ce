"""Dequantisation of a quantised checkpoint or of a GGUF file, to check the ranks' weights and results.

Written from the formats' descriptions, over whole tensors, one operation after the other. It shares no code with the
readers in `workers/quantization/` and `workers/weights/`, except for headers, settings and tables of names, so that
mistakes in the readers show. The source for GGUF is ggml-quants.c and llama.cpp's converter.

    GPTQ                W = (q - z) * scale, words of 32 bits packed along the inputs, zeros along the outputs
    AWQ                 the same, packed along the outputs, eight values of a word in the order 0 2 4 6 1 3 5 7
    compressed-tensors  W = (q - z) * scale: packed along the inputs with 2 ** (bits - 1) added, or plain int8 or float8
    fp8                 W = float8 * scale, a scale for a tensor or a block of it
    bitsandbytes        W = code[q] * absmax, four bits each, the first value in the high half of a byte
    MXFP4               W = e2m1 * 2 ** (scale - 127), four bits each, the first value in the low half of a byte
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.gguf_config import gguf_checkpoint
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.gguf_model import GGUFModel, GGUFTransform, Tiles
from oarlock.workers.model_files.tensor_names import NO_NAMES, TensorNames

_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each group of four bits in a word, the lowest first


class StoredTensors:
    """The tensors of a checkpoint under our names. Each is read whole, and then rearranged."""

    def __init__(self, directory: Path, names: TensorNames = NO_NAMES) -> None:
        """Find the tensors. `names`: of the model's family."""
        self.directory = directory
        self._names = names
        self._places: dict[str, tuple[Path, str]] = {}  # our name -> file, and the name there
        for path in sorted({found.path for found in Checkpoint.open(directory, names).tensors.values()}):
            with safe_open(path, "pt") as file:
                for stored in file.keys():  # noqa: SIM118
                    self._places |= dict.fromkeys(self._named(stored), (path, stored))

    def has(self, name: str) -> bool:
        return name in self._places

    def get(self, name: str) -> Tensor:
        """Return a tensor by our name. Raise `StartupError` if it is missing."""
        if name not in self._places:
            raise StartupError(f"{self.directory} holds no tensor {name!r}.", "Use a complete checkpoint.")
        path, stored = self._places[name]
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(stored)
        module, _, kind = (self._names.rename(stored) or stored).rpartition(".")
        if kind == "weight" and tensor.dtype in _PLAIN and self._names.is_transposed(module):
            tensor = tensor.T.contiguous()
        blocks = self._names.blocks_of(module)
        if blocks is None or tensor.numel() == 1:
            return tensor
        block = sum(blocks.rows) * blocks.groups // len(tensor)  # outputs that share a row, as in scales of blocks
        return tensor[[row // block for row in blocks.rows_of(name.split(".")[-2])[::block]]]

    def _named(self, stored: str) -> list[str]:
        """Return our names of a stored tensor, which may hold the rows of several modules."""
        ours = self._names.rename(stored)
        if ours is None:
            return []
        module, _, kind = ours.rpartition(".")
        blocks = self._names.blocks_of(module)
        return [ours] if blocks is None else [f"{module.rpartition('.')[0]}.{part}.{kind}" for part in blocks.parts]


def dequantised(stored: StoredTensors, name: str) -> Tensor:
    """Return the weight of a linear module, e.g. `model.layers.0.mlp.up_proj`, as it is stored: float64 [N, K].

    Works for a module that the checkpoint does not quantise, too. Raises `StartupError` if the weight is missing.
    """
    module = _Module(stored, name)
    for kind, values in _KINDS.items():
        if module.has(kind):
            return values(module)
    raise StartupError(f"{stored.directory} holds no weight of {name!r}.", "Use a complete checkpoint.")


class _Module:
    """The tensors of one module, and the quantization settings of the checkpoint."""

    def __init__(self, stored: StoredTensors, name: str) -> None:
        self.name = name
        self.stored = stored
        self.settings = _settings(stored.directory)

    def has(self, kind: str) -> bool:
        if kind == "blocks":
            return _EXPERT.fullmatch(self.name) is not None and self.stored.has(_mxfp4_name(self.name, "blocks"))
        return self.stored.has(f"{self.name}.{kind}")

    def get(self, kind: str) -> Tensor:
        return self.stored.get(f"{self.name}.{kind}")


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
    """Unpack int32 [R, C] to the values in each word, the lowest bits first: int64 [R, C, 32 / bits]."""
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
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))  # stored less one, as one 32-bit integer
    zeros = _unpacked(zeros, bits).flatten(1)  # [groups, N]
    group = module.get("g_idx").long()  # group of each input
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
    """Expand values for a tensor, an output, a group of its inputs or a block to one for each weight: [N, K]."""
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
    """Return unpacked 8-bit values times their scales, or an ordinary weight."""
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
    stored = module.get("weight").flatten().long()  # two values in each
    numbers = torch.stack((stored >> 4, stored & 15), 1).flatten()[: state["shape"][0] * state["shape"][1]]
    block = torch.arange(len(numbers)) // state["blocksize"]
    values = module.get("weight.quant_map").double()[numbers] * largest.double()[block]
    return values.reshape(state["shape"])


_EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj")


def _mxfp4(module: _Module) -> Tensor:
    """Return the weight of one expert of gpt-oss. A file has one tensor per kind for all experts, in which rows of gate
    and up alternate."""
    found = _EXPERT.fullmatch(module.name)
    assert found is not None, f"{module.name} is no expert"
    rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[found["part"]]
    blocks, scales = (
        module.stored.get(_mxfp4_name(module.name, kind))[int(found["number"]), rows] for kind in ("blocks", "scales")
    )  # uint8 [N, K / 32, 16], [N, K / 32]
    pairs = np.stack((blocks.numpy() & 15, blocks.numpy() >> 4), -1).reshape(*scales.shape, 32)
    return torch.from_numpy(_e2m1(pairs) * np.exp2(scales.numpy()[:, :, None].astype(np.float64) - 127)).flatten(1)


def _mxfp4_name(module: str, kind: str) -> str:
    """Return the name of the tensor of all experts that contains the `kind` of an expert's `module`."""
    found = _EXPERT.fullmatch(module)
    assert found is not None, f"{module} is no expert"
    return f"{found['before']}.{'down_proj' if found['part'] == 'down' else 'gate_up_proj'}_{kind}"


# The tensor by which each format is recognised, the most specific one first.
_KINDS: dict[str, Callable[[_Module], Tensor]] = {
    "qweight": _gptq_or_awq,
    "weight_packed": _packed,
    "weight.absmax": _four_bits,
    "blocks": _mxfp4,
    "weight": _scaled,
}


_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float64]


def dequantised_gguf(path: Path, hf_name: str) -> Tensor:
    """Return the tensor that a Hugging Face checkpoint has as `hf_name`, e.g. `model.layers.0.mlp.up_proj.weight`:
    float64.

    `path`: the GGUF file, any part of it, or a directory with a link to it. The heads of Llama's q and k are in Hugging
    Face's order, and Gemma's norms without the 1 that GGUF adds. Raises `StartupError` if the tensor is missing.
    """
    if path.is_dir():
        link = sorted(path.glob("*.gguf"))[0]
        path = link.readlink() if link.is_symlink() else link
    checkpoint = gguf_checkpoint(path.parent, GGUFModel.open(path))
    found = checkpoint.tensors.get(hf_name)
    if found is None:
        raise StartupError(f"{path} holds no tensor for {hf_name!r}.", "Use a complete file.")
    entry, layout = found.entry, checkpoint.layout(hf_name)
    raw = np.fromfile(found.path, np.uint8, entry.end - entry.begin, offset=entry.begin)
    numbers = _NUMBERS[entry.dtype](raw).reshape(found.stored_shape) - layout.added
    rows = numbers.reshape(-1, found.step, *numbers.shape[1:])[:, found.first : found.first + found.block]
    numbers = _untiled(layout.tiles, numbers if found.step == 1 else rows.reshape(entry.shape))
    if layout.tiles_of_inputs is not None:
        numbers = _untiled(layout.tiles_of_inputs, numbers.T).T
    numbers = np.log(-numbers) if layout.is_decay else numbers
    return torch.from_numpy(np.ascontiguousarray(numbers[_halves_of_heads(layout, len(numbers))]))


def _untiled(tiles: Tiles | None, numbers: _Floats) -> _Floats:
    """Return rows in Hugging Face's order: all inner blocks of each outer one together."""
    if tiles is None:
        return numbers
    blocks = numbers[tiles.first :].reshape(tiles.inner, tiles.outer, tiles.width, *numbers.shape[1:])
    return np.concatenate((numbers[: tiles.first], blocks.swapaxes(0, 1).reshape(-1, *numbers.shape[1:])))


def _halves_of_heads(layout: GGUFTransform, rows: int) -> NDArray[np.int64]:
    """Return the order of `rows` in which rows 0, 2, 4 … of each head come first, then rows 1, 3, 5 and so on."""
    order, width = np.arange(rows), layout.head_dim
    for start in range(0, layout.interleaved_heads * width, width or 1):
        head = order[start : start + width].copy()
        order[start : start + width] = np.concatenate((head[0::2], head[1::2]))
    return order


def _half(blocks: _Bytes, at: int) -> _Floats:
    """Return the float16 at byte `at` of each block: [B]."""
    return blocks[:, at : at + 2].copy().view(np.float16)[:, 0].astype(np.float64)


def _block_of_32(size: int, bits: int, *, has_minimum: bool) -> Callable[[_Bytes], _Floats]:
    """Return a reader of Q4_0, Q4_1, Q5_0 or Q5_1: a scale, perhaps a minimum, perhaps the fifth bits, and 16 bytes of
    two values each."""

    def numbers(raw: _Bytes) -> _Floats:
        blocks = raw.reshape(-1, size)
        found = np.empty((len(blocks), 32))
        fifth = blocks[:, size - 20 : size - 16].copy().view("<u4")[:, 0] if bits == 5 else None
        for k in range(32):
            byte = blocks[:, size - 16 + k % 16]
            value = (byte >> 4 if k >= 16 else byte & 15).astype(np.int64)
            if fifth is not None:
                value += ((fifth >> k) & 1).astype(np.int64) * 16
            found[:, k] = value
        scale = _half(blocks, 0)[:, None]
        if has_minimum:
            return found * scale + _half(blocks, 2)[:, None]
        return (found - 2 ** (bits - 1)) * scale

    return numbers


def _q8_0(raw: _Bytes) -> _Floats:
    blocks = raw.reshape(-1, 34)
    return blocks[:, 2:].copy().view(np.int8) * _half(blocks, 0)[:, None]


def _scale_and_minimum(packed: _Bytes, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and minimum as `get_scale_min_k4` does. They have 6 bits; the bits of groups 4 to 7 are split over
    two bytes. `packed`: uint8 [B, 12]."""
    if group < 4:
        return packed[:, group] & 63, packed[:, group + 4] & 63
    low, high = packed[:, group + 4], packed[:, group - 4] >> 6
    return (low & 15) | high << 4, (low >> 4) | (packed[:, group] >> 6) << 4


def _k_with_minima(size: int) -> Callable[[_Bytes], _Floats]:
    """Return a reader of Q4_K or Q5_K: eight groups of 32, whose scales and minima are multiples of two float16."""

    def numbers(raw: _Bytes) -> _Floats:
        blocks = raw.reshape(-1, size)
        found = np.empty((len(blocks), 8, 32))
        for group in range(8):
            scale, minimum = _scale_and_minimum(blocks[:, 4:16], group)
            first = size - 128 + group // 2 * 32
            values = (blocks[:, first : first + 32] >> (4 * (group % 2)) & 15).astype(np.float64)
            if size == 176:
                values += 16.0 * (blocks[:, 16:48] >> group & 1)
            scales, minima = _half(blocks, 0) * scale, _half(blocks, 2) * minimum
            found[:, group] = values * scales[:, None] - minima[:, None]
        return found

    return numbers


def _q6_k(raw: _Bytes) -> _Floats:
    blocks = raw.reshape(-1, 210)
    found = np.empty((len(blocks), 256))
    scales = blocks[:, 192:208].copy().view(np.int8)
    for k in range(256):
        half, within = divmod(k, 128)
        quarter, offset = divmod(within, 32)
        low = blocks[:, half * 64 + within % 64] >> (4 if quarter >= 2 else 0) & 15
        high = blocks[:, 128 + half * 32 + offset] >> (2 * quarter) & 3
        value = (low | high << 4).astype(np.int64) - 32
        found[:, k] = value * scales[:, k // 16] * _half(blocks, 208)
    return found


def _e2m1(bits: np.ndarray) -> _Floats:
    """Decode a sign, two exponent bits and a fraction bit. If the exponent is 0, the fraction counts halves."""
    exponent, fraction = (bits >> 1 & 3).astype(np.float64), (bits & 1).astype(np.float64)
    size = np.where(exponent == 0, fraction / 2, (1 + fraction / 2) * 2 ** (exponent - 1))
    return np.where(bits & 8, -size, size)


def _blocks_of_mxfp4(raw: _Bytes) -> _Floats:
    blocks = raw.reshape(-1, 17)
    numbers = np.concatenate((_e2m1(blocks[:, 1:] & 15), _e2m1(blocks[:, 1:] >> 4)), 1)
    return numbers * np.exp2(blocks[:, :1].astype(np.float64) - 127)


_NUMBERS: dict[str, Callable[[_Bytes], _Floats]] = {
    "F32": lambda raw: raw.view("<f4").astype(np.float64),
    "F16": lambda raw: raw.view("<f2").astype(np.float64),
    "BF16": lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64),
    "Q4_0": _block_of_32(18, 4, has_minimum=False),
    "Q4_1": _block_of_32(20, 4, has_minimum=True),
    "Q5_0": _block_of_32(22, 5, has_minimum=False),
    "Q5_1": _block_of_32(24, 5, has_minimum=True),
    "Q8_0": _q8_0,
    "Q4_K": _k_with_minima(144),
    "Q5_K": _k_with_minima(176),
    "Q6_K": _q6_k,
    "MXFP4": _blocks_of_mxfp4,
}
