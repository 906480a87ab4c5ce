"""Quantised checkpoints for tests, written number by number from the formats' descriptions, and their meaning.

`write(dense, folder, case)` rounds the matrices of a dense checkpoint and stores them as the tools do; beside it lies a
dense checkpoint of the numbers that were stored. Nothing here is used by the code that reads them.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
_OF_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
Stored = dict[str, Tensor]


@dataclass(frozen=True)
class Quantised:
    """A checkpoint, and the same model with its weights written out."""

    path: Path
    meaning: Path  # a dense checkpoint in float32
    weights: dict[str, Tensor]  # module -> float64 [N, K], or of all experts [E, N, K]


_PRODUCTS = ("_proj", "_with_mqa", "in_proj_qkv", "in_proj_z")  # ends of the names of matrices


@dataclass(frozen=True)
class Case:
    """One way of storing a weight [N, K]."""

    store: Callable[..., tuple[Stored, Tensor]]  # (weight, **options) -> tensors by what follows the name, meaning
    settings: dict[str, Any]  # of quantization_config
    options: dict[str, Any] = field(default_factory=dict)
    fused: bool = False  # a model that stores q, k, v as one matrix, and gate and up
    head: bool = False  # the output head as well
    left: tuple[str, ...] = ()  # modules that stay dense, by the end of their names
    family: str | None = None  # whose experts alone are rounded, each part of all of them as one tensor


def write(dense: Path, folder: Path, case: Case) -> Quantised:
    path, meaning = folder / "quantised", folder / "meaning"
    weights, tensors, plain = {}, {}, {}
    for name, tensor in load_file(dense / FILE).items():
        module = name.removesuffix(".weight")
        if case.family is not None and name.endswith(_OF_EXPERTS):
            stored, weights[name] = case.store(tensor.double().transpose(1, 2), seed=0, **case.options)
            tensors |= {f"{name}_{kind}": value.contiguous() for kind, value in stored.items()}
            plain[name] = weights[name].float().transpose(1, 2).contiguous()
            continue
        is_product = module.endswith(_PRODUCTS) or (case.head and module == "lm_head")
        if case.family or not name.endswith(".weight") or not is_product or module.endswith(case.left or ("-",)):
            tensors[name] = plain[name] = tensor.clone()
            continue
        seed = sum(map(ord, module))
        stored, weights[module] = case.store(tensor.double(), seed=seed, **case.options)
        tensors |= {f"{module}.{kind}": value.contiguous() for kind, value in stored.items()}
        plain[name] = weights[module].float()
    for target, content in ((path, tensors), (meaning, plain)):
        shutil.copytree(dense, target)
        save_file(content, target / FILE, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": case.settings}))
    return Quantised(path, meaning, weights)


@dataclass(frozen=True)
class _Rounded:
    """weight = (q - zero) * scale, with q and zero from 0 to 2 ** bits - 1."""

    q: np.ndarray  # int64 [N, K]
    zero: np.ndarray  # int64 [N, groups]
    scale: Tensor  # [N, groups], as stored
    group: np.ndarray  # int64 [K]

    @property
    def meaning(self) -> Tensor:
        zero, scale = torch.from_numpy(self.zero), self.scale.double()
        return (torch.from_numpy(self.q) - zero[:, self.group]).double() * scale[:, self.group]


def _round(
    weight: Tensor, bits: int, size: int, symmetric: bool, dtype: torch.dtype, order: np.ndarray | None
) -> _Rounded:
    """`order`: inputs by falling importance, as act-order puts them into groups."""
    inputs = weight.shape[1]
    size = inputs if size == -1 else size
    place = np.arange(inputs) if order is None else np.argsort(order)
    group = place // size
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    numbers = weight.numpy()
    scales, zeros = [], []
    for index in range(inputs // size):
        part = numbers[:, group == index]
        if symmetric:
            scale = np.abs(part).max(1) / (middle - 0.5)
            zero = np.full(len(part), middle)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / top
            zero = np.clip(np.round(-low / scale), 0, top)
        scales.append(torch.from_numpy(scale).to(dtype))
        zeros.append(zero.astype(np.int64))
    scale, zero = torch.stack(scales, 1), np.stack(zeros, 1)
    q = np.round(numbers / scale.double().numpy()[:, group]) + zero[:, group]
    return _Rounded(np.clip(q, 0, top).astype(np.int64), zero, scale, group)


def _order(inputs: int, seed: int, wanted: bool) -> np.ndarray | None:
    return np.random.default_rng(seed % 3).permutation(inputs) if wanted else None


def _words(numbers: np.ndarray, bits: int) -> Tensor:
    """[R, C] -> int32 [R, C * bits / 32, rounded up]: the first number of a row in the lowest bits."""
    rows, columns = numbers.shape
    in_word = 32 // bits
    words = np.zeros((rows, -(-columns // in_word)), np.uint64)
    for column in range(columns):
        words[:, column // in_word] |= numbers[:, column].astype(np.uint64) << np.uint64(column % in_word * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def gptq(
    weight: Tensor, *, seed: int, bits: int, group_size: int, sym: bool, desc_act: bool, version: int = 1
) -> tuple[Stored, Tensor]:
    """https://github.com/ModelCloud/GPTQModel: inputs packed down the columns, zeros of the first version less one."""
    found = _round(weight, bits, group_size, sym, torch.float16, _order(weight.shape[1], seed, desc_act))
    zeros = _words(found.zero.T, bits)  # [groups, N / n]
    if version == 1:
        ones = sum(1 << place for place in range(0, 32, bits))
        zeros = (zeros.long() - ones).to(torch.int32)  # as one number, which may borrow
    stored = {
        "qweight": _words(found.q, bits).T,  # [K / n, N]
        "qzeros": zeros,
        "scales": found.scale.T,
        "g_idx": torch.from_numpy(found.group).int(),
    }
    return stored, found.meaning


