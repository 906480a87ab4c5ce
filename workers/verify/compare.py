"""Our ranks' tensors against the truth: errors, measured in transformers' own errors, and who disagrees with whom.

Knows files and numbers. Does not know why something differs (`causes.py`) nor how it is shown (`report.py`).

How an error is judged. The truth is transformers' model in float64 on the same weights. transformers' own run at the
dtype misses it by its rounding; a rank's part of a tensor may miss it by up to twice as much, as the root of the mean
square, and so may each head of it. The largest single error may be twice theirs for the logits, and four times for any
other tensor, where it is a matter of luck. What nobody can do better than is rounding once: no error is held to less
than one rounding of the largest element.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from workers.layers.decoder_spec import DecoderSpec
from workers.verify.names import BEFORE, LAYER, REPLICATED, Part, part_of
from workers.verify.request import Text

LIMIT = 2.0  # of the root mean square; of the largest error, too, where it is the logits'
LARGEST_LIMIT = 4.0  # of any other tensor's largest error; how far right models go stands in docs/accuracy.md
_UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True, slots=True)
class RankError:
    """One rank's part of one tensor."""

    rank: int
    max_error: float
    theirs: float  # transformers' largest error over the same elements
    ratio: float  # the largest error, in transformers' largest; of the worst head, where there are heads
    rms_ratio: float  # the same of root mean squares, over the whole part
    head_rms_ratio: float = 0.0  # and of the worst head
    limit: float = LARGEST_LIMIT  # of `ratio`

    @property
    def within(self) -> bool:
        return self.badness <= 1

    @property
    def badness(self) -> float:
        """How much of what is allowed was used."""
        return max(self.ratio / self.limit, self.rms_ratio / LIMIT, self.head_rms_ratio / LIMIT)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of one layer (None: before or after the layers)."""

    layer: int | None
    tensor: str
    errors: tuple[RankError, ...]
    ranks_agree: bool = True

    @property
    def name(self) -> str:
        return self.tensor if self.layer is None else f"{self.layer}.{self.tensor}"

    @property
    def worst(self) -> RankError:
        return max(self.errors, key=lambda error: error.badness)

    @property
    def wrong_ranks(self) -> tuple[int, ...]:
        return tuple(error.rank for error in self.errors if not error.within)

    @property
    def verdict(self) -> str:
        if self.wrong_ranks:
            return "differs"
        return "ok" if self.ranks_agree else "ranks disagree"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One prompt's greedy text. A near-tie is a token whose logit is too close to the best for rounding to tell."""

    prompt: int
    count: int
    near_ties: int
    first_difference: int | None = None  # index of the first token that no rounding explains
    gap: float = 0.0  # there: how far its true logit lies below that of transformers' token
    allowed: float = 0.0

    @property
    def verdict(self) -> str:
        return "ok" if self.first_difference is None else "differs"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was found out, in the order of computation."""

    rows: list[Row]
    tokens: list[TokenRow] = field(default_factory=list)

    @property
    def first_fault(self) -> Row | None:
        return next((row for row in self.rows if row.verdict != "ok"), None)

    @property
    def ok(self) -> bool:
        return self.first_fault is None and all(token.verdict == "ok" for token in self.tokens)


def compare(folder: Path, spec: DecoderSpec, size: int, dtype: str) -> Comparison:
    """Read what reference and ranks left in `folder`; one layer in memory at a time."""
    ends = {row.name: row for row in _rows(Files(folder, "ends", size), spec, dtype)}
    rows = [ends.pop(name) for name in BEFORE]
    for layer in range(spec.num_layers):
        rows += _rows(Files(folder, str(layer), size), spec, dtype)
    return Comparison([*rows, *ends.values()], list(compare_tokens(folder, dtype)))


class Files:
    """What was left about one layer (`"ends"`: about what comes before and after all of them)."""

    def __init__(self, folder: Path, which: str, size: int) -> None:
        self.layer = None if which == "ends" else int(which)
        self.size = size
        self._folder = folder
        self._which = which

    def names(self) -> list[str]:
        """The tensors of this file, first computed first."""
        return ["embedding", "final_norm", "logits"] if self.layer is None else [f"{self.layer}.{t}" for t in LAYER]

    def truth(self, name: str) -> Tensor:
        """[T, columns], float64."""
        return self._read("truth", name).double()

    def theirs(self, name: str) -> tuple[Tensor, Tensor]:
        """transformers' errors by column: the largest, and the sum of squares over tokens."""
        return self._read("theirs", f"{name}.max").double(), self._read("theirs", f"{name}.square").double()

    def ours(self, rank: int, name: str) -> Tensor:
        """[T, this rank's columns], in the dtype it was made in."""
        return self._read(f"rank-{rank}", name)

    def _read(self, kind: str, name: str) -> Tensor:
        with safe_open(self._folder / f"{kind}-{self._which}.safetensors", "pt") as file:
            return file.get_tensor(name)


