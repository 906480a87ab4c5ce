"""Sampling from whole rows of logits on a CUDA device, with Triton kernels.

It computes the same as `Sampler`, its reference implementation. The launches and their shapes depend only on the
`Variant` and the number of rows, and nothing is read back between them, so that they can be captured in a CUDA graph
and replayed with other columns.

    processed   the changed logits, next to the raw logits
    survey      one pass over all logits: maximum, best noisy score and probability mass of each block of 128 ids
    choose      from these: states, tokens of rows without filters, and the blocks that matter for rows with filters
    filtered    draws from the 64 best blocks, and in rounds if these are not enough
    logprobs    a pass over the raw logits of the rows that report logprobs, then their best logprobs in order
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.distributed.topology import VOCAB_SLICES
from oarlock.workers.protocol import MAX_LOGPROBS, StepMetadata, StepOutput, empty_step, mask_words
from oarlock.workers.sampling.columns import SamplingColumns, Variant, sections, write_rows
from oarlock.workers.sampling.sampler import num_accepted
from oarlock.workers.sampling.token_histories import DenseHistories


@dataclass(frozen=True, slots=True)
class DeviceOutputs:
    """Results of R rows, at least the step's number of logits rows. The last four are written if it reports
    logprobs."""

    tokens: Tensor  # int32 [R]   sampled or scored tokens
    states: Tensor  # int32 [R]   `StepOutput.finite`
    logprobs: Tensor  # float32 [R]
    ranks: Tensor  # int32 [R]
    top_ids: Tensor  # int32 [R, MAX_LOGPROBS]
    top_logprobs: Tensor  # float32 [R, MAX_LOGPROBS]

    @staticmethod
    def empty(rows: int, device: torch.device) -> "DeviceOutputs":
        """Allocate new tensors."""
        types = {"<i4": torch.int32, "<f4": torch.float32}
        columns = {
            name: torch.empty(shape, dtype=types[dtype], device=device) for name, dtype, shape in output_sections(rows)
        }
        return DeviceOutputs(**columns)

    def on_host(self) -> dict[str, np.ndarray]:
        """Copy the results to the host. Waits for the device."""
        return {column.name: getattr(self, column.name).cpu().numpy() for column in fields(self)}


def output_sections(rows: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, dtype and shape of the outputs of `rows` rows. A step without logprobs has only the first two."""
    return [
        ("tokens", "<i4", (rows,)),
        ("states", "<i4", (rows,)),
        ("logprobs", "<f4", (rows,)),
        ("ranks", "<i4", (rows,)),
        ("top_ids", "<i4", (rows, MAX_LOGPROBS)),
        ("top_logprobs", "<f4", (rows, MAX_LOGPROBS)),
    ]


def output_of(step: StepMetadata, found: Mapping[str, np.ndarray]) -> StepOutput:
    """Return the output of `step`, copied from arrays with the names and shapes of `output_sections`."""
    rows = len(step.logits_indices)
    out = StepOutput(step.step_id, found["tokens"][:rows].copy(), found["states"][:rows].astype(np.uint8))
    if ((step.num_logprobs >= 0) | (step.target_ids >= 0)).any():
        most = max(0, step.max_num_logprobs)
        out.logprobs, out.ranks = found["logprobs"][:rows].copy(), found["ranks"][:rows].copy()
        out.top_ids, out.top_logprobs = (found[name][:rows, :most].copy() for name in ("top_ids", "top_logprobs"))
    if len(step.num_drafts):
        out.num_accepted = num_accepted(step, torch.from_numpy(out.token_ids)).numpy()
    return out


