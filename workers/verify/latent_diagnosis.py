"""Causes of wrong tensors in latent attention: a norm, the rotation, one of the two matrices of a head, the scale of
scores, or the elements of rows that are read as values.

Absorbed queries, and results before the matrices of values, have no counterpart in transformers. Each operation is
computed again in float64 from the rank's own recorded inputs, and compared with the recorded output.
"""

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.tensor_spec import Computation, Tap
from oarlock.workers.verify.adapter_diagnosis import WrongTensor
from oarlock.workers.verify.compare import Recorded, positions_in
from oarlock.workers.verify.dequantised_reference import DequantisedWeights
from oarlock.workers.verify.request import Text

# Relative distance, by dtype, below which a result differs only by rounding from the same operation in float64.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 0.01}
_EXPLAINED = 0.5  # share of a small error, not much larger than rounding, that an explanation may leave


class WrongLatent(WrongTensor, Protocol):
    """A wrong tensor of latent attention, and the model's weights."""

    @property
    def dequantised(self) -> DequantisedWeights:
        """The weights."""

    @property
    def module(self) -> str:
        """The name of the layer."""

    @property
    def ranks(self) -> str:
        """The wrong ranks, in words."""


def latent_cause(fault: WrongLatent, spec: LatentAttentionSpec, tap: Tap) -> str:
    """Return the likely cause, for the norm of a latent, for rotated elements, or for the input of `o_proj`."""
    found = _OneRank(fault, spec)
    if tap.computation is Computation.NORM:
        return _norm(found, tap)
    return _rotation(found) if tap.computation is Computation.ROTATION else _attention(found)


class _Matrices(NamedTuple):
    """One matrix of each head."""

    right: Tensor  # float64 [H, outputs, inputs]
    exchanged: Tensor  # if the rows for keys and for values were stored in the other order


class _OneRank:
    """The recorded tensors of the first wrong rank."""

    def __init__(self, fault: WrongLatent, spec: LatentAttentionSpec) -> None:
        self.fault, self.spec = fault, spec
        self.rank, self.layer = fault.row.wrong_ranks[0], fault.row.layer or 0
        self.heads = spec.num_heads // fault.size
        self.first = self.rank * self.heads
        self.inside = f"{fault.module}.{spec.module}"
        self._recorded = Recorded(fault.folder)
        self.tolerance = _TOLERANCE[self._recorded.ours(self.rank, fault.row.name).dtype]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the layer: float64 [T, columns]."""
        return self._recorded.ours(self.rank, f"{self.layer}.{name}").double()

    def by_head(self, name: str) -> Tensor:
        """Return a tensor of the layer with heads: float64 [T, heads, width]."""
        return self.tensor(name).unflatten(1, (self.heads, -1))

    def true_heads(self, name: str) -> Tensor:
        """Return the rank's heads in transformers' tensor: float64 [T, heads, width]."""
        whole = self._recorded.truth(f"{self.layer}.{name}").unflatten(1, (self.spec.num_heads, -1))
        return whole[:, self.first : self.first + self.heads]

    def true(self, name: str) -> Tensor:
        """Return transformers' tensor: float64 [T, columns]."""
        return self._recorded.truth(f"{self.layer}.{name}")

    def matrices(self) -> tuple[_Matrices, _Matrices]:
        """Return the matrices of all heads from queries to the latent, and from the latent to values."""
        both = self.fault.dequantised.weight(f"{self.inside}.kv_b_proj").double()
        rows = both.unflatten(0, (self.spec.num_heads, -1))  # [H, nope_width + value_dim, kv_rank]
        keys, values = rows.split([self.spec.nope_width, self.spec.value_dim], 1)
        first, last = rows.split([self.spec.value_dim, self.spec.nope_width], 1)
        return _Matrices(keys.transpose(1, 2), last.transpose(1, 2)), _Matrices(values, first)

    def stored(self, kind: str) -> str:
        """Return the tensor that stores the matrices of keys ("k") or of values ("v")."""
        return f"{self.inside}.{kind if self.spec.splits_kv_b else 'kv'}_b_proj.weight"

    def are_equal(self, ours: Tensor, other: Tensor) -> bool:
        """Return whether two tensors differ only by rounding. NaN equals nothing."""
        return bool((ours - other).norm() <= self.tolerance * other.norm())

    @property
    def where(self) -> str:
        return f"attention of layer {self.layer} on {self.fault.ranks}"