def awq(weight: Tensor, *, seed: int, group_size: int) -> tuple[Stored, Tensor]:
    """AutoAWQ's WQLinear_GEMM: eight outputs in a word, number i of it being output (0 2 4 6 1 3 5 7)[i]."""
    found = _round(weight, 4, group_size, False, torch.float16, None)

    def words(numbers: np.ndarray) -> Tensor:  # [R, N]
        mixed = numbers.reshape(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return _words(mixed.reshape(len(numbers), -1), 4)

    stored = {"qweight": words(found.q.T), "qzeros": words(found.zero.T), "scales": found.scale.T}
    return stored, found.meaning


def packed(
    weight: Tensor, *, seed: int, bits: int, group_size: int, sym: bool, actorder: bool = False
) -> tuple[Stored, Tensor]:
    """compressed-tensors, pack-quantized: numbers are signed, and stored with 2 ** (bits - 1) added."""
    order = _order(weight.shape[1], seed, actorder)
    found = _round(weight, bits, group_size, sym, torch.bfloat16, order)
    stored = {
        "weight_packed": _words(found.q, bits),
        "weight_scale": found.scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        stored["weight_zero_point"] = _words(found.zero.T, bits).T  # [N / n, groups]
    if actorder:
        stored["weight_g_idx"] = torch.from_numpy(found.group).int()
    return stored, found.meaning


def integers(weight: Tensor, *, seed: int, bits: int, strategy: str, sym: bool = True) -> tuple[Stored, Tensor]:
    """compressed-tensors, int-quantized: a number in a byte."""
    found = _round(weight, bits, -1, sym, torch.bfloat16, None)
    if strategy == "tensor":
        scale = (weight.abs().max() / (2 ** (bits - 1) - 0.5)).to(torch.bfloat16)
        numbers = (weight / scale.double()).round().clamp(-128, 127)
        return {"weight": numbers.to(torch.int8), "weight_scale": scale.reshape(1)}, numbers * scale.double()
    middle = 2 ** (bits - 1)
    stored = {"weight": torch.from_numpy(found.q - middle).to(torch.int8), "weight_scale": found.scale}
    if not sym:
        stored["weight_zero_point"] = torch.from_numpy(found.zero - middle).to(torch.int8)
    return stored, found.meaning


def floats(
    weight: Tensor, *, seed: int, block: tuple[int, int] | None = None, name: str = "weight_scale", flat: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Stored, Tensor]:  # fmt: skip
    """float8 with a factor for each block of outputs and inputs; None: one for all."""
    outputs, inputs = weight.shape
    height, width = block or (outputs, inputs)
    height, width = outputs if height == -1 else height, inputs if width == -1 else width
    scale = torch.empty(-(-outputs // height), -(-inputs // width), dtype=dtype)
    values, meaning = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            here = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
            scale[row, column] = weight[here].abs().max() / 448
            values[here] = (weight[here] / scale[row, column].double()).to(torch.float8_e4m3fn)
            meaning[here] = values[here].double() * scale[row, column].double()
    return {
        "weight": values,
        name: scale.reshape(()) if flat else scale.reshape(1) if block is None else scale,
    }, meaning


# The quantiles of a normal distribution in QLoRA's paper (appendix E), and floating point of 4 bits.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0.0, 0.0052, 0.6667, 1.0, 0.3333, 0.5, 0.1667, 0.25, 0.0, -0.0052, -0.6667, -1.0, -0.3333, -0.5, -0.1667, -0.25]


def four_bits(weight: Tensor, *, seed: int, kind: str, nested: bool) -> tuple[Stored, Tensor]:
    """bitsandbytes: blocks of 64 through the whole matrix, two numbers in a byte, the first in the high half."""
    code = torch.tensor(NF4 if kind == "nf4" else FP4)
    flat = weight.flatten()
    count = -(-len(flat) // 64)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    factors = torch.tensor([flat[64 * block : 64 * (block + 1)].abs().max() for block in range(count)]).float()
    stored = {"weight.quant_map": code}
    if nested:
        offset = float(factors.mean())
        map256 = torch.linspace(-1, 1, 256)  # any table will do
        outer = torch.stack([part.abs().max() for part in (factors - offset).split(256)])
        scaled = (factors - offset) / outer[torch.arange(count) // 256]
        places = (scaled.unsqueeze(1) - map256).abs().argmin(1)
        factors = map256[places] * outer[torch.arange(count) // 256] + offset
        stored |= {"weight.absmax": places.to(torch.uint8), "weight.nested_absmax": outer}
        stored["weight.nested_quant_map"] = map256
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        stored["weight.absmax"] = factors
    factor = factors.double()[torch.arange(len(flat)) // 64]
    places = ((flat / factor).unsqueeze(1) - code.double()).abs().argmin(1)
    pairs = places.reshape(-1, 2)
    stored["weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
    text = json.dumps(state).encode()
    stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return stored, (code.double()[places] * factor).reshape(weight.shape)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def mxfp4(weight: Tensor, *, seed: int) -> tuple[Stored, Tensor]:
    """OCP's microscaling formats: 32 numbers of a row share 2 ** (scale - 127); two in a byte, the first in its low
    half."""
    groups = weight.unflatten(-1, (-1, 32))  # [..., K / 32, 32]
    exponents = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True))) - 2
    code = torch.tensor(E2M1, dtype=torch.float64)
    places = (groups * 2.0**-exponents).unsqueeze(-1).sub(code).abs().argmin(-1)
    pairs = places.unflatten(-1, (-1, 2))
    stored = {"blocks": pairs[..., 0] + 16 * pairs[..., 1], "scales": exponents.squeeze(-1) + 127}
    return {kind: value.to(torch.uint8) for kind, value in stored.items()}, (code[places] * 2.0**exponents).flatten(-2)


def _gptq(bits: int, group: int, sym: bool, act: bool, version: int = 1, **more: Any) -> Case:
    options = {"bits": bits, "group_size": group, "sym": sym, "desc_act": act}
    settings = {"quant_method": "gptq", **options, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    return Case(gptq, settings, {**options, "version": version}, **more)


def _compressed(format: str, store: Callable, options: dict, weights: dict, inputs: dict | None = None) -> Case:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": scheme},
                "ignore": ["lm_head"], "quantization_status": "compressed"}  # fmt: skip
    return Case(store, settings, options)


def _packed(bits: int, group: int, sym: bool, actorder: str | None = None) -> Case:
    strategy = "channel" if group == -1 else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": strategy, "dynamic": False}
    weights |= {"group_size": None if group == -1 else group, "actorder": actorder}
    options = {"bits": bits, "group_size": group, "sym": sym, "actorder": actorder == "group"}
    return _compressed("pack-quantized", packed, options, weights)


def _integers(strategy: str, sym: bool = True) -> Case:
    weights = {"num_bits": 8, "type": "int", "symmetric": sym, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return _compressed("int-quantized", integers, {"bits": 8, "strategy": strategy, "sym": sym}, weights, inputs)


def _floats(strategy: str, **options: Any) -> Case:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = list(options["block"])
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return _compressed("float-quantized", floats, options, weights, inputs)


def _fp8(block: tuple[int, int] | None, **options: Any) -> Case:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    if block is None:
        return Case(floats, settings, {"flat": True})
    settings["weight_block_size"] = list(block)  # ty: ignore[invalid-assignment]
    return Case(floats, settings, {"block": block, "name": "weight_scale_inv", **options})


def _bitsandbytes(kind: str, nested: bool) -> Case:
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    settings |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8"}
    return Case(four_bits, settings, {"kind": kind, "nested": nested})


CASES: dict[str, Case] = {
    "gptq-4-32-sym": _gptq(4, 32, True, False),
    "gptq-4-64-asym": _gptq(4, 64, False, False),
    "gptq-4-128-asym-v2": _gptq(4, 128, False, False, 2),
    "gptq-4-32-asym-act": _gptq(4, 32, False, True),
    "gptq-4-64-sym-act-v2": _gptq(4, 64, True, True, 2, left=("0.mlp.up_proj", "1.self_attn.o_proj")),
    "gptq-4-all-sym": _gptq(4, -1, True, False),
    "gptq-8-64-sym": _gptq(8, 64, True, False, head=True),
    "gptq-8-32-asym-act": _gptq(8, 32, False, True),
    "gptq-4-32-fused": _gptq(4, 32, False, False, fused=True),
    "awq-32": Case(awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
                   {"group_size": 32}),
    "awq-64-fused": Case(awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True,
                               "version": "gemm"}, {"group_size": 64}, fused=True),
    "packed-4-32-sym": _packed(4, 32, True),
    "packed-4-64-asym": _packed(4, 64, False, "weight"),
    "packed-4-32-asym-act": _packed(4, 32, False, "group"),
    "packed-8-channel": _packed(8, -1, True),
    "integers-channel": _integers("channel"),
    "integers-tensor": _integers("tensor"),
    "integers-channel-asym": _integers("channel", sym=False),
    "floats-tensor": _floats("tensor"),
    "floats-channel": _floats("channel", block=(1, -1)),
    "floats-block": _floats("block", block=(64, 32)),
    "fp8-block": _fp8((64, 64)),
    "fp8-block-128-bf16": _fp8((128, 128), dtype=torch.bfloat16),
    "fp8-tensor": _fp8(None),
    "nf4": _bitsandbytes("nf4", nested=False),
    "nf4-nested": _bitsandbytes("nf4", nested=True),
    "fp4": _bitsandbytes("fp4", nested=False),
    "mxfp4": Case(mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, family="gpt_oss"),
}  # fmt: skip
