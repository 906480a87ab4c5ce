"""The likely cause of a tensor that differs only in rows with the adapter, or only in rows without it.

The update that a rank has computed is the right update plus the error. It is compared with the updates that faults of
adapters would give: none, another scale, A and B exchanged, other rows or columns, another module's.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import Computation
from oarlock.workers.lora.adapted_modules import EMBEDDING, HEAD
from oarlock.workers.quantization.matmul import ACTIVATIONS, PLAIN_ACTIVATIONS
from oarlock.workers.verify.compare import ColumnRange, Recorded, Tapped, TensorResult, read_by
from oarlock.workers.verify.merged_reference import updates_by_module
from oarlock.workers.verify.request import Text, VerifyRequest
from oarlock.workers.verify.stored_adapter import StoredUpdate

_CLOSE = 0.1  # relative distance below which two updates differ only by rounding
_WRONG = 0.1  # share of the worst row's error above which a row is wrong
_WRONG_EXPERT = 0.01  # likewise, if one of a row's experts is wrong, whose weights differ


class WrongTensor(Protocol):
    """A wrong tensor, and all recordings of the run."""

    @property
    def row(self) -> TensorResult:
        """The tensor's errors."""

    @property
    def folder(self) -> Path:
        """The folder of all recordings."""

    @property
    def spec(self) -> DecoderSpec:
        """The model."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def tapped(self) -> Tapped | None:
        """The tensor in its layer's description; None if it is outside the layers."""

    def part(self, rank: int) -> ColumnRange:
        """Return the columns of the tensor that `rank` should have."""

    def truth(self, rank: int) -> Tensor:
        """Return the true columns of `rank`: float64 [T, columns]."""

    def error(self, rank: int) -> Tensor:
        """Return the error of `rank`: float64 [T, columns]."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """The outputs of an adapted module that a rank has."""

    module: str
    inputs: Tensor  # float64 [n, inputs], of the adapted rows
    update: StoredUpdate
    columns: slice  # of the outputs, on the rank
    others: Mapping[str, StoredUpdate]  # updates of other modules
    size: int  # ranks
    factor: float = 1.0  # the recorded tensor divided by the module's outputs

    def of(self, update: StoredUpdate) -> Tensor:
        """Return the rank's part of another update: float64 [n, columns]."""
        return self.factor * update.of(self.inputs)[:, self.columns]


def adapter_cause(fault: WrongTensor) -> str | None:
    """Return the likely cause if it is the adapter.

    None: there is no adapter, rows without it are wrong too, or the tensor is no result of a module that adapters
    update.
    """
    request, text, modules = VerifyRequest.read(fault.folder), Text.read(fault.folder), _modules(fault)
    if request.adapter is None or not modules:
        return None
    counts = torch.tensor([len(sequence) for sequence in text.inputs()])
    sequences = torch.tensor([request.is_adapted(number) for number in range(len(counts))])
    adapted = sequences.repeat_interleave(counts)  # [T]
    rank = fault.row.wrong_ranks[0]
    rms = fault.error(rank).square().mean(1).sqrt()
    is_infinite = ~rms.isfinite()
    wrong = is_infinite if bool(is_infinite.any()) else rms > _WRONG * rms.max()
    ranks = f"rank{'s' if len(fault.row.wrong_ranks) > 1 else ''} {', '.join(map(str, fault.row.wrong_ranks))}"
    if not bool(wrong[adapted].any()):
        return f"{fault.row.where} on {ranks}: rows without an adapter are updated (their slot, or the rows of a slot)"
    if bool(wrong[~adapted].any()):
        return None
    updates = updates_by_module(Path(request.adapter), fault.spec)
    found = None
    if not bool(is_infinite.any()):  # no other update explains NaN
        found = _wrong_update(fault, modules, adapted, updates, rms)
    if found is None and bool(adapted.all()):
        return None  # without other rows, the model's own weights may be wrong as well
    adapts = [module for module in modules if any(f"{name}.".startswith(f"{module}.") for name in updates)]
    names = " or ".join(adapts or modules)
    if not adapts:
        return f"{names}: the adapter does not update it, and only rows with the adapter are wrong on {ranks}"
    return f"{names}: the adapter's update {found or 'is wrong, or added at another point'}, on {ranks}"


