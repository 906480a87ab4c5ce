"""Matmuls with one matrix for each head, such as the projections of latent attention between heads and the latent."""

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import gemm
from oarlock.workers.kernels.cpu.head_matmul import CppHeadMatmul
from oarlock.workers.quantization.matmul import Matmul, matmul


class HeadMatmul:
    """`x[:, h] @ weight[h].T` for every head h: x [T, heads, inputs] -> [T, heads, outputs], summed in float32 and
    rounded once.

    The bits of a row do not depend on the other rows if the matmul of one head guarantees this. On CUDA devices only
    `FixedOrderHeadMatmul` does.
    """

    def __init__(self, weight: Tensor) -> None:
        """Prepare `weight` [heads, outputs, inputs], which the caller should not keep."""
        self.heads, self.outputs, self.inputs = weight.shape
        self.dtype = weight.dtype
        self.stacked: Tensor | None = None  # [heads, inputs, outputs]
        self.matmuls: list[Matmul] = []
        self.kernel: CppHeadMatmul | None = None
        if gemm.can_serve(weight):
            self.kernel = CppHeadMatmul(weight)
        elif weight.device.type != "cpu":
            self.stacked = weight.transpose(1, 2).contiguous()
        else:
            self.matmuls = [matmul(one.contiguous()) for one in weight]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the results, in `out` [T, heads, outputs] if there is one. Heads of both may be parts of wider
        rows."""
        assert x.shape[1:] == (self.heads, self.inputs) and x.dtype == self.dtype
        if self.kernel is not None:
            return self.kernel(x, out)
        y = x.new_empty((len(x), self.heads, self.outputs)) if out is None else out
        if self.stacked is not None:
            torch.bmm(x.transpose(0, 1), self.stacked, out=y.transpose(0, 1))
            return y
        for head, multiply in enumerate(self.matmuls):
            y[:, head] = multiply(x[:, head])
        return y
