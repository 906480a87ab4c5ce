"""Triton's interpreter in tests: quicker, and with products that have the same bits for every row, as on a device."""

from collections.abc import Callable

import numpy as np
import pytest
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def patch_language_once_a_launch() -> None:
    """Patch the language of kernels at a launch and, within it, once for each further module that is called.

    The interpreter does so at each call of a function by a kernel, which takes half of its time and changes nothing.
    """
    if not hasattr(interpreter, "_LangPatchScope"):  # a version of Triton that does it otherwise
        return
    patch, patched = interpreter._patch_lang, set[str]()

    def patch_once(function: Callable) -> interpreter._LangPatchScope:
        module = function.__globals__["__name__"]
        if module in patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not patched:  # a launch, which restores the language at its end
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.add(module)
        return scope

    interpreter._patch_lang = patch_once


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