def _wrong_update(
    fault: WrongTensor, modules: list[str], adapted: Tensor, updates: Mapping[str, StoredUpdate], rms: Tensor
) -> str | None:
    """Describe the wrong update of `modules`; None if nothing explains it. `rms`: of each row's error, float64 [T]."""
    rank = fault.row.wrong_ranks[0]
    if len(modules) == 2:
        return _gated(fault, rank, adapted, updates)
    if modules[0] in updates:
        return _of_linear(fault, rank, modules[0], adapted, updates)
    if fault.tapped is not None and fault.tapped.tap.name == "experts":
        return _of_experts(fault, adapted, rms > _WRONG_EXPERT * rms.max())
    return None


def _modules(fault: WrongTensor) -> list[str]:
    """Return the adapted modules whose outputs are in the wrong tensor."""
    found = fault.tapped
    if found is None:
        return {"embedding": [EMBEDDING], "logits": [HEAD]}.get(fault.row.tensor, [])
    inside = f"model.layers.{fault.row.layer}.{found.branch.sublayer.module}"
    match found.tap.computation:
        case Computation.PROJECTION | Computation.SUM:
            return [f"{inside}.{found.tap.module}"]
        case Computation.GATED:
            return [f"{inside}.gate_proj", f"{inside}.up_proj"]
        case Computation.ACTIVATED:
            return [f"{inside}.up_proj"]
        case Computation.EXPERTS:
            return [f"{inside}.{found.tap.module}"]
        case _:
            return []


def _of_linear(
    fault: WrongTensor, rank: int, module: str, adapted: Tensor, updates: Mapping[str, StoredUpdate]
) -> str | None:
    """Describe the wrong update of one module; None if nothing explains it."""
    part, recorded, found = fault.part(rank), Recorded(fault.folder), fault.tapped
    update, others = updates[module], {name: one for name, one in updates.items() if name != module}
    columns, factor, spec = slice(part.start, part.stop), 1.0, fault.spec
    if found is None and module == EMBEDDING:
        ids = torch.tensor([token for sequence in Text.read(fault.folder).inputs() for token in sequence])
        # A column of A for each token: the update for one-hot rows.
        update, inputs = replace(update, a=torch.eye(len(update.a)).double()), update.a[:, ids].T
        factor, others = spec.embedding_scale, {}
    elif found is None:
        if spec.logit_softcap is not None:
            return None
        inputs, factor = recorded.truth("final_norm"), spec.logit_scale
    elif found.tap.computation is Computation.SUM:
        taps = found.branch.sublayer.taps
        name = next(one.name for one in taps if one.is_input and one.module == found.tap.module)
        inputs, factor = recorded.truth(f"{fault.row.layer}.{name}"), found.tap.factor
    else:
        inputs, factor = recorded.truth(read_by(spec, fault.row.layer or 0, found.branch, found.tap)), found.tap.factor
    linear = _Linear(module, inputs[adapted], update, columns, others, fault.size, factor)
    if found is not None and found.tap.computation is Computation.ACTIVATED:
        return _activated(fault, rank, adapted, linear)
    computed = linear.of(update) + fault.error(rank)[adapted]
    return described(computed, linear, is_sum=found is not None and found.tap.computation is Computation.SUM)