BLOCK = 128
_SURVEYED = 16  # blocks of one program: [16, 128] logits
_SHORT = 64  # blocks that usually contain all logits that filters keep
_LONG = 16  # blocks per iteration in rounds
_BIASED = 256  # bias entries per iteration


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Intermediate results of the kernels for up to L rows."""

    maxima: Tensor  # float32 [L, B]
    screens: Tensor  # float32 [L, B]
    masses: Tensor  # float32 [L, B]
    listed: Tensor  # int32 [L, B]
    num_listed: Tensor  # int32 [L]
    short: Tensor  # int32 [L, SHORT]
    short_end: Tensor  # int32 [L, 2]
    totals: Tensor  # float64 [L]
    peaks: Tensor  # float32 [L]
    floors: Tensor  # float32 [L]
    spreads: Tensor  # float64 [L, VOCAB_SLICES, 3]
    pending: Tensor  # int32 [L]
    adjusted: Tensor  # float32 [L, V]   logits of rows that bias, penalties or masks change, after the change
    per_tile: Tensor  # int32 [L, tiles]   number of ids that masks allow; later, of logits above a token's
    banned: Tensor  # int32 [L]


class DeviceSampler:
    """Sampler with Triton kernels for a vocabulary of V ids and at most `max_rows` rows of logits at a time."""

    # Steps that together launch every variant of every kernel.
    _forms = (Variant(), Variant(random=True), Variant(random=True, filtered=True), Variant(True, True, True, True))

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        histories: DenseHistories,
        device: torch.device,
        short: int = _SHORT,
        first_id: int = 0,
    ) -> None:
        """Allocate the scratch memory.

        `histories`: of all ids, of which this sampler has V, beginning with `first_id`. `short`: number of blocks, a
        power of 2, that are tried before sampling in rounds.
        """
        from oarlock.workers.kernels.triton.sampling import choose, filters, logprobs, processors

        self._kernels: Any = choose, filters, logprobs, processors  # a call compiles the kernel: no annotations
        self.vocab_size, self.max_rows, self.histories = vocab_size, max_rows, histories
        self._first_id, self._width = first_id, histories.seen.shape[1]
        self._device, self._short = device, short
        self._blocks = max(1, -(-vocab_size // BLOCK))
        self._tiles = -(-self._blocks // _SURVEYED)
        self._scratch = self._make_scratch()

    def _make_scratch(self) -> _Scratch:
        rows, blocks = self.max_rows, self._blocks

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=self._device)

        ints, floats = torch.int32, torch.float32
        return _Scratch(
            maxima=empty(floats, blocks), screens=empty(floats, blocks), masses=empty(floats, blocks),
            listed=empty(ints, blocks), num_listed=empty(ints), short=empty(ints, self._short),
            short_end=empty(ints, 2), totals=empty(torch.float64), peaks=empty(floats), floors=empty(floats),
            pending=empty(ints), adjusted=empty(floats, self.vocab_size),
            per_tile=empty(ints, self._tiles), banned=empty(ints), spreads=empty(torch.float64, VOCAB_SLICES, 3),
        )  # fmt: skip

    def sample(
        self, logits: Tensor, columns: SamplingColumns, outputs: DeviceOutputs, variant: Variant, first: int = 0
    ) -> None:
        """Sample rows `first` to `first + L` of the columns into the same rows of the outputs.

        `logits`: float32 [L, V or more], not changed. `variant`: at least the kernels that these rows need.
        """
        assert len(logits) <= self.max_rows and logits.stride(1) == 1
        if variant.processed:
            self._process(logits, columns, first)
        self._choose(logits, columns, outputs, variant, first)
        if variant.random and variant.filtered:
            self._filter(logits, columns, outputs, variant, first)
        if variant.logprobs:
            self._report(logits, columns, outputs, first)

    def warm_up(self, width: int) -> None:
        """Compile all kernels, which takes seconds unless Triton has cached them in an earlier start.

        `width`: elements between the starts of two rows of logits.
        """
        arrays = {name: np.empty(shape, dtype) for name, dtype, shape in sections(1)}
        write_rows(empty_step(0), arrays)
        arrays |= {
            "bias": np.zeros((1, 2), np.int32),
            "mask_bits": np.zeros((1, mask_words(self._width)), np.int32),
        }
        columns = SamplingColumns(**{name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()})
        outputs = DeviceOutputs.empty(1, self._device)
        logits = torch.zeros((1, width), dtype=torch.float32, device=self._device)
        for variant in self._forms:
            self.sample(logits, columns, outputs, variant)
        self.count(columns, outputs, 1)

    def count(self, columns: SamplingColumns, outputs: DeviceOutputs, rows: int) -> None:
        """Add the tokens of the first `rows` rows to the histories: all rows of the step, after the last `sample`."""
        _, _, _, processors = self._kernels
        processors.count_sampled[(rows,)](
            self.histories.seen, outputs.tokens, columns.history_rows, columns.guesses, columns.drafts_before,
            self._width, num_warps=1,
        )  # fmt: skip

    def _process(self, logits: Tensor, columns: SamplingColumns, first: int) -> None:
        _, _, _, processors = self._kernels
        c, s, rows = columns, self._scratch, len(logits)
        penalties = c.changed, c.history_rows, c.repetition, c.frequency, c.presence, c.guesses, c.drafts_before
        words = c.mask_bits.shape[1]
        processors.penalise_and_mask[(rows, self._tiles)](
            logits, s.adjusted, s.per_tile, self.histories.seen, *penalties, c.mask_index, c.mask_bits,
            first, self._first_id, logits.stride(0), self.vocab_size, self._width, self._tiles, words,
            TILE=_SURVEYED * BLOCK, num_warps=8,
        )  # fmt: skip
        processors.add_bias[(rows,)](
            logits, s.adjusted, s.banned, self.histories.seen, *penalties, c.mask_index, c.mask_bits,
            c.bias_starts, c.bias, first, self._first_id, logits.stride(0), self.vocab_size, self._width, words,
            TILE=_BIASED, num_warps=4,
        )  # fmt: skip

    def _choose(self, logits: Tensor, c: SamplingColumns, out: DeviceOutputs, variant: Variant, first: int) -> None:
        choose, _, _, _ = self._kernels
        s, rows = self._scratch, len(logits)
        # Steps with changed rows share one variant of the kernels, since each variant takes seconds to compile.
        random = variant.random or variant.processed
        filtered = (variant.random and variant.filtered) or variant.processed
        parts = {"RANDOM": random, "FILTERED": filtered, "PROCESSED": variant.processed}
        self._survey(logits, c, first, parts)
        if filtered:
            choose.spread[(rows, VOCAB_SLICES)](
                logits, s.adjusted, s.spreads, c.changed, c.top_n_sigma, first, logits.stride(0), self.vocab_size,
                PROCESSED=variant.processed, num_warps=1,
            )  # fmt: skip
        choose.choose[(rows,)](
            logits, s.adjusted, s.maxima, s.screens, s.masses, s.per_tile, s.banned, s.listed, s.num_listed, s.short,
            s.short_end, s.totals, s.peaks, s.floors, out.tokens, out.states, c.changed, c.target_ids, c.temperature,
            c.top_p, c.top_k, c.min_p, c.top_n_sigma, s.spreads, c.keys, first, logits.stride(0), self.vocab_size,
            self._blocks, self._tiles, WIDTH=power_of_2(self._blocks), TILES=power_of_2(self._tiles),
            SHORT=self._short, num_warps=4, **parts,
        )  # fmt: skip

    def _survey(self, logits: Tensor, c: SamplingColumns, first: int, parts: dict[str, bool]) -> None:
        choose, _, _, _ = self._kernels
        s = self._scratch
        choose.survey[(len(logits), self._tiles)](
            logits, s.adjusted, s.maxima, s.screens, s.masses, c.changed, c.temperature, c.keys,
            first, self._first_id, logits.stride(0), self.vocab_size, self._blocks, TILE=_SURVEYED, num_warps=4,
            **parts,
        )  # fmt: skip

    def _filter(self, logits: Tensor, c: SamplingColumns, out: DeviceOutputs, variant: Variant, first: int) -> None:
        _, filters, _, _ = self._kernels
        s, rows = self._scratch, len(logits)
        options = c.temperature, c.top_p, c.top_k, c.keys, first, logits.stride(0), self.vocab_size
        filters.draw_kept[(rows,)](
            logits, s.adjusted, s.short, s.short_end, s.totals, s.peaks, s.floors, s.pending, out.tokens, out.states,
            c.changed, c.target_ids, *options, SHORT=self._short, PROCESSED=variant.processed, num_warps=16,
        )  # fmt: skip
        filters.draw_in_rounds[(rows,)](
            logits, s.adjusted, s.listed, s.num_listed, s.peaks, s.floors, s.pending, out.tokens, c.changed, *options,
            self._blocks, TILE=_LONG, PROCESSED=variant.processed, num_warps=8,
        )  # fmt: skip

    def _report(self, logits: Tensor, c: SamplingColumns, out: DeviceOutputs, first: int) -> None:
        _, _, logprobs, _ = self._kernels
        s, rows = self._scratch, len(logits)
        sizes = first, logits.stride(0), self.vocab_size, self._blocks, self._tiles
        logprobs.survey_raw[(rows, self._tiles)](
            logits, s.maxima, s.masses, s.per_tile, out.tokens, c.num_logprobs, c.target_ids, *sizes,
            TILE=_SURVEYED, num_warps=4,
        )  # fmt: skip
        logprobs.report_logprobs[(rows,)](
            logits, s.maxima, s.masses, s.per_tile, out.tokens, out.logprobs, out.ranks, out.top_ids,
            out.top_logprobs, out.states, c.num_logprobs, c.target_ids, *sizes, MOST=MAX_LOGPROBS,
            MOST_WIDTH=power_of_2(MAX_LOGPROBS), WIDTH=power_of_2(self._blocks), TILES=power_of_2(self._tiles),
            num_warps=8,
        )  # fmt: skip


def power_of_2(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
