"""Sections of a step that only some requests ask for: bias, penalties and masks of the rows that sample.

Penalties need the history of a sequence: its distinct ids and how often each was generated. It is sent once for each
use of a row; ranks keep it from there on, and count the tokens that they sample. Knows numpy and the step's layout.
Does not know which row of the engine's tables belongs to which sequence.
"""

import numpy as np

from oarlock.engine.input_batch.grammar_bitmask import GrammarBitmask, MaskedRows
from oarlock.engine.input_batch.logits_constraints import Constraints, IdentityCache
from oarlock.engine.sampling_params import penalises
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.workers.protocol import mask_words
from oarlock.workers.sampling_parameters import PENALTIES

ALWAYS = np.iinfo(np.int64).max
_NO_INTS = np.empty(0, np.int32)
# Index into the L rows, its sequence, the tokens it will have generated before this row's, and its drafts.
AskingRow = tuple[int, Sequence, int, tuple[int, ...]]
NO_BIAS = {"bias_rows": _NO_INTS, "bias_ids": _NO_INTS, "bias_values": np.empty(0, np.float32)}


class _PromptIds:
    """The distinct ids of one prompt, in order: int32 [p]."""

    def __init__(self, prompt_token_ids: tuple[int, ...]) -> None:
        self.made_from = prompt_token_ids
        ids = np.sort(np.array(prompt_token_ids, np.int32))
        self.ids = ids[np.diff(ids, prepend=-1) > 0]


_prompts = IdentityCache(_PromptIds)


class FirstHistory:
    """Distinct ids of one sequence's prompt, if penalties count them, and the history made from them."""

    def __init__(self, seq: Sequence) -> None:
        request = seq.request
        counts = request.params.repetition_penalty != 1  # the other penalties are of generated ids alone
        self._prompt = _prompts.get(request.prompt_token_ids) if counts else None

    def of(self, seq: Sequence) -> tuple[np.ndarray, np.ndarray]:
        """Distinct ids in order, and how often each was generated, 0 for those of the prompt only: int32 [n] each."""
        prompt = _NO_INTS if self._prompt is None else self._prompt.ids
        if len(seq.token_ids) == seq.num_prompt_tokens:
            return prompt, np.zeros_like(prompt)
        generated = np.array(seq.token_ids[seq.num_prompt_tokens :], np.int32)
        ids, times = np.unique(generated, return_counts=True)
        every = np.union1d(prompt, ids)
        counts = np.zeros_like(every)
        counts[np.searchsorted(every, ids)] = times
        return every, counts


class SamplingState:
    """Sampling state of one sequence, kept from step to step in `Sequence.sampling_state`. Made when first needed."""

    __slots__ = ("constraints", "history")

    def __init__(self, seq: Sequence, vocab_size: int) -> None:
        self.constraints = Constraints(seq, vocab_size)
        self.history: FirstHistory | None = FirstHistory(seq) if penalises(seq.request.params) else None


def wanted_until(seq: Sequence) -> int:
    """The first position from which on `seq` needs none of these sections."""
    params = seq.request.params
    if seq.masked_by or penalises(params):
        return ALWAYS
    return seq.num_prompt_tokens + params.min_tokens if seq.stop_ids else 0


def build_sampling_metadata(
    rows: list[AskingRow], vocab_size: int
) -> tuple[dict[str, np.ndarray], GrammarBitmask | None]:
    """Sections of `StepMetadata`, by field name, for `rows`, in index order.

    Also returns the masks whose bits are computed later; None when they are complete.
    """
    biases: list[tuple[int, np.ndarray, np.ndarray]] = []
    masked: list[MaskedRows] = []
    mask_rows: list[int] = []
    penalised: list[tuple[int, Sequence]] = []
    for index, seq, num_generated, drafts in rows:
        state = _state(seq, vocab_size)
        constraints = state.constraints
        bans = constraints.bans_now(num_generated)
        ids, values = constraints.bias(bans)
        if len(ids):
            biases.append((index, ids, values))
        if constraints.has_mask:
            mask_rows.append(index)
            if masked and masked[-1].seq is seq:  # the row after a draft
                masked[-1].bans.append(bans)
            else:
                masked.append(MaskedRows(seq, constraints, num_generated, [bans], drafts))
        if penalises(seq.request.params):
            penalised.append((index, seq))
    sections = {
        **(_bias_sections(biases) if biases else NO_BIAS),
        **(_penalty_sections(penalised) if penalised else {}),
    }
    if not masked:
        return sections, None
    sections["mask_rows"] = np.array(mask_rows, np.int32)
    masks = GrammarBitmask(masked, mask_words(vocab_size))
    if masks.follows_tokens:
        sections["mask_bits"] = masks.until_known
        return sections, masks
    sections["mask_bits"] = masks.compute()
    return sections, None


def _state(seq: Sequence, vocab_size: int) -> SamplingState:
    if seq.sampling_state is None:
        seq.sampling_state = SamplingState(seq, vocab_size)
    assert isinstance(seq.sampling_state, SamplingState)
    return seq.sampling_state


def _bias_sections(biases: list[tuple[int, np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    rows, ids, values = zip(*biases, strict=True)
    return {
        "bias_rows": np.repeat(np.array(rows, np.int32), [len(some) for some in ids]),
        "bias_ids": np.concatenate(ids),
        "bias_values": np.concatenate(values),
    }


def _penalty_sections(penalised: list[tuple[int, Sequence]]) -> dict[str, np.ndarray]:
    params = [seq.request.params for _, seq in penalised]
    return {
        "penalty_rows": np.array([index for index, _ in penalised], np.int32),
        **{row.column: np.array([getattr(one, row.name) for one in params], row.dtype) for row in PENALTIES},
    }


def history_sections(seqs: list[Sequence]) -> dict[str, np.ndarray]:
    """The whole histories of `seqs`, which have penalties and whose tokens are all known."""
    found = []
    for seq in seqs:
        assert isinstance(seq.sampling_state, SamplingState) and seq.sampling_state.history is not None
        found.append(seq.sampling_state.history.of(seq))
    starts = np.zeros(len(found) + 1, np.int32)
    np.cumsum([len(ids) for ids, _ in found], out=starts[1:])
    return {
        "history_rows": np.array([seq.row for seq in seqs], np.int32),
        "history_starts": starts,
        "history_ids": np.concatenate([ids for ids, _ in found]),
        "history_counts": np.concatenate([counts for _, counts in found]),
    }
