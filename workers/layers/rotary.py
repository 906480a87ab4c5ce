"""Rotary position embedding: cos and sin once per step from absolute positions, then one rotation per layer.

Rotary embedding: Su et al., "RoFormer", 2021. Frequencies follow transformers' formulas operation by operation, in
float32, so that the angles have the same bits. Element i of a head is rotated with element i + rotary_dim / 2.

Dynamic NTK scaling changes the frequencies with the sequence's length. transformers takes the length at the time of the
call, so that a prompt's angles depend on how the prompt was divided into calls. Here a token's angles depend only on
its own position (length = position + 1): they are the same for whole and chunked prefill, in any batch and with cached
prefixes. They equal transformers' for every prompt within `original_max_positions` and all tokens generated from it,
and differ only if the prompt is longer.

LongRoPE has two sets of factors, chosen for a whole model by the longest sequence it serves (`RopeSpec.for_length`). If
the longest sequence is within the trained length, every sequence has transformers' angles. If it is longer, only
sequences beyond the trained length have transformers' angles, because shorter sequences get the long factors too.
Positions beyond the reach of the short factors raise an error.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.kernels.cpu import elementwise
from oarlock.workers.layers.attention_spec import QueryScale, RopeSpec

# Angles are computed for this many positions at a time. torch computes the last few elements of an array differently,
# so with blocks of equal size the bits of an angle depend only on its position.
_BLOCK = 1024


class RotaryTable:
    """Table of angles: positions [T] -> cos, sin [T, 1, rotary_dim] float32, with the first half of sin negated for
    `rotate`.

    Angles are computed when a sequence first reaches a position, and kept.
    """

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim  # [rotary_dim / 2]
        self.inv_freq = inverse_frequencies(spec, self.exponents)  # [rotary_dim / 2]
        self.rows = torch.empty((0, spec.rotary_dim), dtype=torch.float32, device=device)  # cos of each pair, then sin

    def __call__(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of `positions`. `longest` is passed to `up_to`."""
        cos, sin = self.up_to(longest).index_select(0, positions).unsqueeze(1).chunk(2, -1)  # [T, 1, rotary_dim / 2]
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def up_to(self, longest: int) -> Tensor:
        """Return cos of each pair of elements, then sin, of all positions: [at least `longest`, rotary_dim] float32.

        `longest`: a Python integer larger than every position. Raises `ValueError` if it is beyond LongRoPE's reach.
        """
        self._check_reach(longest)
        if longest > len(self.rows):
            self._grow(max(longest, 2 * len(self.rows)))
        return self.rows

    def _check_reach(self, longest: int) -> None:
        spec = self.spec
        if spec.kind == "longrope" and not spec.stretched and longest > spec.original_max_positions:
            raise ValueError(
                f"a sequence of {longest} tokens is beyond the {spec.original_max_positions} that LongRoPE's short "
                "factors reach; describe the model with `for_length` of the longest sequence"
            )

    def _grow(self, length: int) -> None:
        blocks = [self.rows]
        for start in range(len(self.rows), length, _BLOCK):
            positions = torch.arange(start, start + _BLOCK)
            inv_freq = self._dynamic(positions) if self.spec.kind == "dynamic" else self.inv_freq
            angles = positions.unsqueeze(1).float() * inv_freq
            rows = torch.cat((angles.cos(), angles.sin()), 1) * self.spec.attention_factor
            blocks.append(rows.to(self.device))
        self.rows = torch.cat(blocks)

    def _dynamic(self, positions: Tensor) -> Tensor:
        """Return the inverse frequencies of each position: [T, rotary_dim / 2]."""
        spec = self.spec
        length = (positions + 1).clamp_(min=spec.original_max_positions)
        stretch = (spec.factor * length / spec.original_max_positions) - (spec.factor - 1)
        theta = spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2))  # [T]
        return 1.0 / (theta.unsqueeze(1) ** self.exponents)


