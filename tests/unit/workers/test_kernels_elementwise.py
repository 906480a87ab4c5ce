"""The element-wise kernels against float64, and the batch invariance of their rows."""

import pytest
import torch

from workers.kernels.cpu import avx512_elementwise, library
from workers.layers.rotary import rotate_with_torch

pytestmark = pytest.mark.skipif(not library.provides("oarlock_mask"), reason="this level has no kernel yet")
HALF_STEP = 2**-8  # the most that rounding to bfloat16 may move a value, relative to it: twice this at a boundary


@pytest.mark.parametrize("shape", [(1, 896), (5, 100), (300, 128), (3, 6, 64), (70, 5, 80)])
def test_norm_is_right_to_its_rounding(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 3).bfloat16(), torch.randn(shape[1:])
    exact = x.double()
    exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    wide = avx512_elementwise.rms_norm(x, weight, 1e-6, float32_output=True)
    torch.testing.assert_close(wide.double(), exact, atol=1e-9, rtol=1e-6)
    assert torch.equal(avx512_elementwise.rms_norm(x, weight, 1e-6), wide.bfloat16())


def test_norm_reads_rows_that_lie_apart() -> None:
    x, weight = torch.randn(4, 8, 64).bfloat16(), torch.randn(5, 64)
    part = x[:, :5]
    assert torch.equal(
        avx512_elementwise.rms_norm(part, weight, 1e-6), avx512_elementwise.rms_norm(part.contiguous(), weight, 1e-6)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "turned"), [(64, 64), (128, 32), (80, 80), (96, 72)])
def test_rotation_is_right_to_its_rounding(dtype: torch.dtype, width: int, turned: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 6, width).to(dtype)[:, :4]
    angles = torch.randn(37, 1, turned // 2) * 9
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    ours = avx512_elementwise.rotate(x, cos, sin)
    exact = rotate_with_torch(x.double(), cos.double(), sin.double(), torch.float64)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=HALF_STEP)
    assert torch.equal(ours[..., turned:], x[..., turned:].bfloat16())


@pytest.mark.parametrize("rows", [1, 2, 7, 200])
def test_rows_do_not_depend_on_the_batch(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 4, 64).bfloat16(), torch.randn(4, 64)
    cos, sin = torch.randn(300, 1, 64), torch.randn(300, 1, 64)
    part = slice(50, 50 + rows)
    normed, turned = avx512_elementwise.rms_norm(x, weight, 1e-6), avx512_elementwise.rotate(x, cos, sin)
    assert torch.equal(avx512_elementwise.rms_norm(x[part], weight, 1e-6), normed[part])
    assert torch.equal(avx512_elementwise.rotate(x[part], cos[part], sin[part]), turned[part])
