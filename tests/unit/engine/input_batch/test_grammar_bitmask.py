"""The masks of rows, those after drafted tokens too, against the definition of each parameter."""

import random

import numpy as np
import pytest

from oarlock.engine.input_batch.sampling_metadata import Constraints, GrammarBitmask, MaskedRows
from oarlock.engine.scheduler.sequence import Sequence, Status
from oarlock.engine.types import Grammar
from tests.unit.engine.engine_fakes import make_request
from tests.unit.engine.sampling_fakes import VOCAB, CountingGrammar, allowed_ids


def draw_sequence(draw: random.Random) -> Sequence:
    """Some of the parameters that have a mask, after some tokens."""
    params: dict = {"min_tokens": draw.choice([0, 4]), "eos_token_ids": (7,), "max_tokens": 50}
    if draw.random() < 0.5:
        params["grammar"] = Grammar("lark", "40")
    if draw.random() < 0.5:
        params["allowed_token_ids"] = tuple(draw.sample(range(VOCAB), 40))
    if draw.random() < 0.6:
        words = [tuple(draw.choices(range(12), k=draw.randint(1, 4))) for _ in range(60)]
        params["bad_words"] = tuple(words)
    if draw.random() < 0.5:
        params["logit_bias"] = tuple((token, draw.choice([100.0, -100.0, 2.0])) for token in draw.sample(range(20), 5))
    seq = Sequence(make_request(1, [3, 4, 5], **params), key=(0.0, 1), max_len=64, arrival_s=0.0)
    seq.status = Status.RUNNING
    seq.token_ids.extend(draw.choices(range(12), k=draw.randrange(9)))
    if "grammar" in params:
        seq.grammar_matcher = CountingGrammar(params["grammar"])
        seq.grammar_matcher.num_accepted = seq.num_generated_tokens
    return seq


@pytest.mark.slow
def test_masks_and_bans_leave_what_the_parameters_allow() -> None:
    num_compared = num_behind = 0
    for seed in range(400):
        draw = random.Random(seed)
        seqs = [draw_sequence(draw) for _ in range(3)]
        masked = []
        for seq in seqs:
            constraints, drafts = Constraints(seq, VOCAB), tuple(draw.choices(range(12), k=draw.randrange(4)))
            generated = seq.num_generated_tokens
            bans = [constraints.step_bans(generated + row) for row in range(1 + len(drafts))]
            masked.append(MaskedRows(seq, constraints, generated, bans, drafts))
        masks = GrammarBitmask(masked, VOCAB // 32)
        assert not masks.must_wait and not (masks.allow_all ^ 0xFFFFFFFF).any()
        bits = iter(masks.compute())
        for rows in masked:
            params, generated = rows.seq.request.params, rows.seq.token_ids[3:]
            follows = True
            for row, bans in enumerate(rows.bans):
                words = next(bits)
                ids, values = rows.constraints.bias(bans)
                banned = set(ids[values == -np.inf].tolist())
                left = {token for token in range(VOCAB) if int(words[token // 32]) >> token % 32 & 1} - banned
                if follows:
                    assert left == allowed_ids(params, [*generated, *rows.drafts[:row]])
                    num_compared, num_behind = num_compared + 1, num_behind + (row > 0)
                follows = follows and row < len(rows.drafts) and rows.drafts[row] in left
    assert num_compared > 1000 and num_behind > 200


def test_a_sequence_that_has_ended_may_sample_anything() -> None:
    ended, runs = (draw_sequence(random.Random(seed)) for seed in (3, 3))
    ended.status = Status.FINISHED
    masks = GrammarBitmask([MaskedRows(seq, Constraints(seq, VOCAB), 0, [[]]) for seq in (ended, runs)], VOCAB // 32)
    bits = masks.compute()
    assert (bits[0] == 0xFFFFFFFF).all() and not (bits[1] == 0xFFFFFFFF).all()


def test_masks_wait_for_a_token_that_is_not_known() -> None:
    seq = draw_sequence(random.Random(5))
    known = seq.num_generated_tokens
    for num_generated, must_wait in ((known, False), (known + 1, True)):
        rows = MaskedRows(seq, Constraints(seq, VOCAB), num_generated, [[]])
        assert GrammarBitmask([rows], VOCAB // 32).must_wait == must_wait
