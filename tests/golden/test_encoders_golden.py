"""Encoders beside transformers in float64: hidden states and scores, alone and in a batch, on 1, 2, 4 and 8 ranks."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.gguf_config import open_checkpoint
from oarlock.workers.kernels.cpu import library
from oarlock.workers.models.encoders.encoder import Encoder
from oarlock.workers.models.encoders.registry import read_encoder
from oarlock.workers.weights.gguf_reader import weight_source
from tests.golden.paged_run import on_ranks
from tests.golden.tiny_encoders import ENCODERS, SCORING, hidden_of, load_encoder, make_encoder, score_of

pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.bfloat16)
Text = tuple[list[int], int]  # ids, and where a second text begins


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], Path]:
    @cache
    def make(name: str, dtype: torch.dtype) -> Path:
        return make_encoder(tmp_path_factory.mktemp("encoders"), name, dtype=dtype)

    return make


def texts_of(name: str) -> list[Text]:
    draw = random.Random(5)
    longest = 1300 if name == "modernbert" else 200  # of several blocks of queries
    second = 20 if name.startswith("bert") else 0
    lens = [7, longest, 1, 66]
    return [([draw.randrange(4, 160) for _ in range(n)], second if n > second else 0) for n in lens]


def loaded(path: Path, dtype: torch.dtype, tp: TensorParallel) -> Encoder:
    checkpoint = open_checkpoint(path)
    encoder = Encoder(read_encoder(str(path), checkpoint), tp, dtype, torch.device("cpu"))
    with weight_source(checkpoint, check_finite=True, on_read=lambda: None) as weights:
        encoder.load(weights, lambda share: None)
    return encoder


def hidden(encoder: Encoder, texts: list[Text]) -> list[Tensor]:
    """[n, hidden] of each text, all in one step."""
    lens = [len(ids) for ids, _ in texts]
    ids = torch.tensor([token for ids, _ in texts for token in ids])
    positions = torch.cat([torch.arange(n) for n in lens])
    types = torch.cat([(torch.arange(n) >= second).long() if second else torch.zeros(n, dtype=torch.int64)
                       for n, (_, second) in zip(lens, texts, strict=True)])  # fmt: skip
    return list(encoder(ids, positions, types, lens).split(lens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_numbers_match_float64(path_of: Callable, name: str, dtype: torch.dtype) -> None:
    """No further off than transformers in the same type, by a tenth, and a few last places."""
    path, texts = path_of(name, dtype), texts_of(name)
    exact, theirs = load_encoder(path, torch.float64), load_encoder(path, dtype)
    (encoder,) = on_ranks(1, lambda tp: loaded(path, dtype, tp))
    with torch.inference_mode():
        found = hidden(encoder, texts)
        ours = other = size = 0.0
        for (ids, second), mine in zip(texts, found, strict=True):
            truth = hidden_of(exact, ids, second)
            ours += float((mine.double() - truth).pow(2).sum())
            other += float((hidden_of(theirs, ids, second) - truth).pow(2).sum())
            size += float(truth.pow(2).sum())
        assert ours**0.5 <= 1.1 * other**0.5 + 1e-7 * size**0.5
        if name in SCORING:
            for (ids, second), mine in zip(texts, found, strict=True):
                score, truth = float(encoder.classify(mine)[0]), score_of(exact, ids, second)
                off = abs(score_of(theirs, ids, second) - truth)
                assert abs(score - truth) <= 2 * off + 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_bits_are_the_same_alone_in_a_batch_and_on_every_number_of_ranks(
    path_of: Callable, name: str, dtype: torch.dtype
) -> None:
    if (reason := library.why_not(dtype)) is not None:
        pytest.skip(f"torch's products promise nothing: {reason}")
    path, texts = path_of(name, dtype), texts_of(name)

    def run(tp: TensorParallel) -> list[Tensor]:
        encoder = loaded(path, dtype, tp)
        together = hidden(encoder, texts)
        if tp.size in (1, 2):
            for text, beside in zip(texts, together, strict=True):
                assert torch.equal(hidden(encoder, [text])[0], beside)
            assert torch.equal(hidden(encoder, texts[::-1])[0], together[-1])
        return together

    (alone,) = on_ranks(1, run)
    for size in (2, 4, 8):
        for ranks in on_ranks(size, run):
            assert all(torch.equal(mine, other) for mine, other in zip(ranks, alone, strict=True))


def test_a_lost_token_type_a_shifted_position_and_a_wider_reach_show(path_of: Callable) -> None:
    """The bound above is narrow enough to find them."""
    for name, change in (("bert", "types"), ("roberta", "positions"), ("modernbert", "reach")):
        path, text = path_of(name, torch.float32), (list(range(10, 110)), 30)
        truth = hidden_of(load_encoder(path, torch.float64), text[0], 30 if name == "bert" else 0)
        (encoder,) = on_ranks(1, lambda tp, path=path: loaded(path, torch.float32, tp))
        if change == "reach":
            encoder.layers[1].attention.reach += 1
        ids, positions = torch.tensor(text[0]), torch.arange(100) + (change == "positions")
        types = (torch.arange(100) >= 30).long() * (name == "bert" and change != "types")
        with torch.inference_mode():
            off = (encoder(ids, positions, types, [100]).double() - truth).abs().max()
        assert off > 1e-3, change