def _rows(files: Files, spec: DecoderSpec, dtype: str) -> Iterator[Row]:
    for name in files.names():
        tensor = name.rpartition(".")[2]
        truth = files.truth(name)
        largest, squares = files.theirs(name)
        ours = [files.ours(rank, name) for rank in range(files.size)]
        errors = tuple(
            _measure(rank, mine, truth, largest, squares, part_of(tensor, spec, rank, files.size), tensor, _UNIT[dtype])
            for rank, mine in enumerate(ours)
        )
        agree = tensor not in REPLICATED or all(same_bits(ours[0], other) for other in ours[1:])
        yield Row(files.layer, tensor, errors, agree)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that NaN equals itself and zero does not equal minus zero."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _measure(
    rank: int, ours: Tensor, truth: Tensor, largest: Tensor, squares: Tensor, part: Part, tensor: str, unit: float
) -> RankError:
    """`ours` holds the part's columns, perhaps padding behind them."""
    if part.width == 0:  # a rank whose whole shard of the vocabulary is padding
        return RankError(rank, 0.0, 0.0, 0.0, 0.0)
    here = slice(part.start, part.stop)
    exact = truth[:, here].unflatten(1, (-1, part.group))  # [T, groups, columns of a group]
    error = (ours[:, : part.width].double().unflatten(1, (-1, part.group)) - exact).abs()
    theirs = largest[here].view(-1, part.group).amax(1)  # [groups]
    count = exact.shape[0] * part.group
    theirs_rms = (squares[here].view(-1, part.group).sum(1) / count).sqrt()
    one_rounding = exact.abs().amax((0, 2)) * unit
    worst = error.amax((0, 2))
    rms = error.square().mean((0, 2)).sqrt()
    rms_bound = torch.maximum(theirs_rms, one_rounding / 2)
    return RankError(
        rank,
        worst.max().item(),
        theirs.max().item(),
        _ratio(worst, torch.maximum(theirs, one_rounding)),
        _ratio(rms.square().mean().sqrt(), rms_bound.square().mean().sqrt()),
        _ratio(rms, rms_bound),
        LIMIT if tensor == "logits" else LARGEST_LIMIT,
    )


def _ratio(ours: Tensor, bound: Tensor) -> float:
    """The worst over groups; no error at all is 0, whatever the bound."""
    if not bool(torch.isfinite(ours).all()):
        return math.inf
    return torch.where(ours == 0, 0.0, ours / bound).max().item()


def compare_tokens(folder: Path, dtype: str) -> Iterator[TokenRow]:
    """Our choice at every place of transformers' text. Equal everywhere means the same text by itself.

    Where the tensors were not recorded, no difference is excused.
    """
    text = Text.read(folder)
    ours: list[list[int]] = json.loads((folder / "tokens.json").read_text("utf-8"))
    recorded = (folder / "truth-ends.safetensors").is_file()
    logits = allowed = None
    if recorded:
        files = Files(folder, "ends", 1)
        logits = files.truth("logits")
        error = max(files.theirs("logits")[0].max().item(), logits.abs().max().item() * _UNIT[dtype])
        allowed = (1 + LIMIT) * error  # theirs may be off by one error, ours by LIMIT of them
    start = 0
    for number, (prompt, output) in enumerate(zip(text.prompts, text.outputs, strict=True)):
        ties, row = 0, None
        for index, (expected, found) in enumerate(zip(output, ours[number], strict=True)):
            if expected == found:
                continue
            at = start + len(prompt) - 1 + index
            gap = math.inf if logits is None else (logits[at, expected] - logits[at, found]).abs().item()
            if allowed is not None and gap <= allowed:
                ties += 1
                continue
            row = TokenRow(number, len(output), ties, index, gap, allowed or 0.0)
            break
        yield row or TokenRow(number, len(output), ties)
        start += len(prompt) + max(0, len(output) - 1)
