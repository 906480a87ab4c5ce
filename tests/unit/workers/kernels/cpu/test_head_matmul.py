"""The matmul of heads at every level: against float64, and the same bits as one matmul for each head, in any batch."""

import pytest
import torch

from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.kernels.cpu.gemm import CppMatmul
from oarlock.workers.kernels.cpu.head_matmul import CppHeadMatmul
from tests.unit.workers.kernel_levels import PARAMETERS, threads, using


@pytest.mark.parametrize("level", PARAMETERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(3, 128, 32), (5, 24, 136), (2, 40, 1100)])
def test_a_row_of_a_head_has_the_bits_of_its_own_matmul(
    heads: int, outputs: int, inputs: int, dtype: torch.dtype, level: ISALevel
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(heads, outputs, inputs).to(dtype)
    wide = torch.randn(250, heads, inputs + 8).to(dtype)  # more rows than are multiplied at a time
    x = wide[..., 8:]
    with using(level):
        ours, of_head = CppHeadMatmul(weight), [CppMatmul(one.contiguous(), None) for one in weight]
        rows = torch.full((250, heads, outputs + 16), 7, dtype=dtype)
        with threads(3):
            together = ours(x, rows[..., 16:])
        assert together.data_ptr() == rows[..., 16:].data_ptr() and bool((rows[..., :16] == 7).all())
        for head, matmul in enumerate(of_head):
            assert torch.equal(together[:, head], matmul(x[:, head]))
        with threads(1):
            assert all(
                torch.equal(ours(x[row : row + count]), together[row : row + count])
                for row, count in ((249, 1), (3, 9))
            )
    exact = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    error = 4e-7 * inputs**0.5 + torch.finfo(dtype).eps
    torch.testing.assert_close(together.double(), exact, atol=error * inputs**0.5, rtol=error)
