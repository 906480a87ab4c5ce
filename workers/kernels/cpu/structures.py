"""The structures that Python passes to the C++ kernels, and their comparison with the loaded library.

A class CNAME is the structure NAME in `csrc/`, field by field. `csrc/structures.cpp` reports the layout of each as it
was compiled; it needs a line for a new structure, and a name for a new field.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_long, c_uint64, c_void_p
from itertools import zip_longest

from oarlock.base.errors import StartupError
from oarlock.workers.sampling_parameters import PENALTY_NAMES, ROW_NAMES

# `kMostRotaries`, `kMostQueryScales`, `kMostPagesGroups` in csrc/layer/layer.h
MOST_ROTARIES, MOST_QUERY_SCALES, MOST_PAGES_GROUPS = 4, 4, 4


class CAttentionStep(ctypes.Structure):
    _fields_ = (
        ("tables", c_void_p),
        ("rows", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("seqs", c_long),
        ("table_width", c_long),
    )


class CAttentionLayer(ctypes.Structure):
    _fields_ = (
        ("heads", c_long),
        ("kv_heads", c_long),
        ("head_dim", c_long),
        ("value_dim", c_long),
        ("block_size", c_long),
        ("window", c_long),
        ("chunk", c_long),
        ("scale", c_float),
        ("softcap", c_float),
        ("pages", c_int),
        ("value_in_key", c_int),
    )


class CRankGroup(ctypes.Structure):
    """One rank's view of the shared memory of collectives."""

    _fields_ = (
        ("flags", c_void_p),
        ("inputs", c_void_p),
        ("buffer_bytes", c_long),
        ("rank", c_long),
        ("size", c_long),
        ("collective", c_uint64),  # the latest that this rank has entered
        ("spin_s", c_double),
        ("yields", c_long),
        ("timeout_s", c_double),
    )


class CHeadsOfRank(ctypes.Structure):
    """The query and KV heads of a rank among all heads."""

    _fields_ = (
        ("heads", c_long),
        ("kv_heads", c_long),
        ("all_heads", c_long),
        ("all_kv_heads", c_long),
        ("first_head", c_long),
        ("first_kv_head", c_long),
        ("sums_keys", c_int),
    )


class CRouter(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("correction", c_void_p),
        ("outputs", c_long),
        ("hidden", c_long),
        ("top_k", c_long),
        ("groups", c_long),
        ("top_groups", c_long),
        ("best_of_group", c_long),
        ("is_sigmoid", c_int),
        ("is_normalised", c_int),
        ("corrects_logits", c_int),
        ("is_mixer", c_int),
        ("least_sum", c_double),
        ("added_to_sum", c_double),
        ("scale", c_double),
        ("tolerance", c_double),
    )


class CExpert(ctypes.Structure):
    _fields_ = (
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("gate_up_kind", c_int),
        ("down_kind", c_int),
    )


class CExperts(ctypes.Structure):
    _fields_ = (
        ("experts", c_void_p),
        ("first", c_long),
        ("count", c_long),
        ("hidden", c_long),
        ("width", c_long),
        ("slices", c_long),
        ("groups", c_long),
        ("group", c_long),
        ("only_slice", c_long),
        ("activation", c_int),
        ("alpha", c_float),
        ("limit", c_float),
        ("weighs_inputs", c_int),
    )


class CGroupedSource(ctypes.Structure):
    _fields_ = (
        ("values", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("factors", c_void_p),
        ("value_indices", c_void_p),
        ("input_order", c_void_p),
        ("columns", c_long),
        ("stride", c_long),
        ("scales_per_row", c_long),
        ("stored_group", c_long),
        ("slices", c_long),
        ("length", c_long),
        ("bits", c_int),
        ("group", c_int),
        ("is_gated", c_int),
        ("is_float", c_int),
        ("kind", c_int),
    )


class CPackedWeight(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("columns", c_long),
        ("inputs", c_long),
        ("epilogue", c_int),
        ("kind", c_int),
        ("slices", c_int),
    )


class CAdapterPairs(ctypes.Structure):
    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("scales", c_void_p),
        ("ranks", c_void_p),
        ("ends", c_void_p),
        ("parts", c_long),
        ("max_rank", c_long),
        ("inputs", c_long),
        ("outputs", c_long),
        ("slices", c_long),
        ("block", c_long),
        ("panel", c_long),
    )


