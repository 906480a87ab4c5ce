"""A whole step's sampling in one call, on a rank that has all of the vocabulary: `sample.cpp`.

Each row is changed, sampled and scored while it is in the cache. The same tokens as `workers/sampling/sampler.py`
chooses by its own steps, and logprobs equal to rounding; tests compare the two.
"""

import ctypes

import numpy as np
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.protocol import StepMetadata

# sections of `StepMetadata`; all are of 32 bits but for seeds, of 64
_COLUMNS = ("target_ids", "temperature", "top_p", "top_k", "min_p", "seeds", "sample_positions", "num_logprobs")
_BIAS = ("bias_rows", "bias_ids", "bias_values")
_PENALTIES = ("penalty_rows", "repetition", "frequency", "presence")
_HISTORIES = ("history_firsts", "history_lengths", "history_ids", "history_counts")
_MASKS = ("mask_rows", "mask_bits")
_FLOATS = {"temperature", "top_p", "min_p", "bias_values", "repetition", "frequency", "presence"}
_OUTPUTS = ("token_ids", "tops", "logprobs", "ranks", "top_ids", "top_logprobs")


def _structure(*parts: str | tuple[str, ...]) -> list[tuple[str, type[ctypes.c_long] | type[ctypes.c_void_p]]]:
    """Fields of a structure: a name alone is a number, names in a tuple are pointers."""
    fields: list[tuple[str, type[ctypes.c_long] | type[ctypes.c_void_p]]] = []
    for part in parts:
        if isinstance(part, str):
            fields.append((part, ctypes.c_long))
        else:
            fields += [(name, ctypes.c_void_p) for name in part]
    return fields


class _Step(ctypes.Structure):
    """`Step` of `sample.cpp`, field by field."""

    _fields_ = _structure(
        "rows", "vocab_size", _COLUMNS,
        "num_bias", _BIAS,
        "num_penalties", _PENALTIES, _HISTORIES,
        "num_masks", "mask_words", _MASKS,
    )  # fmt: skip


class _Output(ctypes.Structure):
    """`Output` of `sample.cpp`, field by field."""

    _fields_ = _structure("top_columns", _OUTPUTS)


def sample(
    logits: Tensor, step: StepMetadata, histories: tuple[np.ndarray, ...], vocab_size: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The largest logit of each row after its changes, float32 [L], and the arrays of a `StepOutput` but for `finite`.

    `logits`: float32 [L, V], not changed; ids from `vocab_size` on are padding with -inf. `histories`: the arrays of
    `Entries`, of the rows with penalties if there are any.
    """
    rows, width = logits.shape
    given = _Step(rows=rows, vocab_size=vocab_size)
    kept = _point(given, step, _COLUMNS)
    for count, names in (("num_bias", _BIAS), ("num_penalties", _PENALTIES), ("num_masks", _MASKS)):
        if number := len(getattr(step, names[0])):
            setattr(given, count, number)
            kept += _point(given, step, names)
    if given.num_penalties:
        kept += histories
        for name, array in zip(_HISTORIES, histories, strict=True):
            assert array.flags.c_contiguous and array.itemsize == (8 if name == "history_firsts" else 4), name
            setattr(given, name, array.ctypes.data)
    given.mask_words = step.mask_bits.shape[1]
    columns = {"token_ids": np.empty(rows, np.int32)}
    reporting = (step.num_logprobs >= 0).any() or (step.target_ids >= 0).any()
    most = max(0, step.max_num_logprobs)
    if reporting:
        columns["logprobs"] = np.zeros(rows, np.float32)
        columns["ranks"] = np.zeros(rows, np.int32)
        columns["top_ids"] = np.full((rows, most), -1, np.int32)
        columns["top_logprobs"] = np.full((rows, most), -np.inf, np.float32)
    tops = np.empty(rows, np.float32)
    taken = _Output(top_columns=most, tops=tops.ctypes.data)
    for name, array in columns.items():
        setattr(taken, name, array.ctypes.data)
    library.library().oarlock_sample(
        ctypes.c_void_p(logits.data_ptr()), ctypes.c_long(logits.stride(0)), ctypes.c_long(width),
        ctypes.byref(given), ctypes.byref(taken),
    )  # fmt: skip
    return tops, columns


def _point(given: _Step, step: StepMetadata, names: tuple[str, ...]) -> list[np.ndarray]:
    """Set the fields `names` to the step's arrays, which must live until the call returns."""
    arrays = [np.ascontiguousarray(getattr(step, name)) for name in names]
    for name, array in zip(names, arrays, strict=True):
        assert array.dtype.kind == ("f" if name in _FLOATS else "u" if name == "mask_bits" else "i"), name
        assert array.itemsize == (8 if name == "seeds" else 4), name
        setattr(given, name, array.ctypes.data)
    return arrays
