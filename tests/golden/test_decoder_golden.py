"""Every family and every shape of it against transformers, on tiny random models: logits, then greedy text.

The bound: float32 logits as close to the float64 truth as twice transformers' own float32 error.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden.exact_reference import all_logits, generate, judge
from tests.golden.paged_run import PagedRun, greedy, load_decoder, on_ranks
from tests.golden.tiny_models import make_tiny
from workers.parallel import TensorParallel

_ROPE_LONG = {"original_max_position_embeddings": 32, "factor": 4.0}
# Name -> family, what is special about it, tensor-parallel sizes.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "qwen2": ("qwen2", {}, (1, 2, 4, 8)),  # 8 ranks over 4 KV heads: replication
    "qwen2-tied-odd-vocab": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 303}, (1, 2, 4)),
    "qwen2-one-kv-head": ("qwen2", {"num_key_value_heads": 1}, (1, 2, 4)),
    "qwen2-wide": ("qwen2", {"hidden_size": 320, "intermediate_size": 640, "num_attention_heads": 10,
                             "num_key_value_heads": 2}, (1, 2)),  # rows longer than one float32 block
    "qwen2-window-pattern": ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}, (1,)),
    "qwen3": ("qwen3", {}, (1, 2, 8)),
    "qwen3-biased-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "vocab_size": 301}, (1, 4)),
    "llama": ("llama", {"vocab_size": 317}, (1, 2, 4)),
    "llama-multi-head": ("llama", {"num_key_value_heads": 8}, (1, 2)),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, (1, 2)),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}, (1,)),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}}, (1,)),
    "llama-llama3": ("llama", {"head_dim": 32, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        **_ROPE_LONG}}, (1, 2)),
    "llama-dynamic": ("llama", {"max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, (1,)),
    "qwen2-yarn": ("qwen2", {"hidden_size": 128, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, **_ROPE_LONG}}, (1, 2)),
    "qwen3-yarn-mscale": ("qwen3", {"head_dim": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "mscale": 0.9, "mscale_all_dim": 0.4, "beta_fast": 24,
        "truncate": False, **_ROPE_LONG}}, (1,)),
    "mistral-window": ("mistral", {}, (1, 2)),  # the prompt is longer than its window of 24
    "mistral-no-window": ("mistral", {"sliding_window": None}, (1,)),
}  # fmt: skip
PROMPT, TOTAL = 31, 40


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    family, overrides, sizes = CASES[request.param]
    return make_tiny(tmp_path_factory.mktemp("golden"), family, seed=7, **overrides), sizes


@pytest.fixture(scope="module")
def tokens(case: tuple[Path, tuple[int, ...]]) -> list[int]:
    return [random.Random(3).randrange(300) for _ in range(TOTAL)]


CUTS = {
    "prefill": [PROMPT, *range(PROMPT + 1, TOTAL + 1)],
    "chunked": [7, 8, 20, 24, PROMPT, TOTAL],
    "token-by-token": list(range(1, TOTAL + 1)),
}


def feed(run: PagedRun, tokens: list[int], cuts: list[int]) -> Tensor:
    """Logits of all tokens, fed in pieces that end at `cuts`; other sequences come and go beside them."""
    rows, start = [], 0
    for number, end in enumerate(cuts):
        company = {100 + number: tokens[: 3 + number]} if number % 3 == 0 else {}
        rows.append(run.step({**company, 0: tokens[start:end]})[0])
        start = end
    return torch.cat(rows)


def feed_all_ways(tp: TensorParallel, path: Path, tokens: list[int]) -> Tensor:
    """[ways, n, vocab]. Pages of one way are not those of another."""
    decoder = load_decoder(path, tp)
    return torch.stack([feed(PagedRun(decoder), tokens, cuts) for cuts in CUTS.values()])


def test_logits_are_within_twice_transformers_own_error(case: tuple[Path, tuple[int, ...]], tokens: list[int]) -> None:
    path, sizes = case
    truth = all_logits(judge(path, torch.float64), tokens, PROMPT)
    theirs = (all_logits(judge(path, torch.float32), tokens, PROMPT).double() - truth).abs().max().item()
    bound = 2 * theirs + 1e-6 * truth.abs().max().item()
    for size in sizes:
        ranks = on_ranks(size, lambda tp: feed_all_ways(tp, path, tokens))
        assert all(torch.equal(ranks[0], other) for other in ranks[1:]), f"ranks of {size} disagree"
        for way, logits in zip(CUTS, ranks[0], strict=True):
            ours = (logits.double() - truth).abs().max().item()
            assert ours <= bound, f"tp {size}, {way}: error {ours:.2e}, transformers' own {theirs:.2e}"


def test_greedy_text_equals_transformers(case: tuple[Path, tuple[int, ...]], tokens: list[int]) -> None:
    path, sizes = case
    prompts = {0: tokens[:PROMPT], 1: tokens[3:12], 2: tokens[20:22]}
    model = judge(path, torch.float32)
    expected = [generate(model, prompt, 12) for prompt in prompts.values()]

    def text(tp: TensorParallel) -> Tensor:
        together = greedy(PagedRun(load_decoder(path, tp)), prompts, 12)
        return torch.tensor([together[seq] for seq in prompts])

    for size in sizes:
        assert on_ranks(size, text)[0].tolist() == expected, f"tp {size}"