class QueryScaleTable:
    """Table of the factors of queries: positions [T] -> float32 [T]. Factors are computed in double precision when a
    sequence first reaches their level, and kept."""

    def __init__(self, spec: QueryScale, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.levels = torch.empty(0, dtype=torch.float32, device=device)

    def __call__(self, positions: Tensor, longest: int) -> Tensor:
        """Return the factors of `positions`. `longest`: a Python integer larger than every position."""
        spec = self.spec
        count = (longest + spec.shift) // spec.period + 1
        if count > len(self.levels):
            made = [1.0 + spec.beta * math.log1p(level) for level in range(max(count, _BLOCK, 2 * len(self.levels)))]
            self.levels = torch.tensor(made, dtype=torch.float32, device=self.device)
        return self.levels.index_select(0, torch.div(positions + spec.shift, spec.period, rounding_mode="floor"))


def finish_heads(
    x: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    norm: tuple[Tensor, float] | None,
    scale: Tensor | None,
    num_scaled: int,
    dtype: torch.dtype,
    *,
    pairs_neighbours: bool = False,
) -> Tensor:
    """Rotate the heads of `x` [T, H, head_dim] of `dtype` or float32, norm each, and scale the first `num_scaled`.

    The result has `dtype` and is contiguous. All steps are in float32, and are rounded once. `angles`: cos and sin, as
    for `rotate`; None: no rotation. `norm`: scale of the norm, float32 [H, head_dim], and its epsilon; None: no norm.
    `scale`: float32 [T], factors of the first heads; None: 1. `pairs_neighbours`: as in `rotate_neighbours`.
    """
    if elementwise.can_serve(dtype, x.device):
        return elementwise.finish_heads(x, angles, norm, scale, num_scaled, dtype, pairs_neighbours=pairs_neighbours)
    y = x.float()
    if angles is not None:
        y = (neighbours_with_torch if pairs_neighbours else rotate_with_torch)(y, *angles, torch.float32)
    if norm is not None:
        weight, eps = norm
        y = F.rms_norm(y, (y.shape[-1],), None, eps) * weight
    if scale is not None:
        y = torch.cat((y[:, :num_scaled] * scale.view(-1, 1, 1), y[:, num_scaled:]), 1)
    return y.to(dtype)


def neighbours_with_torch(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate like `rotate_neighbours` with torch operations, for every dtype and device."""
    return _neighbours(rotate_with_torch, x, cos, sin, dtype)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate pairs of neighbouring elements, 2 i and 2 i + 1; otherwise like `rotate`."""
    return _neighbours(rotate, x, cos, sin, dtype)


def _neighbours(apply_rope: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    size = cos.shape[-1]
    apart = torch.cat((x[..., 0:size:2], x[..., 1:size:2], x[..., size:]), -1)
    rotated = apply_rope(apart, cos, sin, dtype)
    pairs = torch.stack((rotated[..., : size // 2], rotated[..., size // 2 : size]), -1).flatten(-2)
    return torch.cat((pairs, rotated[..., size:]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate the heads of `x` [T, H, head_dim] in float32 and round once, to `dtype`. The result is contiguous."""
    if elementwise.can_serve(dtype, x.device):
        return elementwise.rotate(x, cos, sin, dtype)
    return rotate_with_torch(x, cos, sin, dtype)


def rotate_with_torch(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate like `rotate` with torch operations, for every dtype and device; tests compare the kernel with it."""
    size = cos.shape[-1]
    if size == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(size // 2, -1), sin).to(dtype)
    rotated = rotate_with_torch(x[..., :size], cos, sin, dtype)
    return torch.cat((rotated, x[..., size:].to(dtype)), -1)


def inverse_frequencies(spec: RopeSpec, exponents: Tensor) -> Tensor:
    """Return the angle per position of each pair of elements: [rotary_dim / 2] float32.

    Raises `ValueError` if the kind is unknown.
    """
    inv_freq = 1.0 / (spec.theta**exponents)
    if spec.kind in ("default", "dynamic"):
        return inv_freq
    if spec.kind == "linear":
        return inv_freq / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, inv_freq)
    if spec.kind == "yarn":
        return _yarn(spec, exponents)
    if spec.kind == "longrope":
        factors = spec.long_factors if spec.stretched else spec.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents)
    if spec.kind == "proportional":
        rotates = torch.arange(len(exponents)) < spec.rotated_pairs
        return torch.where(rotates, inv_freq, 0.0) / spec.factor
    raise ValueError(f"unknown rope kind {spec.kind!r}")


def _llama3(spec: RopeSpec, inv_freq: Tensor) -> Tensor:
    """Apply Llama 3.1's scaling: long wavelengths are stretched by the factor, short ones kept, others blended."""
    length = spec.original_max_positions
    longest, shortest = length / spec.low_freq_factor, length / spec.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > longest, inv_freq / spec.factor, inv_freq)
    blend = (length / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - blend) * stretched / spec.factor + blend * stretched
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, stretched)


def _yarn(spec: RopeSpec, exponents: Tensor) -> Tensor:
    """Apply YaRN (Peng et al., 2023): pairs with many turns within the trained length are kept, pairs with few are
    interpolated, with a linear ramp between."""
    size = spec.rotary_dim

    def pair_with(rotations: float) -> float:
        """Return the fractional index of the pair that makes `rotations` turns over the trained length."""
        return (size * math.log(spec.original_max_positions / (rotations * 2 * math.pi))) / (2 * math.log(spec.theta))

    low, high = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    powers = spec.theta**exponents
    return 1.0 / (spec.factor * powers) * (1 - keep) + 1.0 / powers * keep
