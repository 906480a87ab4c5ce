"""Every family and every shape of it against transformers, on tiny random models: logits, then greedy text.

The bound: float32 logits as close to the float64 truth as twice transformers' own float32 error, however the tokens
are cut into steps, and on the other sequences in them.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from tests.golden.cases import FAMILY_CASES, PROMPT, RUNS, TOTAL, marks_of, run_id
from tests.golden.exact_reference import GREEDY, ExactReference
from tests.golden.paged_run import PagedRun, greedy, load_decoder, on_ranks

pytestmark = pytest.mark.slow

CUTS = {
    "prefill": [PROMPT, *range(PROMPT + 1, TOTAL + 1)],
    "chunked": [7, 8, 20, 24, PROMPT, TOTAL],
    "token-by-token": [*range(1, 14), TOTAL],
}
_FEW = ("chunked",)  # with many ranks, each a thread of this process, and for shapes that compute as others do


def feed(run: PagedRun, tokens: list[int], cuts: list[int]) -> Tensor:
    """Logits of all tokens, fed in pieces that end at `cuts`; other sequences come and go beside them."""
    rows, start = [], 0
    for number, end in enumerate(cuts):
        others = {100 + number: tokens[: 3 + number]} if number % 3 == 0 else {}
        rows.append(run.step({**others, 0: tokens[start:end]})[0])
        start = end
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(*run, id=run_id(*run), marks=marks_of(*run)) for run in RUNS],
)
def test_logits_are_within_twice_transformers_own_error_and_greedy_text_is_equal(
    reference_of: Callable[..., ExactReference], name: str, size: int
) -> None:
    reference = reference_of(name)
    truth, own = reference.logits
    theirs = (own - truth).abs().max().item()
    assert theirs < 1e-4 * truth.abs().max().item(), "the reference does not agree with itself"
    bound = 2 * theirs + 1e-6 * truth.abs().max().item()
    ways = list(CUTS) if size <= 2 and name in FAMILY_CASES else _FEW

    def run_all_ways(tp: TensorParallel) -> tuple[Tensor, list[list[int]]]:
        """([ways, n, vocab], the ids of each greedy text). Pages of one way are not those of another."""
        decoder = load_decoder(reference.path, tp, max_model_len=reference.max_model_len)
        logits = torch.stack([feed(PagedRun(decoder), reference.tokens, CUTS[way]) for way in ways])
        return logits, list(greedy(PagedRun(decoder), reference.prompts, GREEDY).values())

    ranks = on_ranks(size, run_all_ways)
    assert all(torch.equal(ranks[0][0], logits) for logits, _ in ranks[1:]), "ranks disagree"
    for way, logits in zip(ways, ranks[0][0], strict=True):
        ours = (logits.double() - truth).abs().max().item()
        assert ours <= bound, f"{way}: error {ours:.2e}, transformers' own {theirs:.2e}"
    assert ranks[0][1] == reference.text