class CAdaptedWeight(ctypes.Structure):
    _fields_ = (("weight", CPackedWeight), ("pairs", c_void_p))


class CExpertPairs(ctypes.Structure):
    _fields_ = (("gate_up", c_void_p), ("down", c_void_p))


class CExpertAdapters(ctypes.Structure):
    _fields_ = (("pairs", c_void_p), ("rows", c_void_p))


class CAdapterRows(ctypes.Structure):
    _fields_ = (("rows", c_void_p), ("starts", c_void_p), ("slots", c_void_p), ("spans", c_long))


class CNorm(ctypes.Structure):
    _fields_ = (
        ("scale", c_void_p),
        ("shift", c_void_p),
        ("width", c_long),
        ("eps", c_float),
        ("is_layer_norm", c_int),
    )


class CHeadsAndPages(ctypes.Structure):
    _fields_ = (
        ("attention", c_void_p),
        ("head_norm", c_void_p),
        ("k_pages", c_void_p),
        ("v_pages", c_void_p),
        ("rotary", c_int),
        ("interleaved", c_int),
        ("eps", c_float),
        ("row_norm", c_void_p),
        ("sinks", c_void_p),
        ("norms_last", c_int),
        ("query_scale", c_int),
        ("pages", c_int),
        ("has_keys", c_int),
    )


class CAddition(ctypes.Structure):
    _fields_ = (("norm", c_void_p), ("width", c_long), ("scale", c_float))


class CClamp(ctypes.Structure):
    _fields_ = (("width", c_long), ("limit", c_float))


class CMoELayer(ctypes.Structure):
    _fields_ = (
        ("router", c_void_p),
        ("routed", c_void_p),
        ("shared", c_void_p),
        ("shared_gate", c_void_p),
        ("router_norm", c_void_p),
        ("norm", c_void_p),
        ("expert_scale", c_void_p),
        ("routed_pairs", c_void_p),
        ("shared_pairs", c_void_p),
        ("first_identity", c_long),
        ("identity_rows", c_int),
    )


class CStateStep(ctypes.Structure):
    """The arrays of a `StateStep`."""

    _fields_ = (
        ("starts", c_void_p),
        ("reads", c_void_p),
        ("writes", c_void_p),
        ("save_starts", c_void_p),
        ("save_lens", c_void_p),
        ("save_slots", c_void_p),
        ("seqs", c_long),
    )


class CConvolution(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("channels", c_long), ("taps", c_long), ("silu", c_int))


class CDeltaHeads(ctypes.Structure):
    _fields_ = (
        ("key_heads", c_long),
        ("value_heads", c_long),
        ("key_width", c_long),
        ("value_width", c_long),
        ("decays_channels", c_int),
    )


class CKimiGates(ctypes.Structure):
    _fields_ = (
        ("a_log", c_void_p),
        ("dt_bias", c_void_p),
        ("heads", c_long),
        ("width", c_long),
        ("lower_bound", c_float),
    )


class CMambaHeads(ctypes.Structure):
    _fields_ = (
        ("a", c_void_p),
        ("d", c_void_p),
        ("heads", c_long),
        ("groups", c_long),
        ("head_width", c_long),
        ("state_width", c_long),
    )


class CGatedNorm(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("heads", c_long),
        ("width", c_long),
        ("eps", c_float),
        ("gates_first", c_int),
        ("group_heads", c_long),
        ("all_heads", c_long),
        ("first_head", c_long),
        ("sigmoid", c_int),
    )


