"""Sampling kernels on the CPU: one rank's logits of a step, by the C++ code of `csrc/sampling/sampling.cpp`.

The interface is the same as in `workers/sampling/logits_shard.py`, which uses torch operations; tests compare the two.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.structures import (
    BIAS_ARRAYS,
    HISTORY_ARRAYS,
    MASK_ARRAYS,
    PENALTY_ARRAYS,
    ROW_ARRAYS,
    CLogitsChanges,
    CSamplingOutput,
    CSamplingStep,
)
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.sampling_parameters import PENALTIES, ROWS, RowColumns

BLOCK = 128


def can_serve(device: torch.device) -> bool:
    """Return whether the kernels support logits on `device`, and could be built here."""
    return device.type == "cpu" and library.provides("oarlock_logits_maxima")


class KernelLogitsShard:
    """`LogitsShard` with the C++ kernels. Methods and tensors are the same as in `TorchLogitsShard`."""

    def __init__(self, x: Tensor, first_id: int, slice_length: int) -> None:
        assert x.dtype == torch.float32 and x.is_contiguous()
        rows, width = x.shape
        self.x = x
        self.first_id = first_id
        self._slice_length = slice_length
        self._maxima = torch.empty((rows, -(-width // BLOCK)), dtype=torch.float32)
        self.top = torch.empty(rows, dtype=torch.float32)
        self._kernels = library.library()
        _function(self._kernels, "oarlock_logits_maxima", "pnnn pp")(
            x.data_ptr(), x.stride(0), width, rows, self._maxima.data_ptr(), self.top.data_ptr()
        )

    def argmax(self, rows: Tensor) -> Tensor:
        ids = torch.empty(len(rows), dtype=torch.int64)
        self._call("oarlock_logits_argmax", "p", rows, ids)
        return ids

    def best(self, rows: Tensor, count: int) -> Tensor:
        keys = torch.empty((len(rows), count), dtype=torch.int64)
        self._call("oarlock_logits_best", "nnp", rows, count, self.first_id, keys)
        return keys

    def draw(self, rows: Tensor, temperature: Tensor, keys: Tensor, low: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.empty(len(rows), dtype=torch.float64)
        ids = torch.empty(len(rows), dtype=torch.int64)
        self._call(
            "oarlock_logits_draw", "npppppp", rows,
            self.first_id, temperature, keys, low, end - self.first_id, scores, ids,
        )  # fmt: skip
        return scores, ids

    def mass(self, rows: Tensor, temperature: Tensor, peak: Tensor, low: Tensor, end: Tensor) -> Tensor:
        masses = torch.empty((len(rows), -(-self.x.shape[1] // self._slice_length)), dtype=torch.float64)
        self._call(
            "oarlock_logits_mass", "ppppnp", rows,
            temperature, peak, low, end - self.first_id, self._slice_length, masses,
        )  # fmt: skip
        return masses

    def spread(self, rows: Tensor) -> Tensor:
        spreads = torch.empty((len(rows), -(-self.x.shape[1] // self._slice_length), 3), dtype=torch.float64)
        self._call("oarlock_logits_spread", "np", rows, self._slice_length, spreads)
        return spreads

    def count_above(self, rows: Tensor, values: Tensor) -> Tensor:
        counts = torch.empty(len(rows), dtype=torch.int64)
        self._call("oarlock_logits_above", "pp", rows, values, counts)
        return counts

    def _call(self, name: str, kinds: str, rows: Tensor, *arguments: Tensor | int) -> None:
        function = _function(self._kernels, name, f"pnn pp pn {kinds}")
        kept = _contiguous(rows, *arguments)  # keeps the tensors alive until the call returns
        first, *others = (value.data_ptr() if isinstance(value, Tensor) else value for value in kept)
        function(
            self.x.data_ptr(), self.x.stride(0), self.x.shape[1],
            self._maxima.data_ptr(), self.top.data_ptr(), first, len(rows), *others,
        )  # fmt: skip


def draw_from_lists(
    keys: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, floors: Tensor, noise: Tensor, totals: Tensor
) -> tuple[Tensor, Tensor]:
    """Call `draw_from_list` of `workers/sampling/top_k_top_p.py` for `keys` [R, C] and the columns of their filters."""
    ids = torch.empty(len(keys), dtype=torch.int64)
    enough = torch.empty(len(keys), dtype=torch.bool)
    kept = [value.contiguous() for value in (keys, temperature, top_p, top_k, floors, noise, totals)]
    first, *others = (value.data_ptr() for value in kept)
    _function(library.library(), "oarlock_draw_from_lists", "pnn pppppppp")(
        first, keys.shape[1], len(keys), *others, ids.data_ptr(), enough.data_ptr()
    )
    return ids, enough


def floors(peak: Tensor, columns: RowColumns[Tensor], spreads: Tensor) -> Tensor:
    """Call `floors` of `workers/sampling/logits_shard.py` for spreads [R, 3] of whole rows: float64 [R]."""
    c = columns
    return _of_each_row("oarlock_floors", peak.double(), c.temperature, c.min_p, c.top_n_sigma, spreads)


def log_totals(peak: Tensor, mass: Tensor) -> Tensor:
    """Return `peak + log(mass)`: float64 [R]."""
    return _of_each_row("oarlock_log_totals", peak.double(), mass)


def _of_each_row(name: str, *columns: Tensor) -> Tensor:
    """Call a kernel that computes float64 [R] from columns float64 [R]."""
    kept = [column.contiguous() for column in columns]
    result = torch.empty(len(kept[0]), dtype=torch.float64)
    kinds = "n" + "p" * (len(kept) + 1)
    _function(library.library(), name, kinds)(len(result), *(column.data_ptr() for column in kept), result.data_ptr())
    return result


def _contiguous(*values: Tensor | int) -> list[Tensor | int]:
    return [value.contiguous() if isinstance(value, Tensor) else value for value in values]


@cache
def _function(
    kernels: ctypes.CDLL, name: str, kinds: str, result: type[ctypes.c_long] | None = None
) -> Callable[..., Any]:
    """Return a kernel with its types declared. `kinds`: p for a pointer, n for a long."""
    types = {"p": ctypes.c_void_p, "n": ctypes.c_long}
    function = getattr(kernels, name)
    function.argtypes, function.restype = [types[kind] for kind in kinds.replace(" ", "")], result
    return function


_FLOATS = {"bias_values", *(row.column for row in (*ROWS, *PENALTIES) if row.dtype == "<f4")}


def sample(
    logits: Tensor, step: StepMetadata, histories: tuple[np.ndarray, ...], vocab_size: int
) -> tuple[np.ndarray | None, dict[str, np.ndarray]]:
    """Sample a whole step in one call, on a rank that has the whole vocabulary.

    `logits`: float32 [L, V], not changed; ids from `vocab_size` on are padding with -inf. `histories`: the arrays of
    `Entries` for the rows with penalties, if there are any.

    Returns the largest logit of each row after its changes, float32 [L], or None if all are finite; and the arrays of a
    `StepOutput` except `finite`.

    Each row is changed, sampled and scored while it is in the cache. The tokens are the same as in
    `workers/sampling/sampler.py`, and logprobs are equal except for rounding; tests compare the two.
    """
    rows, width = logits.shape
    structures = step.made_once(_CStructures)
    c_step, c_output = structures.c_step, structures.c_output
    c_step.vocab_size = vocab_size
    if histories:
        for name, array in zip(HISTORY_ARRAYS, histories, strict=True):
            assert array.flags.c_contiguous and array.itemsize == (8 if name == "history_firsts" else 4), name
            setattr(c_step.changes, name, array.ctypes.data)
    kernels, step_at = library.library(), ctypes.addressof(c_step)
    columns = {}
    most = _function(kernels, "oarlock_most_logprobs", "p", ctypes.c_long)(step_at)
    if most >= 0:
        columns["logprobs"] = np.zeros(rows, np.float32)
        columns["ranks"] = np.zeros(rows, np.int32)
        columns["top_ids"] = np.full((rows, most), -1, np.int32)
        columns["top_logprobs"] = np.full((rows, most), -np.inf, np.float32)
        for name, array in columns.items():
            setattr(c_output, name, array.ctypes.data)
    c_output.top_columns = max(0, most)
    num_not_finite = _function(kernels, "oarlock_sample", "pnn pp", ctypes.c_long)(
        logits.data_ptr(), logits.stride(0), width, step_at, ctypes.addressof(c_output)
    )
    columns["token_ids"] = structures.token_ids.copy()
    return structures.tops.copy() if num_not_finite else None, columns


class _CStructures:
    """A step and its output as C structures, valid while the step's arrays keep their addresses.

    They are kept because collecting the addresses takes longer than the kernel needs for one row.
    """

    def __init__(self, step: StepMetadata) -> None:
        rows = len(step.logits_indices)
        self.c_step = _c_step(step, rows)
        self.tops, self.token_ids = np.empty(rows, np.float32), np.empty(rows, np.int32)
        self.c_output = CSamplingOutput(0, tops=self.tops.ctypes.data, token_ids=self.token_ids.ctypes.data)


def _c_step(step: StepMetadata, rows: int) -> CSamplingStep:
    """Return the step as the kernel reads it, without histories."""
    c_step = CSamplingStep(rows=rows)
    c_step.changes.mask_words = step.mask_bits.shape[1]
    _point(c_step, step, ROW_ARRAYS)
    for count, names in (("num_bias", BIAS_ARRAYS), ("num_penalties", PENALTY_ARRAYS), ("num_masks", MASK_ARRAYS)):
        if number := len(getattr(step, names[0])):
            setattr(c_step.changes, count, number)
            _point(c_step.changes, step, names)
    return c_step


def _point(structure: CSamplingStep | CLogitsChanges, step: StepMetadata, names: tuple[str, ...]) -> None:
    """Set the fields `names` of `structure` to the addresses of the step's arrays."""
    for name in names:
        array = getattr(step, name)
        assert array.flags.c_contiguous, name
        assert array.dtype.kind == ("f" if name in _FLOATS else "u" if name == "mask_bits" else "i"), name
        assert array.itemsize == (8 if name == "seeds" else 4), name
        setattr(structure, name, array.ctypes.data)