def _norm(found: _OneRank, tap: Tap) -> str:
    name, is_of_queries = f"{found.inside}.{tap.module}", tap.name == "q_latent"
    before = found.tensor("q_a" if is_of_queries else "kv_a")[:, : tap.width]
    ours, on_ranks = found.tensor(tap.name), f"on {found.fault.ranks}"
    if found.are_equal(ours, before):
        return f"{name}: left out {on_ranks}"
    unit = before * torch.rsqrt(before.square().mean(1, keepdim=True) + found.spec.eps)
    right = unit * found.fault.dequantised.other(f"{name}.weight").double() * tap.factor
    factor = ((ours * right).sum() / right.square().sum()).item()
    if not found.are_equal(ours, right) and found.are_equal(ours, factor * right):
        return f"{name}: its results {on_ranks} are {factor:.3g} times the right ones"
    # A wrong weight scales an element by the same factor for all tokens.
    weight = (ours * unit).sum(0) / unit.square().sum(0)
    unexplained = (ours - unit * weight).norm()
    is_weight = bool(unexplained < _EXPLAINED * (ours - right).norm())
    return f"{name}: {'its weight' if is_weight else 'the norm itself'} {on_ranks}"


def _rotation(found: _OneRank) -> str:
    """Describe a wrong rotation: its elements, pairs, direction or factor, if one explains the values."""
    spec, letter = found.spec, found.fault.row.tensor[0]
    what = f"rotary embedding of {letter} in layer {found.layer} on {found.fault.ranks}"
    if spec.rope is None:
        return f"{letter} of layer {found.layer} on {found.fault.ranks}: rotated, in a layer without rotary embedding"
    if letter == "q":
        ours, projected = found.by_head("q_rope"), found.by_head("q")
        truth, true_projected = found.true_heads("q_rope"), found.true_heads("q")
    else:
        ours, projected, truth, true_projected = (
            each.unsqueeze(1)
            for each in (found.tensor("k_rope"), found.tensor("kv_a"), found.true("k_rope"), found.true("kv_a"))
        )
    interleaved = spec.rope.interleaved
    turns = _turns(true_projected[..., -spec.rope_width :], truth, interleaved=interleaved)
    for text, values in _other_rotations(projected, turns, spec):
        if found.are_equal(ours, values):
            return f"{what}: {text}"
    own = _turns(projected[..., -spec.rope_width :], ours, interleaved=interleaved)
    turned = _turned(projected[..., -spec.rope_width :], own, interleaved=interleaved)
    if found.are_equal(turned, ours) and (cause := _other_turns(found, turns, own)):
        return f"{what}: {cause}"
    positions, _ = positions_in(found.fault.folder)
    wrong = (ours - truth).flatten(1).norm(dim=1)
    is_right = bool((wrong[positions == 0] < 0.1 * wrong.max()).all())
    return f"{what} ({'position 0, which is not rotated, is right' if is_right else 'even at position 0'})"


def _other_turns(found: _OneRank, turns: Tensor, own: Tensor) -> str:
    """Describe the difference between the factors of pairs, complex [T, 1, n], that a rotation has, and the right ones
    `turns`; "" if `own` is no rotation."""
    positions, _ = positions_in(found.fault.folder)
    factor, right = own.abs().mean(), turns.abs().mean().item()
    if not found.are_equal(own.abs(), factor.expand_as(own)):
        return ""
    parts = []
    if not math.isclose(factor.item(), right, rel_tol=found.tolerance / 4):
        parts.append(f"its factor is {factor.item():.4g}, not {right:.4g}")
    wrong = (own / own.abs() - turns / turns.abs()).abs() > found.tolerance  # [T, 1, n]
    if wrong.any():
        of, count = wrong.any(0).flatten().nonzero().flatten().tolist(), wrong.shape[2]
        which = "all pairs turn" if len(of) == count else f"pairs {', '.join(map(str, of))} of {count} turn"
        at_start = bool(wrong[positions == 0].any())
        why = "even at position 0" if at_start else "the base or the scaling of frequencies, or positions"
        parts.append(f"{which} by other angles ({why})")
    return "; ".join(parts)