class CColumns(ctypes.Structure):
    _fields_ = (("rows", c_int), ("first", c_long), ("stride", c_long))


class CConvolutionLayer(ctypes.Structure):
    _fields_ = (("convolution", CConvolution), ("states", c_void_p), ("inputs", CColumns))


class CDeltaLayer(ctypes.Structure):
    _fields_ = (
        ("heads", CDeltaHeads),
        ("states", c_void_p),
        ("a_log", c_void_p),
        ("dt_bias", c_void_p),
        ("beta_scale", c_float),
        ("gates", c_int),
    )


class CKimiDeltaLayer(ctypes.Structure):
    _fields_ = (
        ("heads", CDeltaHeads),
        ("gates", CKimiGates),
        ("states", c_void_p),
        ("decays", c_int),
        ("rates", c_int),
    )


class CMambaLayer(ctypes.Structure):
    _fields_ = (
        ("heads", CMambaHeads),
        ("states", c_void_p),
        ("step_bias", c_void_p),
        ("least", c_float),
        ("most", c_float),
        ("scale", c_float),
        ("steps", CColumns),
    )


class CGatedNormLayer(ctypes.Structure):
    _fields_ = (("norm", CGatedNorm), ("gate", CColumns))


class CColumnProduct(ctypes.Structure):
    _fields_ = (("left", CColumns), ("right", CColumns), ("width", c_long))


class CColumnScale(ctypes.Structure):
    _fields_ = (("columns", CColumns), ("width", c_long), ("scale", c_float))


class CHeadColumns(ctypes.Structure):
    _fields_ = (("columns", CColumns), ("norm", c_void_p), ("heads", c_long), ("width", c_long), ("eps", c_float))


class CLatentHeads(ctypes.Structure):
    _fields_ = (
        ("norm", c_void_p),
        ("heads", c_long),
        ("nope_width", c_long),
        ("rope_width", c_long),
        ("kv_rank", c_long),
        ("eps", c_float),
        ("rotary", c_int),
        ("interleaved", c_int),
        ("rows", c_int),
    )


class CHeadMatmul(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("heads", c_long), ("columns", c_long), ("inputs", c_long))


class CHeadMatmulLayer(ctypes.Structure):
    _fields_ = (("matmul", CHeadMatmul), ("x_width", c_long), ("y_width", c_long))


class CLatentPages(ctypes.Structure):
    _fields_ = (("attention", c_void_p), ("k_pages", c_void_p), ("pages", c_int), ("rows", c_int))


class CHeadGate(ctypes.Structure):
    _fields_ = (("gates", c_long), ("width", c_long), ("is_softplus", c_int))


class COperation(ctypes.Structure):
    _fields_ = (("kind", c_int), ("source", c_int), ("target", c_int), ("parameters", c_void_p))


class CBranch(ctypes.Structure):
    _fields_ = (
        ("operations", c_void_p),
        ("count", c_long),
        ("before_all_reduce", c_long),
        ("rows_at_once", c_long),
        ("widths", c_long * 4),
        ("sums", c_long),
        ("low", c_long),
    )


class CRotaryRows(ctypes.Structure):
    _fields_ = (("rows", c_void_p), ("width", c_long))


class CLayerStep(ctypes.Structure):
    _fields_ = (
        ("hidden", c_void_p),
        ("normed", c_void_p * 2),
        ("partial", c_void_p),
        ("rows", c_long),
        ("width", c_long),
        ("type", c_int),
        ("positions", c_void_p),
        ("slots", c_void_p * MOST_PAGES_GROUPS),
        ("rotary", CRotaryRows * MOST_ROTARIES),
        ("query_scales", c_void_p * MOST_QUERY_SCALES),
        ("attention", c_void_p * MOST_PAGES_GROUPS),
        ("states", c_void_p),
        ("layer_inputs", c_void_p),
        ("inputs_width", c_long),
        ("adapters", c_void_p),
        ("identity_weights", c_void_p),
        ("group", c_void_p),
    )