def described(computed: Tensor, linear: _Linear, *, is_sum: bool = False) -> str | None:
    """Describe the `computed` update [n, columns] of adapted rows; None if nothing explains it."""
    right = linear.of(linear.update)
    scale = (computed * right).sum().item() / max(right.square().sum().item(), 1e-300)  # B may be zero
    if _distance(computed, scale * right, right) < _CLOSE:
        return _scaled(scale, linear.update)
    for text, other in _candidates(linear):
        if _distance(computed, other, right) < _CLOSE:
            return text
    if is_sum and linear.size > 1 and (text := _shares(computed, linear)):
        return text
    rank, rows = len(linear.update.a), len(computed)
    if computed.shape[1] > 2 * rank and _is_spanned(computed.T, linear.update.b[linear.columns]):
        return "has other values or columns of A"
    if rows > 2 * rank and _is_spanned(computed, linear.inputs @ linear.update.a.T):
        return "has other values or rows of B"
    return None


def _scaled(scale: float, update: StoredUpdate) -> str | None:
    """Describe an update that is `scale` times the right one."""
    own, root = update.scale, math.sqrt(len(update.a))
    if abs(scale) < _CLOSE:
        return "is missing (an empty slot, or rows that belong to no slot)"
    reasons = (
        (1.0, None),
        (-1.0, "is the update of another slot, or of the previous adapter of the slot"),
        (1 / own, "is not scaled (alpha is forgotten)"),
        (own, "is scaled twice"),
        (root, "is scaled by alpha / sqrt(rank) in place of alpha / rank"),
        (1 / root, "is scaled by alpha / rank in place of alpha / sqrt(rank)"),
    )
    for value, reason in reasons:
        if abs(scale - value) < _CLOSE / 2 * abs(value):
            return reason
    return f"is {scale:.3g} times the right one (rank, alpha or their patterns)"


def _candidates(linear: _Linear) -> Iterator[tuple[str, Tensor]]:
    """Yield updates that a fault could give, with their descriptions."""
    update, width = linear.update, linear.columns.stop - linear.columns.start
    outputs, inputs = len(update.b), update.a.shape[1]
    if outputs == inputs:
        yield "has A and B exchanged", linear.of(StoredUpdate(update.scale, update.b.T, update.a.T))
    for first in range(0, outputs - width + 1, width):
        if first != linear.columns.start:
            other = replace(linear, columns=slice(first, first + width))
            yield f"has the rows of B from {first} on, not from {linear.columns.start}", other.of(update)
    for name, other in linear.others.items():
        if other.a.shape[1] == inputs and len(other.b) >= linear.columns.stop:
            yield f"is the update of {name}", linear.of(other)


def _shares(computed: Tensor, linear: _Linear) -> str | None:
    """Describe wrong shares of ranks in the sum over the inputs; None if they do not explain it."""
    update, size = linear.update, linear.size
    cut = linear.inputs.shape[1] // size

    def share(rank: int, of: int) -> Tensor:
        """Return the update from the inputs of `rank` and A's columns of the rank `of`."""
        x, a = (one[:, at * cut : (at + 1) * cut] for one, at in ((linear.inputs, rank), (update.a, of)))
        return linear.factor * update.scale * (x @ a.T) @ update.b.T

    own = [share(rank, rank) for rank in range(size)]
    factors = torch.linalg.lstsq(torch.stack([one.flatten() for one in own], 1), computed.flatten()[:, None]).solution
    right, total = (
        torch.stack(own).sum(0),
        sum(factor * one for factor, one in zip(factors.flatten(), own, strict=True)),
    )
    assert isinstance(total, Tensor)
    if _distance(computed, total, right) < _CLOSE:
        wrong = [(rank, one) for rank, one in enumerate(factors.flatten().tolist()) if abs(one - 1) > _CLOSE]
        return (
            "; ".join(f"has {round(factor, 2) + 0.0:g} times the share of rank {rank}" for rank, factor in wrong)
            or None
        )
    for rank in range(size):
        for other in range(size):
            if other != rank and _distance(computed, right - own[rank] + share(rank, other), right) < _CLOSE:
                return f"has A's columns of rank {other} on rank {rank}"
    return None


