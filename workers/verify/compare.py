"""Comparison of each rank's tensors with transformers' in float64: errors, their limits, and equal bits on ranks.

How an error is measured: the truth is transformers' model in float64 on the same weights. transformers' own run in the
model's dtype differs from it by rounding. The root mean square error of a rank's part of a tensor, and of each head in
it, may be up to twice transformers'. The largest single error may be twice transformers' for the logits, and four times
for any other tensor, since it is a matter of luck. No limit of a head or of a single error is below one rounding of the
largest element, times the root of the number of roundings that our computation makes on the way from the tensors before
it. No limit of a whole part is below one rounding of its root mean square.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec
from oarlock.workers.layers.sharding import shard_vocab
from oarlock.workers.layers.tensor_spec import Computation, Tap
from oarlock.workers.verify.halves import Half, HalfDifference, Halves, same_bits
from oarlock.workers.verify.request import Text

LIMIT = 2.0  # factor on transformers' errors: for root mean square errors, and for the largest error of the logits
LARGEST_LIMIT = 4.0  # factor for the largest error of any other tensor; see docs/accuracy.md for correct models
NEAR_TIES_FILE = "near-ties.json"
_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # relative error of one operation
_SCALES = 2.0**-11  # rounding of the kernels' scales of weight groups


@dataclass(frozen=True, slots=True)
class Tapped:
    """A compared tensor of one layer, and its branch of the layer."""

    tap: Tap
    branch: BranchSpec


def taps_of(layer: LayerSpec) -> list[Tapped]:
    """Return all recorded tensors of a layer, in the order in which they are computed: input, inner tensors and output
    of each sublayer.

    A norm that branches of a stage share, and the residual that a stage leaves, come once. A norm whose results are
    scaled is not compared: transformers scales them after the norm.
    """
    found: list[Tapped] = []
    for stage in layer.stages:
        norms: set[str | None] = {None}
        for branch in stage:
            if branch.norm not in norms and branch.input_scale == 1.0:
                found.append(Tapped(Tap(branch.sublayer.reads, Computation.NORM, branch.norm or ""), branch))
                norms.add(branch.norm)
            found += [Tapped(tap, branch) for tap in branch.sublayer.taps]
        last = stage[-1]
        left = "residual" if last is layer.branches[-1] else last.sublayer.leaves
        found.append(Tapped(Tap(left, Computation.RESIDUAL), last))
    return found


def layer_tensors(spec: DecoderSpec) -> list[str]:
    """Return the compared tensors of all layers, in the order in which they are computed, as `"3.q"`."""
    named = {layer: [one.tap.name for one in taps_of(layer) if one.tap.is_compared] for layer in set(spec.layers)}
    return [f"{index}.{name}" for index, layer in enumerate(spec.layers) for name in named[layer]]


def tensor_names(spec: DecoderSpec) -> list[str]:
    """Return all compared tensors, in the order in which they are computed."""
    return ["embedding", *layer_tensors(spec), "final_norm", "logits"]


def halves_of(spec: DecoderSpec, layers: range) -> list[Half]:
    """Return the branches of `layers`, in their order, with the tensor that each leaves."""
    found = []
    for index in layers:
        left = {
            id(one.branch): one.tap.name
            for one in taps_of(spec.layers[index])
            if one.tap.computation is Computation.RESIDUAL
        }
        for number, branch in enumerate(spec.layers[index].branches):
            name = left.get(id(branch))
            found.append(Half(index, number, branch.sublayer.title, None if name is None else f"{index}.{name}"))
    return found


def file_of(name: str) -> str:
    """Return the file that stores a tensor, without its prefix. There is one per layer, and two for tensors outside the
    layers, of which the first stage of a pipeline writes one and the last stage the other."""
    return name.rpartition(".")[0] or ("beginning" if name == "embedding" else "ends")


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """Columns `start` to `stop` of the whole tensor, in groups of `group` (a head, or all of the rank's columns)."""

    start: int
    stop: int
    group: int

    @property
    def width(self) -> int:
        return self.stop - self.start


def tapped(spec: DecoderSpec, layer: int, tensor: str) -> Tapped:
    """Return the tensor of a layer by its name."""
    return next(one for one in taps_of(spec.layers[layer]) if one.tap.name == tensor)


def positions_in(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the position of every recorded token in its sequence [T], and whether it follows the prompt, bool [T]."""
    text = Text.read(folder)
    counts = [(len(prompt), len(sequence)) for prompt, sequence in zip(text.prompts, text.inputs(), strict=True)]
    positions = torch.cat([torch.arange(total) for _, total in counts])
    return positions, torch.cat([torch.arange(total) >= prompt for prompt, total in counts])


def read_by(spec: DecoderSpec, layer: int, branch: BranchSpec, tap: Tap | None = None) -> str:
    """Return the tensor that the sublayer of `branch` reads: its norm, or the residual before it. `tap`: return the
    tensor that its module reads, which may be another one in the sublayer."""
    if tap is not None and tap.reads:
        return f"{layer}.{tap.reads}"
    names = layer_tensors(spec)
    at = next(f"{layer}.{tap.name}" for tap in branch.sublayer.taps if tap.is_compared)
    if branch.norm is not None:
        return next(f"{layer}.{one.tap.name}" for one in taps_of(spec.layers[layer]) if one.tap.module == branch.norm)
    before = names.index(at) - 1
    return names[before] if before >= 0 else "embedding"


def columns_of(tensor: str, spec: DecoderSpec, rank: int, size: int, layer: int | None = 0) -> ColumnRange:
    """Return the part of `tensor`, a name without its `layer`, on `rank` of `size`. `layer`: None for tensors outside
    the layers."""
    if tensor == "logits":
        start, _, real = shard_vocab(spec.vocab_size, rank, size)
        return ColumnRange(start, start + real, max(1, real))
    tap = None if layer is None or tensor in ("embedding", "final_norm") else tapped(spec, layer, tensor).tap
    if tap is None or not tap.parts:
        width = (tap.width if tap is not None else 0) or spec.hidden_size
        return ColumnRange(0, width, width)
    width, first, count = tap.width // tap.parts, rank * tap.parts // size, max(1, tap.parts // size)
    return ColumnRange(first * width, (first + count) * width, width if width > 1 else count)


def is_on_all_ranks(tensor: str, spec: DecoderSpec, layer: int | None) -> bool:
    """Return whether every rank has all of a tensor, with the same bits: after an all-reduce, or computed by all
    alike."""
    if layer is None:
        return tensor != "logits"
    return not tapped(spec, layer, tensor).tap.parts


def dense_routing(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Return the weight of every expert, 0 for experts that a token does not use: `ids`, `weights` [T, k] -> [T,
    experts]."""
    dense = torch.zeros((len(ids), experts), dtype=weights.dtype, device=weights.device)
    return dense.scatter_(1, ids.long(), weights)


class Recorded:
    """The tensors that the reference and the ranks have written to `folder`, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has_tensors(self) -> bool:
        """Return False if only tokens were recorded."""
        return (self._folder / "truth-ends.safetensors").is_file()

    def near_ties(self) -> int:
        """Return how many choices of experts the truth has from the ranks, because rounding decides them."""
        path = self._folder / NEAR_TIES_FILE
        return json.loads(path.read_text("utf-8")) if path.is_file() else 0

    def truth(self, name: str) -> Tensor:
        """Return [T, columns], float64."""
        return self._read("truth", name, name).double()

    def theirs(self, name: str) -> tuple[Tensor, Tensor]:
        """Return transformers' errors by column: the largest, and the sum of squares over tokens."""
        return self._read("theirs", name, f"{name}.max").double(), self._read("theirs", name, f"{name}.square").double()

    def their_best(self) -> Tensor:
        """Return the token of transformers' largest logit after each row, int64 [T]."""
        return self._read("theirs", "logits", "logits.best")

    def ours(self, rank: int, name: str) -> Tensor:
        """Return [T, this rank's columns, possibly followed by padding], in the dtype in which it was computed."""
        return self._read(f"rank-{rank}", name, name)

    def _read(self, kind: str, name: str, key: str) -> Tensor:
        with safe_open(self._folder / f"{kind}-{file_of(name)}.safetensors", "pt") as file:
            return file.get_tensor(key)


@dataclass(frozen=True, slots=True)
class RankError:
    """The errors of one rank's part of one tensor."""

    rank: int
    max_error: float
    theirs: float  # transformers' largest error over the same elements
    ratio: float  # largest error divided by transformers' largest error; of the worst head, if there are heads
    rms_ratio: float  # the same ratio of root mean squares, over the whole part
    head_rms_ratio: float = 0.0  # the same ratio of the worst head
    limit: float = LARGEST_LIMIT  # limit of `ratio`

    @property
    def within(self) -> bool:
        return self.share_of_limit <= 1

    @property
    def share_of_limit(self) -> float:
        return max(self.ratio / self.limit, self.rms_ratio / LIMIT, self.head_rms_ratio / LIMIT)


@dataclass(frozen=True, slots=True)
class TensorResult:
    """One tensor on all ranks. `layer` is None before and after the layers."""

    layer: int | None
    tensor: str
    errors: tuple[RankError, ...]
    ranks_agree: bool = True
    is_on_all_ranks: bool = False

    @property
    def name(self) -> str:
        return self.tensor if self.layer is None else f"{self.layer}.{self.tensor}"

    @property
    def where(self) -> str:
        return self.tensor if self.layer is None else f"layer {self.layer}, {self.tensor}"

    @property
    def worst(self) -> RankError:
        return max(self.errors, key=lambda error: error.share_of_limit)

    @property
    def wrong_ranks(self) -> tuple[int, ...]:
        return tuple(error.rank for error in self.errors if not error.within)

    @property
    def result(self) -> str:
        if self.wrong_ranks:
            return "differs"
        return "ok" if self.ranks_agree else "ranks disagree"


@dataclass(frozen=True, slots=True)
class CompletionResult:
    """One prompt's greedy text. A near-tie is a token whose logit differs from the best by no more than rounding, or
    the best token of transformers if it computes the text in one call."""

    prompt: int
    count: int
    near_ties: int
    first_difference: int | None = None  # index of the first token that rounding does not explain
    gap: float = 0.0  # difference between the true logits of that token and of transformers' token
    allowed: float = 0.0

    @property
    def result(self) -> str:
        return "ok" if self.first_difference is None else "differs"


@dataclass(frozen=True, slots=True)
class VerifyResults:
    """Results for all tensors in the order in which they are computed, the greedy text, and the served halves of
    layers."""

    rows: list[TensorResult]
    tokens: list[CompletionResult] = field(default_factory=list)
    halves: Halves | None = None
    near_ties: int = 0  # choices of experts that rounding decides

    @property
    def first_fault(self) -> TensorResult | None:
        return next((row for row in self.rows if row.result != "ok"), None)

    @property
    def ok(self) -> bool:
        right = self.first_fault is None and all(token.result == "ok" for token in self.tokens)
        return right and not self.different_halves

    @property
    def different_halves(self) -> tuple[HalfDifference, ...]:
        return () if self.halves is None else self.halves.differences


def compare(
    folder: Path, spec: DecoderSpec, size: int, dtype: str, *, has_scales: bool = False, stages: int = 1
) -> VerifyResults:
    """Compare the tensors that `size` ranks of each of `stages` recorded in `folder` with the reference's; one tensor
    in memory at a time. `has_scales`: weights may have scales that kernels round. If such weights are looked up, no sum
    averages this rounding."""
    recorded = Recorded(folder)
    rounding = max(_ROUNDING[dtype], _SCALES if has_scales else 0.0)
    rows = [_compare_tensor(recorded, name, spec, size, rounding) for name in tensor_names(spec)]
    tokens, halves = list(compare_tokens(folder, dtype)), Halves.read(folder, size, stages)
    return VerifyResults(rows, tokens, halves, recorded.near_ties())


def _compare_tensor(recorded: Recorded, name: str, spec: DecoderSpec, size: int, rounding: float) -> TensorResult:
    number, _, tensor = name.rpartition(".")
    layer = int(number) if number else None
    truth, theirs = recorded.truth(name), recorded.theirs(name)
    ours = [recorded.ours(rank, name) for rank in range(size)]
    limit = LIMIT if tensor == "logits" else LARGEST_LIMIT
    roundings = 1 if layer is None else tapped(spec, layer, tensor).tap.roundings
    errors = tuple(
        _measure(rank, mine, truth, theirs, columns_of(tensor, spec, rank, size, layer), rounding, roundings, limit)
        for rank, mine in enumerate(ours)
    )
    everywhere = is_on_all_ranks(tensor, spec, layer)
    agree = not everywhere or all(same_bits(ours[0], other) for other in ours[1:])
    return TensorResult(layer, tensor, errors, agree, everywhere)


def _measure(
    rank: int,
    ours: Tensor,
    truth: Tensor,
    theirs: tuple[Tensor, Tensor],
    part: ColumnRange,
    rounding: float,
    roundings: int,
    limit: float,
) -> RankError:
    """Measure one rank's errors. `ours` [T, the part's columns and padding], `truth` [T, columns], `theirs` as in
    `Recorded.theirs`. `rounding`: relative error of one. `roundings`: number of them since the tensors before."""
    if part.width == 0:  # a rank whose whole shard of the vocabulary is padding
        return RankError(rank, 0.0, 0.0, 0.0, 0.0)
    here = slice(part.start, part.stop)
    exact = truth[:, here].unflatten(1, (-1, part.group))  # [T, groups, columns of a group]
    error = (ours[:, : part.width].double().unflatten(1, (-1, part.group)) - exact).abs()
    largest, squares = (column[here].view(-1, part.group) for column in theirs)  # [groups, columns of a group]
    their_max = largest.amax(1)  # [groups], like all below
    their_rms = (squares.sum(1) / (exact.shape[0] * part.group)).sqrt()
    one_rounding = exact.abs().amax((0, 2)) * rounding * math.sqrt(roundings)
    our_max = error.amax((0, 2))
    our_rms = error.square().mean((0, 2)).sqrt()
    rms_bound = torch.maximum(their_rms, one_rounding / 2)
    # Of the whole part, a few large elements do not hide an error of all others.
    whole_bound = torch.maximum(their_rms.square().mean().sqrt(), exact.square().mean().sqrt() * rounding)
    return RankError(
        rank,
        our_max.max().item(),
        their_max.max().item(),
        _ratio(our_max, torch.maximum(their_max, one_rounding)),
        _ratio(our_rms.square().mean().sqrt(), whole_bound),
        _ratio(our_rms, rms_bound),
        limit,
    )


def _ratio(ours: Tensor, bound: Tensor) -> float:
    """Return the worst ratio over groups. No error at all counts as 0, even if the bound is 0."""
    if not bool(torch.isfinite(ours).all()):
        return math.inf
    return torch.where(ours == 0, 0.0, ours / bound).max().item()


def compare_tokens(folder: Path, dtype: str) -> Iterator[CompletionResult]:
    """Yield the comparison of our greedy choice after each of transformers' tokens. If all are equal, our own text
    would be the same.

    If the tensors were not recorded, every difference counts.
    """
    text, recorded = Text.read(folder), Recorded(folder)
    ours: list[list[int]] = json.loads((folder / "tokens.json").read_text("utf-8"))
    logits, best, allowed = None, torch.empty(0), -1.0
    if recorded.has_tensors():
        logits, best = recorded.truth("logits"), recorded.their_best()
        error = max(recorded.theirs("logits")[0].max().item(), logits.abs().max().item() * _ROUNDING[dtype])
        allowed = (1 + LIMIT) * error  # their logit may be off by one error, ours by LIMIT errors
    start = 0
    for number, (prompt, output) in enumerate(zip(text.prompts, text.outputs, strict=True)):
        near_ties, row = 0, None
        for index, (expected, found) in enumerate(zip(output, ours[number], strict=True)):
            if expected == found:
                continue
            at = start + len(prompt) - 1 + index
            gap = math.inf
            if logits is not None:  # `generate` may have chosen other experts than the recorded run
                gap = (logits[at, [expected, int(best[at])]] - logits[at, found]).abs().min().item()
            if not gap <= allowed:  # NaN is never a near-tie
                row = CompletionResult(number, len(output), near_ties, index, gap, max(0.0, allowed))
                break
            near_ties += 1
        yield row or CompletionResult(number, len(output), near_ties)
        start += len(prompt) + max(0, len(output) - 1)
