"""Every family and every shape of it against transformers, on tiny random models: logits, then greedy text.

The bound: float32 logits as close to the float64 truth as twice transformers' own float32 error, however the tokens
are cut into steps, and on the other sequences in them.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from tests.golden.cases import PROMPT, RUNS, TOTAL, run_id
from tests.golden.exact_reference import GREEDY, ExactReference
from tests.golden.paged_run import PagedRun, greedy, load_decoder, on_ranks

pytestmark = pytest.mark.slow

every_run = pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(*run, id=run_id(*run), marks=[pytest.mark.slow] if run[1] > 2 else []) for run in RUNS],
)

CUTS = {
    "prefill": [PROMPT, *range(PROMPT + 1, TOTAL + 1)],
    "chunked": [7, 8, 20, 24, PROMPT, TOTAL],
    "token-by-token": list(range(1, TOTAL + 1)),
}
_FEW = ("chunked",)  # with many ranks, each a thread of this process


def feed(run: PagedRun, tokens: list[int], cuts: list[int]) -> Tensor:
    """Logits of all tokens, fed in pieces that end at `cuts`; other sequences come and go beside them."""
    rows, start = [], 0
    for number, end in enumerate(cuts):
        others = {100 + number: tokens[: 3 + number]} if number % 3 == 0 else {}
        rows.append(run.step({**others, 0: tokens[start:end]})[0])
        start = end
    return torch.cat(rows)


@every_run
def test_logits_are_within_twice_transformers_own_error(
    reference_of: Callable[..., ExactReference], name: str, size: int
) -> None:
    reference = reference_of(name)
    truth, own = reference.logits
    theirs = (own - truth).abs().max().item()
    assert theirs < 1e-4 * truth.abs().max().item(), "the reference does not agree with itself"
    bound = 2 * theirs + 1e-6 * truth.abs().max().item()
    ways = list(CUTS) if size <= 2 else _FEW

    def feed_all_ways(tp: TensorParallel) -> Tensor:
        """[ways, n, vocab]. Pages of one way are not those of another."""
        decoder = load_decoder(reference.path, tp, max_model_len=reference.max_model_len)
        return torch.stack([feed(PagedRun(decoder), reference.tokens, CUTS[way]) for way in ways])

    ranks = on_ranks(size, feed_all_ways)
    assert all(torch.equal(ranks[0], other) for other in ranks[1:]), "ranks disagree"
    for way, logits in zip(ways, ranks[0], strict=True):
        ours = (logits.double() - truth).abs().max().item()
        assert ours <= bound, f"{way}: error {ours:.2e}, transformers' own {theirs:.2e}"


@every_run
def test_greedy_text_equals_transformers(reference_of: Callable[..., ExactReference], name: str, size: int) -> None:
    reference = reference_of(name)

    def text(tp: TensorParallel) -> list[list[int]]:
        run = PagedRun(load_decoder(reference.path, tp, max_model_len=reference.max_model_len))
        return list(greedy(run, reference.prompts, GREEDY).values())

    assert on_ranks(size, text)[0] == reference.text
