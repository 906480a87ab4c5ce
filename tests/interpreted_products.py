"""Products of Triton's interpreter with the same bits for every row, as on a device; numpy's have not everywhere."""

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def multiply_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up in float64, where the order of a sum is lost when it is rounded."""

    def create_dot(builder: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        sums = np.matmul(_widened(a), _widened(b))
        return TensorHandle(sums.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def _widened(x: TensorHandle) -> np.ndarray:
    """Numbers in float64; of bfloat16, which numpy lacks, the interpreter holds the bits."""
    data = x.data
    if x.dtype.scalar.is_bf16():
        data = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)
