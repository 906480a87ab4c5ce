"""The sections of a step that only some requests ask for: bias, penalties and masks of the rows that sample.

Reads each sequence's own constraints and history, made when they are first needed and kept over a preemption, and lays
them end to end. Masks that a grammar must compute get their place here and their bits later. Knows numpy and the step's
layout. Does not know which row of the engine's tables is whose.
"""

import numpy as np

from engine.input_batch.history import TokenHistory
from engine.input_batch.late_masks import GrammarBitmask
from engine.input_batch.logits_constraints import Constraints, penalises
from engine.scheduler.sequence import Sequence
from workers.protocol import mask_words

ALWAYS = np.iinfo(np.int64).max

_NO_INTS = np.empty(0, np.int32)
NO_BIAS = {"bias_rows": _NO_INTS, "bias_ids": _NO_INTS, "bias_values": np.empty(0, np.float32)}


def wanted_until(seq: Sequence) -> int:
    """The first position from which on `seq` needs none of these sections."""
    params = seq.request.params
    if seq.masked_by or penalises(params):
        return ALWAYS
    return seq.num_prompt_tokens + params.min_tokens if seq.stop_ids else 0


def build_sampling_metadata(
    rows: list[tuple[int, Sequence]], vocab_size: int
) -> tuple[dict[str, np.ndarray], GrammarBitmask | None]:
    """Sections for `rows`: (index into the L rows, its sequence), in the order of the index.

    With them comes what writes `mask_bits`, unless they are complete.
    """
    biases: list[tuple[int, np.ndarray, np.ndarray]] = []
    masked: list[tuple[int, Sequence, list[int]]] = []
    penalised: list[tuple[int, Sequence]] = []
    for index, seq in rows:
        own = seq.constraints
        if own is None:
            own = seq.constraints = Constraints(seq, vocab_size)
        bans = own.bans_now(seq)
        ids, values = own.bias(bans)
        if len(ids):
            biases.append((index, ids, values))
        if own.has_mask(seq):
            masked.append((index, seq, bans))
        if penalises(seq.request.params):
            penalised.append((index, seq))
    sections = {
        **(_bias_sections(biases) if biases else NO_BIAS),
        **(_penalty_sections(penalised) if penalised else {}),
    }
    if not masked:
        return sections, None
    sections["mask_rows"] = np.array([index for index, _, _ in masked], np.int32)
    sections["mask_bits"] = bits = np.empty((len(masked), mask_words(vocab_size)), np.uint32)
    if any(seq.grammar_state is not None for _, seq, _ in masked):
        return sections, GrammarBitmask([(seq, bans) for _, seq, bans in masked])
    for words, (_, seq, bans) in zip(bits, masked, strict=True):  # only copies
        assert seq.constraints is not None
        seq.constraints.fill_mask(seq, bans, words)
    return sections, None


def _bias_sections(biases: list[tuple[int, np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    rows, ids, values = zip(*biases, strict=True)
    return {
        "bias_rows": np.repeat(np.array(rows, np.int32), [len(some) for some in ids]),
        "bias_ids": np.concatenate(ids),
        "bias_values": np.concatenate(values),
    }


def _penalty_sections(penalised: list[tuple[int, Sequence]]) -> dict[str, np.ndarray]:
    params = [seq.request.params for _, seq in penalised]
    histories = [_history(seq) for _, seq in penalised]
    starts = np.zeros(len(histories) + 1, np.int32)
    np.cumsum([len(history.ids) for history in histories], out=starts[1:])
    return {
        "penalty_rows": np.array([index for index, _ in penalised], np.int32),
        "repetition": np.array([one.repetition_penalty for one in params], np.float32),
        "frequency": np.array([one.frequency_penalty for one in params], np.float32),
        "presence": np.array([one.presence_penalty for one in params], np.float32),
        "history_starts": starts,
        "history_ids": np.concatenate([history.ids for history in histories]),
        "history_counts": np.concatenate([history.counts for history in histories]),
    }


def _history(seq: Sequence) -> TokenHistory:
    """Only repetition looks at the prompt: for the others its ids are not even sent."""
    if seq.history is None:
        request = seq.request
        prompt = request.prompt_token_ids if request.params.repetition_penalty != 1 else ()
        seq.history = TokenHistory(prompt, seq.num_prompt_tokens)
    seq.history.catch_up(seq.token_ids)
    return seq.history
