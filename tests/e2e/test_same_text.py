"""The text of a request depends on the checkpoint alone: not on ranks, other requests, streaming or cached prefixes.

Fifty prompts, greedy, float32, against transformers' own answers; then seeded sampling against itself.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import MAX_TOKENS
from tests.e2e.running import DEMO, RunningServer

GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS}


def answer(server, prompt, streamed, **fields):
    """The text of one request, whichever way it is sent."""
    if not streamed:
        return server.text(prompt, **fields)
    chunks = list(server.stream(prompt, **fields))
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == reasons[-1:] != []  # one end, and it comes last
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def answers_alone(server, prompts, step=1):
    """One at a time, every other one streamed; of the prompts every `step`-th."""
    return [answer(server, prompt, number % 2, **GREEDY) for number, prompt in enumerate(prompts[::step])]


def answers_together(server, prompts):
    """Thirty-two in flight, the others streamed this time."""
    with ThreadPoolExecutor(32) as pool:
        sent = [pool.submit(answer, server, prompt, not number % 2, **GREEDY) for number, prompt in enumerate(prompts)]
        return [future.result() for future in sent]


def check_greedy_text(server, prompts, expected, *, has_hits, step=1):
    before = server.metrics()["vllm:prefix_cache_hits_total"]
    assert answers_alone(server, prompts, step) == expected[::step]
    assert answers_together(server, prompts) == expected
    assert (server.metrics()["vllm:prefix_cache_hits_total"] > before) == has_hits


@pytest.mark.parametrize(("name", "step"), [("tp1", 1), ("tp2", 2)])
def test_greedy_text_equals_transformers(name, step, request, prompts, expected):
    check_greedy_text(request.getfixturevalue(name), prompts, expected, has_hits=True, step=step)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "caching"),
    [(1, "--no-enable-prefix-caching"), (4, "--enable-prefix-caching")],
)
def test_it_does_so_without_cached_prefixes_and_on_four_ranks(ranks, caching, prompts, expected):
    with RunningServer(DEMO, "--dtype", "float32", "-tp", ranks, caching, "--block-size", 8) as server:
        check_greedy_text(server, prompts, expected, has_hits=caching == "--enable-prefix-caching", step=10)


SEEDED = {"temperature": 1.5, "top_p": 0.95, "max_tokens": 24, "ignore_eos": True}


def test_seeded_text_depends_only_on_the_seed(tp1, tp2, prompts):
    unlearned = prompts[-16:]  # a learned answer leaves chance nothing to decide
    alone = [tp1.text(prompt, seed=number, **SEEDED) for number, prompt in enumerate(unlearned)]
    assert len(set(alone)) == 16
    for server in (tp1, tp2):
        with ThreadPoolExecutor(16) as pool:
            sent = [
                pool.submit(answer, server, prompt, number % 2, seed=number, **SEEDED)
                for number, prompt in enumerate(unlearned)
            ]
            assert [future.result() for future in sent] == alone
    assert tp1.text(unlearned[0], seed=1, **SEEDED) != alone[0]
    # Only the largest logit lies within so small a part of the deviation.
    assert tp2.text(unlearned[0], seed=1, temperature=2, top_n_sigma=1e-4) == tp1.text(unlearned[0], temperature=0)
    assert tp1.text(unlearned[0], **SEEDED) != tp1.text(unlearned[0], **SEEDED)  # no seed: a fresh one each time
