"""The likely cause of the first tensor that differs: the weight, norm, scale or collective, and the ranks.

All tensors before it are right, so the fault is in the operation that computes it. The table in docs/accuracy.md lists
how possible causes are distinguished.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, SublayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.layer_input_spec import LayerInputSpec, LayerInputTable
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.layers.mlp_spec import MLPSpec
from oarlock.workers.layers.sharding import shard_vocab
from oarlock.workers.layers.tensor_spec import Computation, Tap
from oarlock.workers.quantization.formats.weight_format import Arithmetic
from oarlock.workers.quantization.matmul import PLAIN_ACTIVATIONS
from oarlock.workers.verify.adapter_diagnosis import adapter_cause
from oarlock.workers.verify.compare import (
    ColumnRange,
    Recorded,
    Tapped,
    TensorResult,
    VerifyResults,
    columns_of,
    positions_in,
    read_by,
    tapped,
)
from oarlock.workers.verify.dequantised_reference import DequantisedWeights, dequantised_weights, expert_result
from oarlock.workers.verify.halves import same_bits
from oarlock.workers.verify.latent_diagnosis import latent_cause
from oarlock.workers.verify.recurrent_diagnosis import RecurrentSpec, WrongPart, slot_cause, weights_of
from oarlock.workers.verify.request import Text, VerifyRequest
from oarlock.workers.verify.wrong_scales import wrong_scales

# Tensors of one sublayer with the same inputs: if one is wrong, others may be wrong independently.
_TOGETHER = (Computation.PROJECTION, Computation.ROTATION)
_CLOSE = 0.1  # relative distance below which two tensors differ only by rounding, accumulated over all layers


@dataclass(frozen=True, slots=True)
class _Fault:
    """A wrong tensor, and all recordings of the run."""

    row: TensorResult
    folder: Path
    model: Path
    spec: DecoderSpec
    size: int
    quantization: str

    @property
    def dequantised(self) -> DequantisedWeights:
        return dequantised_weights(self.model, self.quantization)

    @property
    def tapped(self) -> Tapped | None:
        """The tensor in its layer's description; None if it is outside the layers."""
        return None if self.row.layer is None else tapped(self.spec, self.row.layer, self.row.tensor)

    def part(self, rank: int) -> ColumnRange:
        """Return the columns of the tensor that `rank` should have."""
        return columns_of(self.row.tensor, self.spec, rank, self.size, self.row.layer)

    @property
    def module(self) -> str:
        return f"model.layers.{self.row.layer}"

    @property
    def ranks(self) -> str:
        return _ranks(self.row.wrong_ranks)

    def truth(self, rank: int, name: str | None = None) -> Tensor:
        """Return the true columns of `rank`, by default of this tensor: float64 [T, columns]."""
        part = self.part(rank)
        return Recorded(self.folder).truth(name or self.row.name)[:, part.start : part.stop]

    def ours(self, rank: int, suffix: str = "") -> Tensor:
        """Return float64 [T, columns of `rank`, possibly followed by padding]. `suffix`: end of a diagnostic tensor's
        name."""
        return Recorded(self.folder).ours(rank, self.row.name + suffix).double()

    def partial(self, rank: int) -> Tensor:
        """Return a rank's result before the all-reduce: float64 [T, hidden]."""
        is_recorded = self.size > 1 or VerifyRequest.read(self.folder).adapter is not None
        return self.ours(rank, "_partial" if is_recorded else "")

    def error(self, rank: int) -> Tensor:
        """Return the error as [T, columns of `rank`]."""
        truth = self.truth(rank)
        return self.ours(rank)[:, : truth.shape[1]] - truth

    def wrong_tokens(self) -> Tensor:
        """Return a mask of the wrong tokens on the first wrong rank, bool [T]: error above a tenth of the worst
        token's."""
        rms = self.error(self.row.wrong_ranks[0]).square().mean(1).sqrt()
        return rms > 0.1 * rms.max()

    def is_constant(self) -> bool:
        """Return whether the error is the same for every token on all wrong ranks. A wrong bias has this effect, a
        wrong weight does not."""
        return all(_is_constant(self.error(rank)) for rank in self.row.wrong_ranks)