# Arrays of `StepMetadata` and `StepOutput`. All have 32 bits per element, except seeds and `history_firsts` with 64.
ROW_ARRAYS = ("target_ids", *ROW_NAMES, "seeds", "sample_positions", "num_logprobs")
BIAS_ARRAYS = ("bias_rows", "bias_ids", "bias_values")
PENALTY_ARRAYS = ("penalty_rows", *PENALTY_NAMES)
HISTORY_ARRAYS = ("history_firsts", "history_lengths", "history_ids", "history_counts")
MASK_ARRAYS = ("mask_rows", "mask_bits")


def _pointers(*names: str) -> list[tuple[str, type[c_void_p]]]:
    return [(name, c_void_p) for name in names]


class CLogitsChanges(ctypes.Structure):
    _fields_ = (
        ("num_bias", c_long),
        *_pointers(*BIAS_ARRAYS),
        ("num_penalties", c_long),
        *_pointers(*PENALTY_ARRAYS, *HISTORY_ARRAYS),
        ("num_masks", c_long),
        ("mask_words", c_long),
        *_pointers(*MASK_ARRAYS),
    )


class CSamplingStep(ctypes.Structure):
    _fields_ = (("rows", c_long), ("vocab_size", c_long), *_pointers(*ROW_ARRAYS), ("changes", CLogitsChanges))


class CSamplingOutput(ctypes.Structure):
    _fields_ = (
        ("top_columns", c_long),
        *_pointers("token_ids", "tops", "logprobs", "ranks", "top_ids", "top_logprobs"),
    )


# In the order of the report.
STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    CAttentionStep, CAttentionLayer, CRankGroup, CHeadsOfRank, CRouter, CExpert, CExperts, CGroupedSource,
    CPackedWeight, CAdapterPairs, CAdaptedWeight, CExpertPairs, CExpertAdapters, CAdapterRows, CNorm, CHeadsAndPages,
    CAddition, CClamp, CMoELayer, CStateStep, CConvolution, CDeltaHeads, CKimiGates, CMambaHeads, CGatedNorm, CColumns,
    CConvolutionLayer, CDeltaLayer, CKimiDeltaLayer, CMambaLayer, CGatedNormLayer, CColumnProduct, CColumnScale,
    CHeadColumns, CLatentHeads, CHeadMatmul, CHeadMatmulLayer, CLatentPages, CHeadGate, COperation, CBranch,
    CRotaryRows, CLayerStep, CLogitsChanges, CSamplingStep, CSamplingOutput,
)  # fmt: skip


def check_structures(kernels: ctypes.CDLL, structures: Sequence[type[ctypes.Structure]] = STRUCTURES) -> None:
    """Compare `structures` with the library's report. Raises `StartupError` for the first line that differs."""
    report = kernels.oarlock_structures
    report.restype, report.argtypes = ctypes.c_char_p, []
    compiled = report().decode().splitlines()
    declared = [line for structure in structures for line in _layout(structure)]
    for theirs, ours in zip_longest(compiled, declared, fillvalue="nothing"):
        if theirs != ours:
            raise StartupError(
                f"A structure differs between the compiled kernels ({theirs}) and Python ({ours}).",
                "Make the classes in workers/kernels/cpu/structures.py equal to csrc/structures.cpp and its headers.",
            )


def _layout(structure: type[ctypes.Structure]) -> list[str]:
    """Return the lines that the library must report: the structure's size, then the fields with their offsets."""
    title = structure.__name__.removeprefix("C")
    lines = [f"{title}: {ctypes.sizeof(structure)} bytes"]
    for name, kind, *_ in structure._fields_:
        field = getattr(structure, name)
        element = kind
        while isinstance(inner := getattr(element, "_type_", "struct"), type):  # the elements of an array
            element = inner
        lines.append(f"{title}.{name}: offset {field.offset}, {field.size} bytes of type {inner}")
    return lines
