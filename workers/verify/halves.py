"""Comparison of layers as served, in one call, with their separate operations: both must give the same bits.

Only the separate operations show every tensor, so only they are compared with transformers. The result covers the
served kernels (`workers/layers/fused_layer.py`) only if their hidden states after each half equal the operations'.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from oarlock.workers.layers.fused_layer import PreparedLayers


@dataclass(frozen=True, slots=True)
class Half:
    """One branch of a layer, which the kernels run as a whole."""

    layer: int
    branch: int  # its number in the layer
    title: str
    tensor: str | None  # recorded tensor that it leaves; None if operations leave none, as between parallel branches


@dataclass(frozen=True, slots=True)
class HalfDifference:
    """A half of a layer whose served and separate computations differ in bits."""

    layer: int
    half: str  # the title of its sublayer
    rank: int
    largest: float  # largest difference; NaN if either computation gives NaN
    branch: int = 0  # number of the half in its layer

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: the order in which halves are computed."""
        return self.layer, self.branch, self.rank


@dataclass(frozen=True, slots=True)
class Halves:
    """Result of comparing both computations of a layer's halves on all ranks."""

    compared: int  # halves of one rank
    why_not: str | None  # None: they were compared
    differences: tuple[HalfDifference, ...] = ()  # ordered as they are computed

    @staticmethod
    def read(folder: Path, size: int, stages: int = 1) -> "Halves | None":
        """Merge the results of all `size` ranks of each of `stages`; None if no tensors were recorded."""
        files = [_file(folder, rank, stage) for stage in range(stages) for rank in range(size)]
        if not all(file.is_file() for file in files):
            return None
        ranks = [json.loads(file.read_text("utf-8")) for file in files]
        found = [HalfDifference(**difference) for rank in ranks for difference in rank["differences"]]
        why_not = next((rank["why_not"] for rank in ranks if rank["why_not"] is not None), None)
        compared = sum(rank["compared"] for rank in ranks[::size])
        return Halves(compared, why_not, tuple(sorted(found, key=lambda difference: difference.order)))

    def write(self, folder: Path, rank: int, stage: int = 0) -> None:
        _file(folder, rank, stage).write_text(json.dumps(asdict(self)), "utf-8")


def _file(folder: Path, rank: int, stage: int) -> Path:
    return folder / f"rank-{rank}-halves-{stage}.json"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether all bits are equal, so that NaN equals itself and zero does not equal minus zero."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class RecordedHalves:
    """A copy of the hidden states after each half, in every step until `close`."""

    def __init__(
        self, prepared: PreparedLayers | None, why_not: str | None, others: Sequence[PreparedLayers | None] = ()
    ) -> None:
        """Start to record. `prepared`: None if the layers cannot run in one call, for the reason `why_not`. `others`:
        the layers of other steps, such as steps without adapters."""
        self._prepared = prepared
        self._all = [one for one in (prepared, *others) if one is not None]
        self._may_lack_steps = bool(others)
        self._why_not = why_not
        self._steps: list[list[Tensor]] = []  # [steps][halves], each [T, hidden]
        for one in self._all:
            one.after_branch = self._keep

    def _keep(self, number: int, hidden: Tensor) -> None:
        if number == 0:
            self._steps.append([])
        self._steps[-1].append(hidden.clone())

    def close(self) -> None:
        """Record no more. Existing recordings stay."""
        for one in self._all:
            one.after_branch = None

    def compare(self, separate: Sequence[dict[str, Tensor]], rank: int, halves: Sequence[Half]) -> Halves:
        """Compare the halves with `separate`, the tensors of the separate operations by name, for each of the same
        steps. `halves`: of the stage, in their order."""
        lacks_steps = self._may_lack_steps and len(self._steps) != len(separate)
        if self._prepared is None or lacks_steps:
            return Halves(0, self._why_not or "some steps, as with an adapter of experts, run layer by layer")
        found = []
        for number, half in enumerate(halves):
            if half.tensor is None:
                continue
            pairs = [(served[number], step[half.tensor]) for served, step in zip(self._steps, separate, strict=True)]
            wrong = [(one.double() - other.double()).abs().max() for one, other in pairs if not same_bits(one, other)]
            if wrong:
                largest = torch.stack(wrong).max().item()
                found.append(HalfDifference(half.layer, half.title, rank, largest, half.branch))
        return Halves(sum(half.tensor is not None for half in halves), None, tuple(found))