def _wrong_updates(update: StoredUpdate) -> Iterator[tuple[str, float]]:
    """Yield factors of an update that faults give, with their descriptions; none if its scale is zero."""
    if not update.scale:
        return
    root = math.sqrt(len(update.a))
    for factor in (0.0, -1.0, 1 / update.scale, update.scale, root, 1 / root):
        if (text := _scaled(factor, update)) is not None:
            yield text, factor


def _gated(fault: WrongTensor, rank: int, adapted: Tensor, updates: Mapping[str, StoredUpdate]) -> str | None:
    """Describe a wrong update before `activation(gate) * up`: compare with the values that each fault would give."""
    found = fault.tapped
    assert found is not None
    inside, layer, part = (
        f"model.layers.{fault.row.layer}.{found.branch.sublayer.module}",
        fault.row.layer,
        fault.part(rank),
    )
    columns, recorded = slice(part.start, part.stop), Recorded(fault.folder)
    inputs = recorded.truth(read_by(fault.spec, layer or 0, found.branch))[adapted]
    gate, truth = recorded.truth(f"{layer}.gate")[adapted][:, columns], fault.truth(rank)[adapted]
    activation = ACTIVATIONS[found.branch.sublayer.activation].function  # ty: ignore[missing-attribute]
    up, computed = truth / activation(gate), truth + fault.error(rank)[adapted]
    right = {name: updates[f"{inside}.{name}"] for name in ("gate_proj", "up_proj") if f"{inside}.{name}" in updates}
    added = {name: one.of(inputs)[:, columns] for name, one in right.items()}
    for names in ([name] for name in right) if len(right) == 1 else (["gate_proj"], ["up_proj"], [*right]):
        for text, factor in _wrong_updates(right[names[0]]):
            change = {name: (factor - 1) * added[name] if name in names else 0.0 for name in ("gate_proj", "up_proj")}
            tried = activation(gate + change["gate_proj"]) * (up + change["up_proj"])
            if _distance(computed, tried, computed - truth) < _CLOSE:
                return f"of {' and '.join(names)} {text}"
    return None


def _of_experts(fault: WrongTensor, adapted: Tensor, wrong: Tensor) -> str | None:
    """Name the experts whose tokens are all wrong; None if they do not explain which tokens are. `adapted`, `wrong`:
    bool [T]."""
    used = Recorded(fault.folder).truth(f"{fault.row.layer}.routing")[adapted] > 0  # [n, experts]
    tokens = wrong[adapted]
    found = [number for number in range(used.shape[1]) if used[:, number].any() and tokens[used[:, number]].all()]
    if not found or not bool(used[tokens][:, found].any(1).all()):
        return None
    return f"of expert{'s' if len(found) > 1 else ''} {', '.join(map(str, found))} is wrong"


def _activated(fault: WrongTensor, rank: int, adapted: Tensor, linear: _Linear) -> str | None:
    """Describe a wrong update before `activation(up)`."""
    found = fault.tapped
    assert found is not None
    projected = next(tap.name for tap in found.branch.sublayer.taps if tap.module == "up_proj")
    up = Recorded(fault.folder).truth(f"{fault.row.layer}.{projected}")[adapted][:, linear.columns]
    activation = PLAIN_ACTIVATIONS[found.branch.sublayer.activation]  # ty: ignore[missing-attribute]
    truth = fault.truth(rank)[adapted]
    computed, right = truth + fault.error(rank)[adapted], linear.of(linear.update)
    for text, factor in _wrong_updates(linear.update):
        if _distance(computed, activation(up + (factor - 1) * right), computed - truth) < _CLOSE:
            return text
    return None


def _distance(computed: Tensor, other: Tensor, size: Tensor) -> float:
    """Return the distance of two updates relative to the norm of `size`."""
    return ((computed - other).norm() / size.norm().clamp_min(1e-30)).item()


def _is_spanned(columns: Tensor, basis: Tensor) -> bool:
    """Return whether `columns` [N, n] are combinations of the columns of `basis` [N, r]."""
    found = torch.linalg.lstsq(basis, columns, driver="gelsd").solution
    return _distance(basis @ found, columns, columns) < _CLOSE
