"""Attention in both directions beside its definition in float64, with and without instructions for 16 bits."""

import pytest
import torch

from oarlock.workers.models.encoders.encoder import bidirectional_attention
from oarlock.workers.platform import processor

LENS = [5, 1, 600, 64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: int | None, scale: float) -> torch.Tensor:
    """Exact attention of one text: float64 [n, H, D]."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    places = torch.arange(q.shape[1])
    scores = q @ k.transpose(1, 2) * scale
    if reach is not None:
        scores = scores.masked_fill((places[:, None] - places[None]).abs() > reach, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.fixture(params=[True, False], ids=["multiplies 16 bits", "emulates them"])
def multiplies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    here = processor.Processor(bfloat16=request.param, float16=request.param, name="")
    monkeypatch.setattr(processor, "here", lambda: here)


@pytest.mark.usefixtures("multiplies")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reach", [None, 3, 64, 700])
def test_every_text_is_right_and_alone_the_same(dtype: torch.dtype, reach: int | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENS), 3, 32).to(dtype) for _ in range(3))
    with torch.inference_mode():
        found = bidirectional_attention(q, k, v, LENS, reach, 0.2)
        start = 0
        for length in LENS:
            text = slice(start, start + length)
            truth = exact(q[text], k[text], v[text], reach, 0.2).flatten(1)
            size = float(truth.abs().max())
            torch.testing.assert_close(
                found[text].double(), truth, rtol=0, atol=(1e-6 + 2 * torch.finfo(dtype).eps) * size
            )
            alone = bidirectional_attention(q[text], k[text], v[text], [length], reach, 0.2)
            assert torch.equal(alone, found[text])
            start += length
