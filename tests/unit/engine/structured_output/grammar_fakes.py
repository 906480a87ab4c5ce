"""The demo model's tokens for tests of grammars, and a writer that chooses among what a mask allows."""

from pathlib import Path
from random import Random

import numpy as np
import tokenizers

DEMO = Path(__file__).resolve().parents[4] / "models" / "oarlock-demo"
DEMO_TOKENIZER = DEMO / "tokenizer.json"
NUM_IDS, END = 4096, 2
_TOKENS = tokenizers.Tokenizer.from_file(str(DEMO_TOKENIZER))


def encode(text: str) -> list[int]:
    return _TOKENS.encode(text, add_special_tokens=False).ids


def decode(ids) -> str:
    return _TOKENS.decode(list(ids))


def allowed(state) -> set[int]:
    masks = np.empty((1, NUM_IDS // 32), np.uint32)
    state.fill_masks((), masks)
    return set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist())


def random_walk(state, random: Random, most: int) -> tuple[list[int], bool]:
    """Any allowed token, up to `most`; the end as soon as it may come. Whether the text is complete."""
    ids: list[int] = []
    for _ in range(most):
        choices = allowed(state)
        if END in choices:
            return ids, True
        ids.append(random.choice(sorted(choices)))
        if state.accept(ids[-1:]) or state.only_end_is_left():
            return ids, True
    return ids, False
