"""The weights of a GGUF file as plain numbers, for checking what ranks load and compute.

Written from the format's description (ggml-quants.c and llama.cpp's converter), over whole tensors, group by group. It
shares only the reading of headers and settings with `workers/weights/gguf_*.py`, so that a mistake there shows.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oarlock.workers.errors import StartupError
from oarlock.workers.weights.gguf_model import GGUFModel, Settings

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float64]

_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def dequantised_gguf(path: Path, hf_name: str) -> Tensor:
    """The tensor that a Hugging Face checkpoint has as `hf_name`, e.g. `model.layers.0.mlp.up_proj.weight`: float64.

    `path`: the GGUF file, any part of it, or a directory with a link to it. The heads of Llama's q and k are in Hugging
    Face's order, and Gemma's norms without the 1 that GGUF adds. Raises `StartupError` for a missing tensor.
    """
    if path.is_dir():
        link = sorted(path.glob("*.gguf"))[0]
        path = link.readlink() if link.is_symlink() else link
    model = GGUFModel.open(path)
    architecture = str(model.settings["general.architecture"])
    is_gemma = architecture.startswith("gemma")
    module, _, kind = hf_name.rpartition(".")
    name = f"{_stored_name(module, is_gemma)}.{kind}"
    found = model.tensors.get(name)
    if found is None:
        raise StartupError(f"{path} holds no tensor {name!r}, for {hf_name!r}.", "Use a complete file.")
    entry = found.entry
    raw = np.fromfile(found.path, np.uint8, entry.end - entry.begin, offset=entry.begin)
    numbers = _NUMBERS[entry.dtype](raw).reshape(entry.shape)
    if is_gemma and module.endswith("norm"):
        numbers = numbers - 1.0
    if architecture == "llama":
        numbers = _halves_of_heads(model, module.rpartition(".")[2], numbers)
    return torch.from_numpy(np.ascontiguousarray(numbers))


def _stored_name(module: str, is_gemma: bool) -> str:
    if not module.startswith("model.layers."):
        return _MODULES[module]
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{(_GEMMA_NORMS if is_gemma and inner in _GEMMA_NORMS else _MODULES)[inner]}"


def _halves_of_heads(model: GGUFModel, part: str, numbers: _Floats) -> _Floats:
    """Rows 0, 2, 4 … of each head of q and k first, then rows 1, 3, 5 …"""
    settings = Settings(model)
    q, k = settings.count(".attention.head_count"), settings.count(".attention.head_count_kv")
    if part not in ("q_proj", "k_proj", "qkv_proj"):
        return numbers
    total, stored = {"q_proj": (q, q), "k_proj": (k, k), "qkv_proj": (q + k, q + 2 * k)}[part]
    width = len(numbers) // stored
    order = np.arange(len(numbers))
    for head in range(total):
        rows = order[head * width : (head + 1) * width].copy()
        order[head * width : (head + 1) * width] = np.concatenate((rows[0::2], rows[1::2]))
    return numbers[order]


def _half(blocks: _Bytes, at: int) -> _Floats:
    """The float16 at byte `at` of each block: [B]."""
    return blocks[:, at : at + 2].copy().view(np.float16)[:, 0].astype(np.float64)


def _block_of_32(size: int, bits: int, *, has_minimum: bool) -> Callable[[_Bytes], _Floats]:
    """Q4_0, Q4_1, Q5_0, Q5_1: a scale, perhaps a minimum, perhaps the fifth bits, and 16 bytes of two numbers each."""

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
    """`get_scale_min_k4`: numbers of 6 bits, of which those of groups 4 to 7 lie in two places. uint8 [B, 12]."""
    if group < 4:
        return packed[:, group] & 63, packed[:, group + 4] & 63
    low, high = packed[:, group + 4], packed[:, group - 4] >> 6
    return (low & 15) | high << 4, (low >> 4) | (packed[:, group] >> 6) << 4


def _k_with_minima(size: int) -> Callable[[_Bytes], _Floats]:
    """Q4_K and Q5_K: eight groups of 32, whose scales and minima are multiples of two float16."""

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
        quarter, place = divmod(within, 32)
        low = blocks[:, half * 64 + within % 64] >> (4 if quarter >= 2 else 0) & 15
        high = blocks[:, 128 + half * 32 + place] >> (2 * quarter) & 3
        value = (low | high << 4).astype(np.int64) - 32
        found[:, k] = value * scales[:, k // 16] * _half(blocks, 208)
    return found


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
}
