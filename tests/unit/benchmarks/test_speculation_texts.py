"""The texts of the benchmark of drafts: edits repeat their prompts, chat does not, and the grammar allows one text."""

import numpy as np

from benchmarks.speculation import SETS, OneText, Text, read_texts
from oarlock.engine.spec_decode.drafter import NgramIndex


def steps_for(text: Text, num_drafts: int) -> int:
    """Steps of an answer with so many drafts in each, where any are found."""
    index, known, left, steps = NgramIndex(2, 4), list(text.prompt), list(text.answer), 0
    while left:
        drafts = index.propose(known, num_drafts) if steps else []
        right = next((n for n, (draft, token) in enumerate(zip(drafts, left, strict=False)) if draft != token), None)
        count = 1 + (min(len(drafts), len(left)) if right is None else right)
        known += left[:count]
        del left[:count]
        steps += 1
    return steps


def test_the_sets_match_their_names():
    ids: dict[str, int] = {}
    sets = {name: read_texts(pattern, ids) for name, pattern in SETS.items()}
    assert {name: len(texts) for name, texts in sets.items()} == {"edits": 3, "chat": 3}
    assert len(set(ids.values())) == len(ids) and max(ids.values()) < 32_000
    shares = {name: [steps_for(text, 5) / len(text.answer) for text in texts] for name, texts in sets.items()}
    assert max(shares["edits"]) < 0.6 and min(shares["chat"]) > 0.9, shares


def test_the_grammar_allows_one_text_behind_drafts_too():
    grammar, masks = OneText([5, 40, 7]), np.empty((4, 2), np.uint32)
    assert grammar.fill_masks((5, 41, 7), masks) is None
    assert masks.tolist() == [[1 << 5, 0], [0, 1 << 8], [0xFFFFFFFF] * 2, [0xFFFFFFFF] * 2]
    assert not grammar.accept((5,))
    assert grammar.fill_masks((40, 7), masks[:3]) == 2
    assert masks[:3].tolist() == [[0, 1 << 8], [1 << 7, 0], [0xFFFFFFFF] * 2]
    assert grammar.accept((40, 7)) and grammar.only_end_is_left()