def _other_rotations(projected: Tensor, turns: Tensor, spec: LatentAttentionSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield rotations that a fault could give of `projected` [T, heads, width], with their descriptions."""
    assert spec.rope is not None
    width, interleaved = spec.rope_width, spec.rope.interleaved
    right = projected[..., -width:]
    yield "left out", right
    pairs = "two halves in place of neighbours" if interleaved else "neighbours in place of two halves"
    yield f"it pairs {pairs}", _turned(right, turns, interleaved=not interleaved)
    yield "it rotates backwards", _turned(right, turns.conj(), interleaved=interleaved)
    factor = turns.abs().mean().item()
    if not math.isclose(factor, 1.0, rel_tol=1e-3):
        yield f"its factor of {factor:.3g} is left out", _turned(right, turns / turns.abs(), interleaved=interleaved)
    for start in range(0, projected.shape[-1] - width, width):
        values = _turned(projected[..., start : start + width], turns, interleaved=interleaved)
        yield f"it rotates elements {start} to {start + width - 1} of the projection, not the last {width}", values


def _pairs(x: Tensor, *, interleaved: bool) -> Tensor:
    """Return the rotated pairs of `x` [..., 2 n] as complex numbers [..., n]."""
    apart = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    return torch.view_as_complex(apart.contiguous())


def _turns(plain: Tensor, rotated: Tensor, *, interleaved: bool) -> Tensor:
    """Return the factor of each pair of a token: complex [T, 1, n], from [T, heads, 2 n] before and after it."""
    before, after = (_pairs(x, interleaved=interleaved) for x in (plain, rotated))
    return (before.conj() * after).sum(1, keepdim=True) / before.abs().square().sum(1, keepdim=True)


def _turned(x: Tensor, turns: Tensor, *, interleaved: bool) -> Tensor:
    """Multiply the pairs of `x` [T, heads, 2 n] by `turns`."""
    pairs = torch.view_as_real(_pairs(x, interleaved=interleaved) * turns)  # [T, heads, n, 2]
    return (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)


def _attention(found: _OneRank) -> str:
    """Describe the first wrong operation: the matrices of keys, attention, the matrices of values, or the gate."""
    keys, values = found.matrices()
    queries = found.by_head("q")[..., : found.spec.nope_width]
    absorbed, attended = found.by_head("absorbed"), found.by_head("attended")
    if cause := _wrong_heads(found, queries, absorbed, keys):
        return f"{found.stored('k')}: the matrices of keys on {found.fault.ranks}, {cause}"
    if cause := _wrong_attention(found, absorbed, attended):
        return f"{found.where}: {cause}"
    mixed, own = found.by_head("attention"), slice(found.first, found.first + found.heads)
    ungated = torch.einsum("thr,hvr->thv", attended, values.right[own])
    if found.spec.output_gate:
        gates = found.tensor("attention_gate").unsqueeze(2)  # [T, heads, 1]
        if found.are_equal(mixed, ungated):
            return f"{found.where}: the gate on its result is left out"
        if found.are_equal(mixed, ungated * gates):
            return f"{found.where}: the gate on its result is not a sigmoid of the projection"
        mixed = mixed / torch.sigmoid(gates)
    if cause := _wrong_heads(found, attended, mixed, values):
        return f"{found.stored('v')}: the matrices of values on {found.fault.ranks}, {cause}"
    errors = {
        "the matrices of keys": _distance(absorbed, torch.einsum("thn,hrn->thr", queries, keys.right[own])),
        "attention to the rows": _distance(attended, _attended_by(found, absorbed, _scale(found.spec))),
        "the matrices of values": _distance(mixed, ungated),
    }
    worst = max(errors, key=errors.__getitem__)
    return (
        f"{found.where}: no operation is off by more than {found.tolerance:.2%} for the rank's own inputs, and "
        f"{worst} by most ({errors[worst]:.2%})"
    )


def _distance(ours: Tensor, other: Tensor) -> float:
    return ((ours - other).norm() / other.norm()).item()


def _wrong_heads(found: _OneRank, inputs: Tensor, outputs: Tensor, matrices: _Matrices) -> str:
    """Describe the heads of which `outputs` [T, heads, N] are not `inputs` [T, heads, K] times their matrices; "" if
    there are none."""
    right = matrices.right
    wrong = []
    for head, (x, y) in enumerate(zip(inputs.unbind(1), outputs.unbind(1), strict=True), found.first):
        if not found.are_equal(y, x @ right[head].T):
            wrong.append((head, x, y))
    if not wrong:
        return ""
    if all(found.are_equal(y, x @ matrices.exchanged[head].T) for head, x, y in wrong):
        return "which are read from the rows of the other kind of matrices"
    head, x, y = wrong[0]
    of = next((one for one, matrix in enumerate(right) if found.are_equal(y, x @ matrix.T)), None)
    numbers = f"head{'s' if len(wrong) > 1 else ''} {', '.join(str(one) for one, _, _ in wrong)}"
    return numbers if of is None else f"{numbers} (its head {head} has the matrix of head {of})"


def _wrong_attention(found: _OneRank, absorbed: Tensor, attended: Tensor) -> str:
    """Describe wrong results `attended` [T, heads, kv_rank] of `absorbed` queries; "" if they are right."""
    spec, scale = found.spec, _scale(found.spec)
    right = _attended_by(found, absorbed, scale)
    pairs = zip(attended, right, strict=True)
    wrong = torch.tensor([not found.are_equal(ours, other) for ours, other in pairs])  # [T]
    if not bool(wrong.any()):
        return ""
    factor = _fitted_scale(found, absorbed, attended)
    if found.are_equal(attended, _attended_by(found, absorbed, factor)):
        reasons = (f" ({text})" for text, other in _other_scales(spec) if math.isclose(factor, other, rel_tol=0.01))
        return f"the scale of scores is {factor:.4g}, not {scale:.4g}{next(reasons, '')}"
    if found.are_equal(attended, _attended_by(found, absorbed, scale, spec.rope_width)):
        return f"values are the last {spec.kv_rank} elements of rows, not the first"
    if found.are_equal(attended, _attended_by(found, absorbed, scale, -spec.rope_width)):
        return "values are rotated keys and the first elements of the latent, not the whole latent"
    positions, generated = positions_in(found.fault.folder)
    if bool(generated.any()) and not bool(wrong[~generated].any()):
        return "reading KV pages back (prompts are right, the tokens generated after them are not)"
    if not bool(wrong[positions == 0].any()):
        return "scale, mask or the order of KV pages (a first token, which sees itself only, is right)"
    return "the elements of rows in the KV pages, or which of them are values"


def _scale(spec: LatentAttentionSpec) -> float:
    return spec.scale * spec.query_factor


def _fitted_scale(found: _OneRank, absorbed: Tensor, attended: Tensor) -> float:
    """Return the scale of scores whose results are closest to `attended`, found by Gauss-Newton steps of its
    logarithm."""
    log, step = math.log(_scale(found.spec)), 1e-4
    for _ in range(8):
        now, near = (_attended_by(found, absorbed, math.exp(one)) for one in (log, log + step))
        slope = (near - now) / step
        log += (((attended - now) * slope).sum() / slope.square().sum()).clamp(-1, 1).item()
    return math.exp(log)


def _other_scales(spec: LatentAttentionSpec) -> Iterator[tuple[str, float]]:
    """Yield scales of scores that a fault could give, with their descriptions."""
    plain = spec.query_width**-0.5
    yield "YaRN's factor is left out", plain
    yield "YaRN's factor is not squared", math.sqrt(plain * spec.scale) * spec.query_factor
    yield "the factor of queries is left out", spec.scale
    yield "that of the elements which are not rotated", spec.nope_width**-0.5
    yield "that of rows", spec.key_width**-0.5


def _attended_by(found: _OneRank, absorbed: Tensor, scale: float, shift: int = 0) -> Tensor:
    """Attend with `absorbed` queries to the rank's own rows: [T, heads, kv_rank]. `shift`: of the elements of rows that
    are values, which follow one another in a circle."""
    spec = found.spec
    queries = torch.cat((absorbed, found.by_head("q_rope")), 2)
    rows = torch.cat((found.tensor("latent"), found.tensor("k_rope")), 1)  # [T, kv_rank + rope_width]
    lengths = [len(sequence) for sequence in Text.read(found.fault.folder).inputs()]
    return _attended(queries, rows, scale, rows.roll(-shift, 1)[:, : spec.kv_rank], lengths)


def _attended(queries: Tensor, rows: Tensor, scale: float, values: Tensor, lengths: list[int]) -> Tensor:
    """Attend with `queries` [T, heads, D] to `rows` [T, D] and `values` [T, V] of earlier tokens and of the token
    itself, in sequences of `lengths`: [T, heads, V]."""
    parts = []
    for start, end in pairwise(accumulate(lengths, initial=0)):
        scores = torch.einsum("qhd,cd->hqc", queries[start:end], rows[start:end]) * scale
        hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(2)
        parts.append(torch.einsum("hqc,cv->qhv", weights, values[start:end]))
    return torch.cat(parts)
