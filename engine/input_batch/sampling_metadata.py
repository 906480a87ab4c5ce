"""The sections of a step that only some requests ask for: bias, penalties and masks of the rows that sample.

Knows numpy and the step's layout. Does not know which row of the engine's tables belongs to which sequence.
"""

import logging

import numpy as np

from engine.input_batch.logits_constraints import Constraints
from engine.input_batch.token_history import TokenHistory
from engine.sampling_params import penalises
from engine.scheduler.sequence import Sequence
from workers.protocol import mask_words

logger = logging.getLogger("oarlock.engine")

ALWAYS = np.iinfo(np.int64).max

_ALL = 0xFFFFFFFF
_NO_INTS = np.empty(0, np.int32)
NO_BIAS = {"bias_rows": _NO_INTS, "bias_ids": _NO_INTS, "bias_values": np.empty(0, np.float32)}


class SamplingState:
    """What is kept for one sequence from step to step, in `Sequence.sampling_state`. Made when it is first needed."""

    __slots__ = ("constraints", "history")

    def __init__(self, seq: Sequence, vocab_size: int) -> None:
        self.constraints = Constraints(seq, vocab_size)
        self.history: TokenHistory | None = None  # with penalties only


class GrammarBitmask:
    """The masks of one step when some of them come from grammars, computed while the ranks run that step's model.

    A grammar takes tens to hundreds of microseconds per row, and ranks need the masks only when they sample. Nothing
    else may touch the sequences from the step's submission until `fill` returns.
    """

    def __init__(self, masked: list[tuple[Sequence, Constraints, list[int]]]) -> None:
        """`masked`: for each masked row, in order, its sequence, the constraints, and the ids banned in this step."""
        self._masked = masked
        self.failed: list[Sequence] = []  # sequences whose grammar raised

    def fill(self, bits: np.ndarray) -> None:
        """Write every word of `bits`, uint32 [G, W]. May run in any thread.

        Where a grammar raises, every id is allowed: the request ends and its sampled token is dropped.
        """
        for words, (seq, constraints, bans) in zip(bits, self._masked, strict=True):
            try:
                constraints.fill_mask(seq, bans, words)
            except Exception:
                logger.exception("event=request_failed request_id=%d stage=mask", seq.request_id)
                words[:] = _ALL
                self.failed.append(seq)


def wanted_until(seq: Sequence) -> int:
    """The first position from which on `seq` needs none of these sections."""
    params = seq.request.params
    if seq.masked_by or penalises(params):
        return ALWAYS
    return seq.num_prompt_tokens + params.min_tokens if seq.stop_ids else 0


def build_sampling_metadata(
    rows: list[tuple[int, Sequence, int]], vocab_size: int
) -> tuple[dict[str, np.ndarray], GrammarBitmask | None]:
    """Sections of `StepMetadata`, by field name, for `rows`, in index order.

    A row is (index into the L rows, its sequence, how many tokens that will have generated before this row's). Also
    returns what writes `mask_bits` later; None when they are already complete.
    """
    biases: list[tuple[int, np.ndarray, np.ndarray]] = []
    masked: list[tuple[int, Sequence, Constraints, list[int]]] = []
    penalised: list[tuple[int, Sequence, SamplingState]] = []
    for index, seq, num_generated in rows:
        state = _state(seq, vocab_size)
        constraints = state.constraints
        bans = constraints.bans_now(seq, num_generated)
        ids, values = constraints.bias(bans)
        if len(ids):
            biases.append((index, ids, values))
        if constraints.has_mask(seq):
            masked.append((index, seq, constraints, bans))
        if penalises(seq.request.params):
            penalised.append((index, seq, state))
    sections = {
        **(_bias_sections(biases) if biases else NO_BIAS),
        **(_penalty_sections(penalised) if penalised else {}),
    }
    if not masked:
        return sections, None
    sections["mask_rows"] = np.array([index for index, *_ in masked], np.int32)
    sections["mask_bits"] = bits = np.empty((len(masked), mask_words(vocab_size)), np.uint32)
    if any(seq.grammar_matcher is not None for _, seq, _, _ in masked):
        return sections, GrammarBitmask([(seq, constraints, bans) for _, seq, constraints, bans in masked])
    for words, (_, seq, constraints, bans) in zip(bits, masked, strict=True):  # without grammars: only copies
        constraints.fill_mask(seq, bans, words)
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


def _penalty_sections(penalised: list[tuple[int, Sequence, SamplingState]]) -> dict[str, np.ndarray]:
    params = [seq.request.params for _, seq, _ in penalised]
    histories = [_history(seq, state) for _, seq, state in penalised]
    starts = np.zeros(len(histories) + 1, np.int32)
    np.cumsum([len(history.ids) for history in histories], out=starts[1:])
    return {
        "penalty_rows": np.array([index for index, _, _ in penalised], np.int32),
        "repetition": np.array([one.repetition_penalty for one in params], np.float32),
        "frequency": np.array([one.frequency_penalty for one in params], np.float32),
        "presence": np.array([one.presence_penalty for one in params], np.float32),
        "history_starts": starts,
        "history_ids": np.concatenate([history.ids for history in histories]),
        "history_counts": np.concatenate([history.counts for history in histories]),
    }


def _history(seq: Sequence, state: SamplingState) -> TokenHistory:
    """The history of `seq` up to its last token. Only the repetition penalty needs the prompt's ids."""
    if state.history is None:
        request = seq.request
        prompt = request.prompt_token_ids if request.params.repetition_penalty != 1 else ()
        state.history = TokenHistory(prompt, seq.num_prompt_tokens)
    state.history.catch_up(seq.token_ids)
    return state.history
