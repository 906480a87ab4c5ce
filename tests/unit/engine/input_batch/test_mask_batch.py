"""The masks of all grammars of a step, with drafts or without, against a fresh matcher that goes token by token."""

import math
import random

import numpy as np
import pytest

from oarlock.engine.errors import BrokenGrammarError
from oarlock.engine.structured_output import mask_costs
from oarlock.engine.structured_output.compiler import Compiled, Compiler
from oarlock.engine.structured_output.matcher import GrammarMatcher, MaskBatch
from oarlock.engine.types import Grammar
from tests.unit.engine.structured_output.grammar_fakes import DEMO_TOKENIZER, END, NUM_IDS, encode
from tests.unit.engine.structured_output.test_grammar_compiler import GRAMMARS, SCHEMAS, schema

NUM_WORDS = NUM_IDS // 32 + 3  # the model has more ids than its tokenizer
BOS = 1  # part of no text
ALL = 0xFFFFFFFF
KINDS = [grammar for grammar, _, _ in GRAMMARS] + [schema(one) for one in SCHEMAS]
KINDS += [schema({"type": "integer"}), Grammar("regex", "[a-z ]*"), Grammar("regex", "a{3}(bc)?")]


@pytest.fixture(autouse=True)
def _all_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every grammar for a fast one, however busy the machine is: a slow one consumes its tokens later."""
    monkeypatch.setattr(mask_costs, "FAST_S", math.inf)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(DEMO_TOKENIZER)


@pytest.fixture(scope="module")
def kinds(compiler: Compiler) -> list[Compiled]:
    return [compiler.compile(grammar) for grammar in KINDS]


def after(compiler: Compiler, compiled: Compiled, ids: list[int]) -> GrammarMatcher:
    matcher = GrammarMatcher(compiler, compiled, (END, BOS))
    for token in ids:
        matcher.accept((token,))
    return matcher


def mask_of(matcher: GrammarMatcher) -> tuple[np.ndarray, int | None]:
    mask = np.empty((1, NUM_WORDS), np.uint32)
    result = matcher.fill_masks((), mask)
    return mask[0], result


def ids_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def one_by_one(
    compiler: Compiler, compiled: Compiled, ids: list[int], drafts: tuple[int, ...]
) -> tuple[np.ndarray, int | None]:
    """The masks, uint32 [1 + drafts, NUM_WORDS], and what comes with them."""
    masks = np.full((1 + len(drafts), NUM_WORDS), ALL, np.uint32)
    for row in range(len(masks)):
        masks[row], result = mask_of(after(compiler, compiled, [*ids, *drafts[:row]]))
        if result is not None:
            return masks, row
        if row < len(drafts) and drafts[row] not in set(ids_of(masks[row])) - {END, BOS}:
            break
    return masks, None


def draw_drafts(draw: random.Random, compiler: Compiler, compiled: Compiled, ids: list[int]) -> tuple[int, ...]:
    """Up to four tokens that may follow, some of them wrong."""
    drafts: list[int] = []
    for _ in range(draw.randrange(5)):
        mask, result = mask_of(after(compiler, compiled, ids + drafts))
        allowed = sorted(set(ids_of(mask)) - {END, BOS})
        if result is not None or not allowed or draw.random() < 0.15:
            drafts += draw.choices([END, BOS, draw.randrange(NUM_IDS), NUM_IDS + 40, 10**6], k=draw.randint(1, 2))
            break
        drafts.append(draw.choice(allowed))
    return tuple(drafts)


@pytest.mark.parametrize("num_matchers", [1, 7])
@pytest.mark.slow
def test_masks_and_drafts_match_a_fresh_matcher(compiler: Compiler, kinds: list[Compiled], num_matchers: int) -> None:
    """Batches of one grammar and of several; then some of the drafts are accepted at once."""
    completed = accepted = wrong = 0
    for seed in range(len(kinds) if num_matchers == 1 else 4):
        draw, batch = random.Random(seed), MaskBatch()
        chosen = [kinds[seed]] if num_matchers == 1 else draw.choices(kinds, k=num_matchers)
        texts: list[list[int]] = [[] for _ in chosen]
        matchers = [after(compiler, compiled, []) for compiled in chosen]
        for _ in range(12):
            asked = []
            for compiled, matcher, ids in zip(chosen, matchers, texts, strict=True):
                drafts = draw_drafts(draw, compiler, compiled, ids)
                asked.append((matcher, drafts, np.empty((1 + len(drafts), NUM_WORDS), np.uint32)))
            results = batch.fill_masks(asked)
            for number, (matcher, drafts, masks) in enumerate(asked):
                compiled, ids = chosen[number], texts[number]
                expected, result = one_by_one(compiler, compiled, ids, drafts)
                np.testing.assert_array_equal(masks, expected)
                alone = np.empty_like(masks)
                assert results[number] == result == matcher.fill_masks(drafts, alone)
                np.testing.assert_array_equal(alone, expected)
                usable = result or next((row for row, mask in enumerate(masks) if (mask == ALL).all()), len(masks)) - 1
                taken = list(drafts[: draw.randint(0, max(usable, 0))])
                wrong += usable < len(drafts)
                follows = sorted(set(ids_of(masks[len(taken)])) - {END, BOS})
                if len(taken) != result and follows:
                    taken.append(draw.choice(follows))
                if not taken:
                    texts[number], matchers[number] = [], after(compiler, compiled, [])
                    continue
                is_over = matcher.accept(taken)
                ids += taken
                accepted += len(taken)
                fresh = after(compiler, compiled, ids)
                only_end = fresh.matcher.is_stopped() or fresh.only_end_is_left()
                assert is_over in (fresh.matcher.is_stopped(), only_end) and matcher.only_end_is_left() == only_end
                assert is_over or result is None or taken != list(drafts[:result]), "it was known beforehand"
                if only_end:
                    completed += 1
                    texts[number], matchers[number] = [], after(compiler, compiled, [])
    assert completed > 10 and accepted > 200 and wrong > 10


def test_text_may_end_exactly_if_the_library_accepts(compiler: Compiler, kinds: list[Compiled]) -> None:
    """So a mask tells all that is needed to know that only the end is left."""
    for seed, compiled in enumerate(kinds):
        draw, matcher = random.Random(seed), after(compiler, compiled, [])
        for _ in range(20):
            mask, result = mask_of(matcher)
            assert (END in ids_of(mask)) == matcher.matcher.is_accepting()
            follows = sorted(set(ids_of(mask)) - {END, BOS})
            assert (result == 0) == (matcher.matcher.is_accepting() and not follows)
            if not follows or matcher.accept((draw.choice(follows),)):
                break


def test_one_broken_grammar_breaks_no_other(compiler: Compiler, kinds: list[Compiled]) -> None:
    for batch_of in ([kinds[0]] * 3, kinds[:3]):
        matchers = [after(compiler, compiled, []) for compiled in batch_of]
        broken = matchers[1]
        with pytest.raises(BrokenGrammarError):
            broken.accept(encode("%%%"))
        asked = [(matcher, (), np.empty((1, NUM_WORDS), np.uint32)) for matcher in matchers]
        results = MaskBatch().fill_masks(asked)
        assert results[0] is results[2] is None and isinstance(results[1], BrokenGrammarError)
        for number in (0, 2):
            expected, _ = mask_of(after(compiler, batch_of[number], []))
            np.testing.assert_array_equal(asked[number][2][0], expected)


def test_a_full_cache_is_renewed_with_drafts_too(compiler: Compiler) -> None:
    """This expression fills the library's cache within a few texts."""
    compiled = compiler.compile(Grammar("regex", "[a-z ]*a[a-z ]{200}"))
    first, batch = compiled.matcher, MaskBatch()
    for seed in range(3):
        draw, matcher, length = random.Random(seed), GrammarMatcher(compiler, compiled, ()), 0
        while length < 200:
            masks = np.empty((2, NUM_WORDS), np.uint32)
            draft = draw.choice(encode("a b c the of in"))
            assert batch.fill_masks([(matcher, (draft,), masks)]) == [None]
            taken = [draft] if draft in ids_of(masks[0]) else []
            taken.append(draw.choice(ids_of(masks[len(taken)])))
            assert not matcher.accept(taken)
            length += len(taken)
    assert compiled.matcher is not first, "the case is too small to fill it"