def explain(
    comparison: VerifyResults, folder: Path, model: Path, spec: DecoderSpec, size: int, quantization: str = "none"
) -> list[str]:
    """Return one sentence per likely cause of the first fault; empty if there is none.

    `folder` has the recordings, `model` the checkpoint.
    """
    first = comparison.first_fault
    if first is None and comparison.different_halves:
        half = comparison.different_halves[0]
        return [
            f"the call that computes the {half.half} half of layer {half.layer} (csrc/layer.cpp), or an all-reduce "
            "in it: each operation separately is right"
        ]
    if first is None:
        if all(token.result == "ok" for token in comparison.tokens):
            return []
        return ["every tensor is right and a chosen token is not: the sampler, or the gathering of logits for it"]
    rows = [first]
    found = None if first.layer is None else tapped(spec, first.layer, first.tensor)
    if found is not None and found.tap.computation in _TOGETHER:
        of_layer = [row for row in comparison.rows if row.layer == first.layer]
        wrong = {row.tensor for row in of_layer if row.result != "ok"}  # tensors derived from these are wrong as well
        taps = [tap for tap in found.branch.sublayer.taps if tap.reads not in wrong]
        group = {tap.name for tap in taps if tap.computation is found.tap.computation}
        rows = [row for row in of_layer if row.tensor in group]
    causes = []
    for row in rows:
        if row.wrong_ranks:
            is_infinite = any(math.isinf(error.ratio) for error in row.errors)
            cause = _cause(_Fault(row, folder, model, spec, size, quantization))
            causes.append(f"{cause}; the values are NaN or infinite" if is_infinite else cause)
        elif not row.ranks_agree:
            ours = [Recorded(folder).ours(rank, row.name) for rank in range(size)]
            others = tuple(rank for rank in range(1, size) if not same_bits(ours[0], ours[rank]))
            have = f"{_ranks(others)} {'has' if len(others) == 1 else 'have'} other bits than rank 0"
            causes.append(f"{row.where}: {have}, {_of_all_ranks(row, spec)}")
    return causes


def _of_all_ranks(row: TensorResult, spec: DecoderSpec) -> str:
    """Describe how all ranks get the tensor `row`: from an all-reduce, or each from its own copy of the weights."""
    alike = (Computation.NORM, Computation.PROJECTION, Computation.ROTATION, Computation.LOGITS, Computation.ROUTING)
    is_alike = row.layer is not None and tapped(spec, row.layer, row.tensor).tap.computation in alike
    return "although each computes all of it from equal inputs" if is_alike else "after the all-reduce"


def _cause(fault: _Fault) -> str:
    if (cause := adapter_cause(fault)) is not None:
        return cause
    found = fault.tapped
    if found is None:
        match fault.row.tensor:
            case "embedding":
                return _embedding(fault)
            case "final_norm":
                return "model.norm.weight, or the final norm itself" if fault.spec.norm.weight else "the final norm"
            case _:
                return _logits(fault)
    tap, branch = found.tap, found.branch
    match tap.computation:
        case Computation.NORM | Computation.ROTATION | Computation.ATTENTION if _is_of_latents(branch.sublayer, tap):
            return latent_cause(fault, branch.sublayer, tap)
        case Computation.NORM:
            parts = "its weight, or the norm itself" if fault.spec.norm.weight else "the norm itself"
            return f"{fault.module}.{tap.module}: {parts}"
        case Computation.RESIDUAL:
            return _residual(fault, branch)
        case Computation.PROJECTION:
            return _projection(fault, branch, tap)
        case Computation.ROTATION:
            return _rotation(fault, branch.sublayer, tap)
        case Computation.ATTENTION:
            return _attention(fault, branch.sublayer)
        case Computation.GATED:
            return _gated(fault, branch.sublayer)
        case Computation.ACTIVATED:
            return _activated(fault, branch.sublayer)
        case Computation.CONVOLUTION | Computation.RECURRENCE:
            return _recurrent(fault, branch.sublayer)
        case Computation.GATED_NORM if isinstance(branch.sublayer, Mamba2Spec) and branch.sublayer.eps is None:
            return _recurrent(fault, branch.sublayer)  # only a gate follows it
        case Computation.GATED_NORM:
            norm = next(one.module for one in branch.sublayer.taps if one.computation is Computation.RECURRENCE)
            return f"{fault.module}.{branch.sublayer.module}.{norm}: its weight, the norm itself, or the gate after it"
        case Computation.SUM:
            return _row_parallel(fault, branch, tap)
        case Computation.LOGITS:
            return _router(fault, branch.sublayer)
        case Computation.ROUTING:
            return _routing(fault, branch.sublayer)
        case Computation.EXPERTS:
            return _experts(fault, branch, tap)


def _is_of_latents(sublayer: SublayerSpec, tap: Tap) -> TypeGuard[LatentAttentionSpec]:
    """Return whether `tap` is inside latent attention, and not the norm before it."""
    return isinstance(sublayer, LatentAttentionSpec) and tap in sublayer.taps


def _embedding(fault: _Fault) -> str:
    """Find the wrong rows of the table, and so the ranks, from the ids of the wrong tokens."""
    if fault.spec.positions is not None and _is_by_position(fault):
        return "model.embed_positions.weight: its rows, the row of position 0, or their addition to the embedding"
    tokens = [token for sequence in Text.read(fault.folder).inputs() for token in sequence]
    local = shard_vocab(fault.spec.vocab_size, 0, fault.size)[1]
    owners = {token // local for token, wrong in zip(tokens, fault.wrong_tokens().tolist(), strict=True) if wrong}
    return f"model.embed_tokens.weight: the rows of {_ranks(tuple(sorted(owners)))}, or the all-reduce after it"


def _is_by_position(fault: _Fault) -> bool:
    """Return whether different tokens at one position have the same error, of positions that several prompts have."""
    positions, _ = positions_in(fault.folder)
    error, counts = fault.error(fault.row.wrong_ranks[0]), positions.bincount()
    sums = error.new_zeros(len(counts), error.shape[1]).index_add_(0, positions, error)
    means, is_shared = (sums / counts.unsqueeze(1))[positions], counts[positions] > 1
    return bool((error - means)[is_shared].norm() < _CLOSE * means[is_shared].norm())


def _projection(fault: _Fault, branch: BranchSpec, tap: Tap) -> str:
    name = f"{fault.module}.{branch.sublayer.module}.{tap.module}"
    if fault.is_constant():
        return (
            f"{name}.bias: the rows of {fault.ranks} (the error is the same for every token: a bias lost, doubled, or "
            "another's)"
        )
    rank = fault.row.wrong_ranks[0]
    if not tap.parts:  # every rank has all rows
        rms = fault.error(rank).square().mean(0).sqrt()
        rows = (~(rms <= _CLOSE * rms.max())).nonzero().flatten().tolist()
        which = f"row {rows[0]}" if len(rows) == 1 else f"rows from {rows[0]} to {rows[-1]}"
        wrong = f"{'' if len(rows) == len(rms) else f': {which}'} on {fault.ranks}"
        scales = _scales(fault, branch, tap, rank)
        return f"{name}.weight{wrong}{f' ({scales})' if scales else ''}"
    moved = _moved_heads(fault, rank) or _scales(fault, branch, tap, rank)
    return f"{name}.weight: the rows of {fault.ranks}{f' ({moved})' if moved else ''}"


def _scales(fault: _Fault, branch: BranchSpec, tap: Tap, rank: int) -> str:
    """Describe wrong scales among the rows of a column-parallel weight on a rank; "" if there are none."""
    dequantised, module = fault.dequantised, f"{fault.module}.{branch.sublayer.module}.{tap.module}"
    if not dequantised.has(module) or dequantised.arithmetic(module) is Arithmetic.DENSE:
        return ""
    part = fault.part(rank)
    inputs = Recorded(fault.folder).truth(read_by(fault.spec, fault.row.layer or 0, branch, tap))
    return wrong_scales(inputs, dequantised.weight(module).double()[part.start : part.stop], fault.ours(rank)) or ""


def _moved_heads(fault: _Fault, rank: int) -> str:
    """Describe the heads of a rank that have another head's values, as happens if a shard is cut at a wrong offset."""
    part = fault.part(rank)
    heads = Recorded(fault.folder).truth(fault.row.name).split(part.group, 1)
    found = []
    for head, ours in enumerate(fault.ours(rank).split(part.group, 1), part.start // part.group):
        nearest = _nearest(ours, heads)
        if nearest not in (None, head):
            found.append(f"its head {head} has the values of head {nearest}")
    return "; ".join(found)


def _rotation(fault: _Fault, attention: SublayerSpec, tap: Tap) -> str:
    """Describe a wrong rotation. Position 0 is rotated by no angle, so an error there comes from the norm before it."""
    assert isinstance(attention, SelfAttentionSpec)
    letter = fault.row.tensor[0]
    positions, _ = positions_in(fault.folder)
    at_start = bool(fault.wrong_tokens()[positions == 0].any())
    if letter == "q" and attention.query_scale is not None and (factors := _wrong_query_scale(fault)):
        return f"query scale of layer {fault.row.layer} on {fault.ranks} (queries are {factors} times the right ones)"
    if tap.module and at_start:
        normed = "rows" if attention.norms_rows else "heads"
        return f"{fault.module}.{attention.module}.{tap.module}: its weight, or the norm of {normed} itself"
    if attention.clip_qkv is not None and at_start:
        limit = f"its limit of {attention.clip_qkv:g}, or the rotary embedding"
        return f"{letter} of layer {fault.row.layer} on {fault.ranks}: {limit}"
    if attention.rope is None:
        return f"{letter} of layer {fault.row.layer} on {fault.ranks}: rotated, in a layer without rotary embedding"
    but = "even at position 0" if at_start else "position 0, which is not rotated, is right"
    return f"rotary embedding of {letter} in layer {fault.row.layer} on {fault.ranks} ({but})"


def _wrong_query_scale(fault: _Fault) -> str:
    """Return the range of factors if every wrong query is a multiple of the right one, which a wrong query scale would
    cause; else an empty text."""
    factors = []
    for rank in fault.row.wrong_ranks:
        truth = fault.truth(rank)
        ours = fault.ours(rank)[:, : truth.shape[1]]
        factor = (ours * truth).sum(1, keepdim=True) / truth.square().sum(1, keepdim=True)  # [T, 1]
        if not (ours - factor * truth).norm() < _CLOSE * (ours - truth).norm():
            return ""
        factors.append(factor)
    found = torch.cat(factors)
    return f"{found.min():.2g} to {found.max():.2g}"


def _attention(fault: _Fault, attention: SublayerSpec) -> str:
    assert isinstance(attention, SelfAttentionSpec)
    where = f"attention of layer {fault.row.layer} on {fault.ranks}"
    positions, generated = positions_in(fault.folder)
    wrong, window = fault.wrong_tokens(), attention.span
    if attention.output_gate and (gate := _wrong_gate(fault, attention)):
        return f"{where}: the gate on its result {gate}"
    if window is not None and not bool(wrong[positions < window].any()):
        what = "sliding window" if attention.chunk is None else "chunks"
        return f"{where}: the {what} of {window} tokens (only later tokens are wrong)"
    if bool(generated.any()) and not bool(wrong[~generated].any()):
        return f"{where}: reading KV pages back (prompts are right, the tokens generated after them are not)"
    if attention.sinks and (heads := _heads_of_wrong_sinks(fault)):
        return (
            f"{fault.module}.{attention.module}.sinks: {_numbered('head', heads)} (its results are multiples of the "
            "right ones: a sink lost, counted twice, or another's)"
        )
    if not bool(wrong[positions == 0].any()):
        return (
            f"{where}: scale, softcap, mask or the order of KV pages (a first token, which sees itself only, is right)"
        )
    return f"{where}: which KV head a query head reads, or the values in the KV pages"


def _wrong_gate(fault: _Fault, attention: SelfAttentionSpec) -> str:
    """Describe a gate that is left out or is the projection itself; an empty text if neither explains the values."""
    rank = fault.row.wrong_ranks[0]
    truth, part = fault.truth(rank), fault.part(rank)
    gates = Recorded(fault.folder).truth(f"{fault.row.layer}.attention_gate")  # [T, gates of all ranks]
    gate = gates.repeat_interleave(attention.shared_inputs // gates.shape[1], 1)[:, part.start : part.stop]
    function = {"sigmoid": torch.sigmoid, "softplus": F.softplus}[attention.gate_activation]
    ours, ungated = fault.ours(rank)[:, : truth.shape[1]], truth / function(gate)
    if _distance(ours, ungated) < _CLOSE:
        return "is left out"
    is_plain = _distance(ours, ungated * gate) < _CLOSE
    return f"is not a {attention.gate_activation} of the projection" if is_plain else ""


def _heads_of_wrong_sinks(fault: _Fault) -> list[int]:
    """Return the wrong heads if each of their rows is a multiple of the right one, which another sum of attention
    weights would cause; else an empty list."""
    heads: dict[int, tuple[Tensor, Tensor]] = {}
    for rank in fault.row.wrong_ranks:
        part = fault.part(rank)
        pairs = zip(fault.ours(rank).split(part.group, 1), fault.truth(rank).split(part.group, 1), strict=True)
        heads |= dict(enumerate(pairs, part.start // part.group))
    errors = {head: _distance(*pair) for head, pair in heads.items()}
    wrong = [head for head, error in errors.items() if error > 0.1 * max(errors.values())]
    for ours, truth in map(heads.__getitem__, wrong):
        factors = (ours * truth).sum(1, keepdim=True) / truth.square().sum(1, keepdim=True)  # [T, 1]
        if not (ours - factors * truth).norm() < _CLOSE * (ours - truth).norm():
            return []
    return wrong


def _recurrent(fault: _Fault, sublayer: SublayerSpec) -> str:
    """Describe a wrong convolution or recurrence: a slot of another state if that explains it."""
    assert isinstance(sublayer, RecurrentSpec)
    rank, layer = fault.row.wrong_ranks[0], fault.row.layer or 0
    is_convolution = fault.tapped is not None and fault.tapped.tap.computation is Computation.CONVOLUTION
    where = f"{'convolution' if is_convolution else 'recurrence'} of layer {layer} on {fault.ranks}"
    columns = slice(fault.part(rank).start, fault.part(rank).stop)
    part = WrongPart(layer, fault.row.tensor, columns, fault.ours(rank), fault.wrong_tokens())
    if cause := slot_cause(part, sublayer, fault.folder, fault.dequantised):
        return f"{where}: {cause}"
    weights = weights_of(sublayer, is_convolution=is_convolution)
    return f"{where}: {fault.module}.{sublayer.module}.{weights}, or the kernel itself"


def _row_parallel(fault: _Fault, branch: BranchSpec, tap: Tap) -> str:
    name = f"{fault.module}.{branch.sublayer.module}.{tap.module}"
    inputs = next(one.name for one in branch.sublayer.taps if one.is_input and one.module == tap.module)
    if fault.is_constant():
        return f"{name}.bias (the error is the same for every token: lost, or added by more than one rank)"
    weight = fault.dequantised.weight(name).double()
    columns = weight.tensor_split(fault.size, 1)  # [hidden, inputs / ranks] of each rank
    parts = Recorded(fault.folder).truth(f"{fault.row.layer}.{inputs}").tensor_split(fault.size, 1)  # [T, inputs]
    wrong = tuple(
        rank for rank in range(fault.size) if not _distance(fault.partial(rank), parts[rank] @ columns[rank].T) < _CLOSE
    )
    if not wrong and fault.size > 1:
        return f"the all-reduce after {name}"
    which = f"{name}.weight: the columns of {_ranks(wrong)}" if fault.size > 1 else f"{name}.weight"
    scales = None
    if wrong and fault.dequantised.arithmetic(name) is not Arithmetic.DENSE:
        scales = wrong_scales(parts[wrong[0]], columns[wrong[0]], fault.partial(wrong[0]))
    return f"{which} ({scales})" if scales else which


def _residual(fault: _Fault, branch: BranchSpec) -> str:
    layer = fault.spec.layers[fault.row.layer or 0]
    added = next(stage for stage in layer.stages if branch in stage)
    norms = "".join(f"{one.post_norm}, or " for one in added if one.post_norm is not None)
    sums = (Computation.SUM, Computation.EXPERTS)
    linear_layers = " and ".join(tap.module for one in added for tap in one.sublayer.taps if tap.computation in sums)
    scalar = "" if layer.scalar is None or branch not in layer.stages[-1] else f"{layer.scalar}, or "
    return (
        f"{fault.module}: {norms}{scalar}the addition of the residual after {linear_layers} "
        "(or a bias added on the wrong side of the all-reduce)"
    )


def _router(fault: _Fault, experts: SublayerSpec) -> str:
    """Describe a wrong router. Every rank computes all logits; for some or all experts they are wrong."""
    assert isinstance(experts, ExpertsSpec)
    rank = fault.row.wrong_ranks[0]
    rms = fault.error(rank).square().mean(0).sqrt()  # [E]
    wrong = (rms > _CLOSE * rms.max()).nonzero().flatten().tolist()
    which = "" if len(wrong) == experts.choices else f": the rows of {_numbered('expert', wrong)}"
    weight = "weight or bias" if experts.router.bias else "weight"
    return f"{fault.module}.{experts.module}.{experts.router.name}.{weight}{which}, on {fault.ranks}"


def _routing(fault: _Fault, experts: SublayerSpec) -> str:
    """Describe wrong routing although the logits are right."""
    assert isinstance(experts, ExpertsSpec)
    where, router = f"router of layer {fault.row.layer} on {fault.ranks}", experts.router
    ours, truth = fault.ours(fault.row.wrong_ranks[0]), fault.truth(fault.row.wrong_ranks[0])
    if torch.equal(ours > 0, truth > 0):
        of = "normalised or not, their scale" if router.scale != 1.0 else "normalised or not"
        of += f", {experts.module}.{router.expert_scale}" if router.expert_scale is not None else ""
        return f"{where}: the right experts are chosen, with wrong weights ({of}, or the scores of the logits)"
    corrected = f"{experts.module}.{router.correction}, " if router.correction is not None else ""
    return f"{where}: other experts are chosen ({corrected}how many, or from which groups)"


def _experts(fault: _Fault, branch: BranchSpec, tap: Tap) -> str:
    """Find the wrong experts from the wrong tokens, and their likely error from their weights."""
    experts = branch.sublayer
    assert isinstance(experts, ExpertsSpec)
    name = f"{fault.module}.{experts.module}.{tap.module}"
    if tap.name == "shared":
        return f"{name}: its weights, its gate, or the all-reduce"
    routing = Recorded(fault.folder).truth(f"{fault.row.layer}.routing")  # [T, E]
    rank, chosen = fault.row.wrong_ranks[0], routing > 0
    rms = fault.error(rank).square().mean(1).sqrt()
    wrong = rms > 1e-2 * rms.max()  # two experts of a token may have very different weights
    if experts.identities and torch.equal(wrong, chosen[:, experts.experts :].any(1)):
        return f"{name}: the experts whose result is their input, from number {experts.experts}"
    of = [expert for expert in range(experts.experts) if chosen[:, expert].any() and wrong[chosen[:, expert]].all()]
    if not of or not bool(chosen[wrong][:, of].any(1).all()):
        return f"{name}: the sum over a token's experts, or over ranks (all-reduce)"
    parts = []
    for expert in of:
        only = chosen[:, expert] & (chosen[:, of].sum(1) == 1)  # no other wrong expert is in the sum
        parts.append(_expert(fault, branch, experts, expert, only, routing) if only.any() else f"{expert}")
    return f"{name}: {'expert' if len(of) == 1 else 'experts'} {', '.join(parts)}"


def _expert(fault: _Fault, branch: BranchSpec, spec: ExpertsSpec, expert: int, tokens: Tensor, routing: Tensor) -> str:
    """Return the expert's number, and a note if its result is another expert's or a multiple of the right one."""
    rank, module = fault.row.wrong_ranks[0], f"{fault.module}.{spec.module}.experts"
    x = Recorded(fault.folder).truth(read_by(fault.spec, fault.row.layer or 0, branch))[tokens]
    weight = routing[tokens, expert, None]

    def result(other: int) -> Tensor:
        rows = x * weight if spec.weighs_inputs else x
        return expert_result(fault.dequantised, f"{module}.{other}", spec, rows)

    if spec.bias or spec.norm is not None or spec.activation == "clamped_swiglu":
        return f"{expert}"
    right = result(expert)
    found = fault.error(rank)[tokens] / (1.0 if spec.weighs_inputs else weight) + right
    for other in range(spec.experts):
        if other != expert and _distance(found, result(other)) < _CLOSE:
            return f"{expert} (it has the values of expert {other})"
    factor = ((found * right).sum() / right.square().sum()).item()
    is_scaled = _distance(found, factor * right) < _CLOSE
    return f"{expert} (its result is {factor:.2g} times the right one: a wrong scale)" if is_scaled else f"{expert}"


def _gated(fault: _Fault, mlp: SublayerSpec) -> str:
    assert isinstance(mlp, GatedMLPSpec)
    prefix, rows = f"{fault.module}.{mlp.module}", f"the rows of {fault.ranks}"
    if mlp.bias:  # with a bias, `_gate_is_right` does not apply
        return f"{prefix}.gate_proj or {prefix}.up_proj: {rows}, or the activation"
    if all(_gate_is_right(fault, rank, mlp.activation) for rank in fault.row.wrong_ranks):
        return f"{prefix}.up_proj.weight: {rows}"
    return f"{prefix}.gate_proj.weight: {rows}, or the activation ({mlp.activation})"


def _activated(fault: _Fault, mlp: SublayerSpec) -> str:
    """Describe a wrong result of an MLP's first linear layer and its activation. Another activation of the right
    projection is recognised by its values."""
    if isinstance(mlp, LayerInputSpec):
        name = f"{fault.module}.{mlp.module}.gate_proj.weight"
        inputs = f"the inputs of the layer ({', '.join(LayerInputTable.modules)})"
        return f"{name}: the rows of {fault.ranks}, the activation ({mlp.activation}), or {inputs}"
    assert isinstance(mlp, MLPSpec)
    name = f"{fault.module}.{mlp.module}.up_proj"
    projected = f"{fault.row.layer}.{next(tap.name for tap in mlp.taps if tap.module == 'up_proj')}"

    def distance(activation: str) -> float:
        """Return the largest distance, over the wrong ranks, from this activation of the right projection."""
        function = PLAIN_ACTIVATIONS[activation]
        ranks = fault.row.wrong_ranks
        return max(_distance(fault.ours(rank), function(fault.truth(rank, projected))) for rank in ranks)

    nearest = min(PLAIN_ACTIVATIONS, key=distance)
    if nearest != mlp.activation and distance(nearest) < _CLOSE * distance(mlp.activation):
        return f"{name}: the activation on {fault.ranks} is {nearest}, not {mlp.activation}"
    parameters = "weight or bias" if mlp.bias else "weight"
    return f"{name}.{parameters}: the rows of {fault.ranks}, or the activation ({mlp.activation})"


def _gate_is_right(fault: _Fault, rank: int, activation: str) -> bool:
    """Return whether a rank's wrong y(x) = act(g) * u, with g and u linear in x, contains the right g.

    For silu and gelu, act(g) - act(-g) = g and act(g) + act(-g) = g * h(g), with h as in `_ODD`. So y(x) + y(-x) is g *
    u and y(x) - y(-x) is g * u * h(g): their quotient depends only on g.
    """
    gate = fault.truth(rank, f"{fault.row.layer}.gate")
    output, mirrored = fault.ours(rank), fault.ours(rank, "_mirrored")  # y(x), y(-x)
    return _distance((output + mirrored) * _ODD[activation](gate), output - mirrored) < _CLOSE


_ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda gate: torch.tanh(gate / 2),
    "gelu_tanh": lambda gate: torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate.pow(3))),
}


def _logits(fault: _Fault) -> str:
    if fault.spec.head_bias and fault.is_constant():
        return f"lm_head.bias: the rows of {fault.ranks} (the error is the same for every token)"
    head = "model.embed_tokens.weight (tied head)" if fault.spec.tie_word_embeddings else "lm_head.weight"
    text = f"{head}: the rows of {fault.ranks}"
    shards = [fault.truth(rank) for rank in range(fault.size)]
    for rank in fault.row.wrong_ranks:
        nearest = _nearest(fault.ours(rank), shards)
        if nearest not in (None, rank):
            return f"{text} (rank {rank} holds the shard of rank {nearest})"
    return text


def _is_constant(error: Tensor) -> bool:
    """Return whether the rows of `error` [T, columns] are equal except for rounding."""
    if len(error) < 2 or not bool(torch.isfinite(error).all()):
        return False
    mean = error.mean(0)
    return bool((error - mean).norm() < _CLOSE * mean.expand_as(error).norm())


def _distance(ours: Tensor, truth: Tensor) -> float:
    """Return the distance relative to the norm of `truth`."""
    return ((ours - truth).norm() / truth.norm()).item()


def _nearest(ours: Tensor, candidates: Sequence[Tensor]) -> int | None:
    """Return the index of the candidate that `ours` equals except for rounding; None if there is none. Padding is left
    out."""
    distances = [_distance(ours[:, : one.shape[1]], one) if one.shape[1] else math.inf for one in candidates]
    nearest = min(range(len(distances)), key=distances.__getitem__)
    return nearest if distances[nearest] < _CLOSE else None


def _ranks(ranks: tuple[int, ...]) -> str:
    return _numbered("rank", ranks)


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
