"""Keys and values of 8 bits in the Triton kernels: the reference's bits are stored, and attention agrees with it.

On a CUDA device, or else on the CPU in Triton's interpreter.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.kv_format import ROUNDED, dequantized
from oarlock.workers.attention.reference import ReferenceBackend, Sequence, attend_one
from oarlock.workers.attention.triton_backend import TritonBackend
from oarlock.workers.layers.rotary import rotate_with_torch
from tests.unit.workers.attention.test_kv_format import odd_rows
from tests.unit.workers.attention_cases import Case, Seq, batch_of
from tests.unit.workers.kernels.triton.test_triton_attention import DEVICE, TOLERANCE, TYPES, backend_of

pytestmark = [
    pytest.mark.slow,
    # The interpreter's, where numbers of one kind are converted to another that cannot hold them.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
# Whether the device converts fp8 itself; another one's way can be tried in the interpreter alone.
WAYS = [("int8", False), ("fp8", False), ("fp8", True)]
each_form = pytest.mark.parametrize("cache", ROUNDED)


def stored(spec: KVSpec, pages: Tensor) -> Tensor:
    """The rows of pages as the reference keeps them: [blocks, block_size, heads, row]."""
    width, size = spec.head_dim, spec.block_size
    rows = pages[..., : size * width].unflatten(-1, (size, width))
    scales = pages[..., size * width :].unflatten(-1, (size, -1))
    return torch.cat([rows, scales], -1).transpose(1, 2)


@each_form
@pytest.mark.parametrize("width", [16, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_pages_hold_the_bits_of_the_reference(dtype: torch.dtype, width: int, cache: str) -> None:
    """Written with the rotation, by angles of 0, and without."""
    spec = KVSpec(1, 2, width, 16, dtype, DEVICE, cache)
    rows = odd_rows(width, dtype)
    rows = torch.cat([rows[:80:5], rows[80:]])
    if dtype == torch.bfloat16:  # the interpreter converts subnormal ones otherwise than devices do
        rows = rows[~((rows != 0) & (rows.abs() < torch.finfo(dtype).tiny)).any(1)]
    rows = rows.to(DEVICE)
    count = len(rows)
    k = torch.stack([rows, rows.flip(0)], 1)  # [tokens, heads, D]
    v = torch.stack([rows.roll(7, 0), rows.roll(-9, 0)], 1)
    blocks = torch.tensor([[3, 1, 4, 2, 6, 5][: -(-count // 16)]], dtype=torch.int32)
    batch = batch_of(blocks.numpy(), [Seq(count, count)], 16, DEVICE)
    assert len(batch.slots[0]) == count
    expected, apart, fused = (kind(spec).allocate(7)[0] for kind in (ReferenceBackend, TritonBackend, TritonBackend))
    ReferenceBackend(spec).write(expected, k, v, batch)
    TritonBackend(spec).write(apart, k, v, batch)
    keys = torch.where(k.isfinite(), k, 0.0)  # a number that is not finite times 0 is none
    cos, sin = torch.ones(count, 1, 4, device=DEVICE), torch.zeros(count, 1, 4, device=DEVICE)
    TritonBackend(spec).rotate_and_write(fused, torch.cat([keys, keys, v], 1), None, cos, sin, batch)
    for ours in (apart, fused):
        assert torch.equal(stored(spec, ours.v)[1:], expected.v[1:])
    assert torch.equal(stored(spec, apart.k)[1:], expected.k[1:])
    ReferenceBackend(spec).write(expected, rotate_with_torch(keys, cos, sin, dtype), v, batch)
    assert torch.equal(stored(spec, fused.k)[1:], expected.k[1:])


@pytest.mark.parametrize(("cache", "native"), WAYS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_attention_agrees_with_the_reference(dtype: torch.dtype, cache: str, native: bool) -> None:
    for group, width, block, window, processors in [(4, 64, 16, None, 16), (3, 80, 24, 20, 1)]:
        spec = KVSpec(1, 1, width, block, dtype, DEVICE, cache)
        layer = AttentionSpec(0, group, 1, width, width**-0.5, window)
        case = Case(spec, layer, [Seq(1, 70), Seq(9, 40)])
        for scale, rows in enumerate(case.v[0]):  # each token of another size, so that another's scale would show
            rows *= 0.05 * (scale % 7 + 1)
        ours = backend_of(spec, processors)
        if DEVICE.type == "cpu":
            ours.native_fp8 = native
        found = (case.run(each, attends_earlier=False) for each in (ours, ReferenceBackend(spec)))
        for result, wanted in zip(*found, strict=True):
            torch.testing.assert_close(result, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


class Exact(ReferenceBackend):
    """Exact attention in float64, over the same pages."""

    def attend(
        self, q: Tensor, kv: LayerKV, plan: list[Sequence], layer: AttentionSpec, *sinks: Tensor | None
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        for seq in plan:
            k, v = (dequantized(self.spec.kv_format, pages.flatten(0, 1)[seq.slots]).double() for pages in (kv.k, kv.v))
            out[seq.start : seq.stop] = attend_one(q[seq.start : seq.stop].double(), k, v, layer, *sinks)
        return out.flatten(1)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("cache", ["auto", *ROUNDED])
def test_it_is_as_near_to_float64_as_the_reference(cache: str, softcap: float | None) -> None:
    """Root mean square errors in float32, most of which come from scores of up to 10: 0.98 to 1.1 times the reference's
    in the interpreter, with pages of every form.

    Yet with int8 the largest difference between both, 6e-6, is 3 to 5 times that of other forms. There scores are sums
    of products with whole numbers, multiplied by the scale afterwards, so both round apart; of equal numbers the
    interpreter's scores are the reference's bits, and only what follows rounds apart.
    """
    spec = KVSpec(1, 1, 128, 16, torch.float32, DEVICE, cache)
    layer = AttentionSpec(0, 4, 1, 128, 0.25, None, softcap)
    case = Case(spec, layer, [Seq(8, 60)])
    found, reference, exact = (
        torch.cat(case.run(backend)).double() for backend in (backend_of(spec, 1), ReferenceBackend(spec), Exact(spec))
    )
    error, theirs = ((each - exact).pow(2).mean().sqrt() for each in (found, reference))
    assert error <= (1.3 if DEVICE.type == "cpu" else 6.0) * theirs  # devices take products of 22 bits


def test_a_key_alone_gives_its_value_back() -> None:
    """Bit by bit, beside keys whose rows have other scales and are hidden by the window."""
    spec = KVSpec(1, 1, 32, 16, torch.float32, DEVICE, "int8")
    case = Case(spec, AttentionSpec(0, 1, 1, 32, 0.2, sliding_window=1), [Seq(40, 40)])
    (found,) = case.run(backend_of(spec, 1))
    assert torch.equal(found, dequantized(spec.kv_format, spec.kv_format.rounded(case.v[0][:, 0])))


def test_values_that_are_small_keep_their_digits_in_float16() -> None:
    """Weights times scales would be subnormal numbers of float16."""
    spec = KVSpec(1, 1, 32, 16, torch.float16, DEVICE, "int8")
    case = Case(spec, AttentionSpec(0, 2, 1, 32, 0.1), [Seq(3, 70)])
    case.v = [v * 2**-10 for v in case.v]
    (found,), (wanted,) = case.run(backend_of(spec, 1)), case.run(ReferenceBackend(spec))
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-3)


@each_form
def test_a_number_that_is_not_finite_is_not_hidden(cache: str) -> None:
    """It makes the results of the tokens that see it NaN, and leaves other sequences alone."""
    spec = KVSpec(1, 2, 32, 16, torch.float32, DEVICE, cache)
    for name in ("k", "v"):
        case = Case(spec, AttentionSpec(0, 2, 2, 32, 0.125), [Seq(25, 25), Seq(9, 9)])
        getattr(case, name)[0][20, 0, 5] = torch.inf
        bad, good = case.run(backend_of(spec, 1))
        assert good.isfinite().all() and not bad[20:, 5].isfinite().any()


@pytest.mark.parametrize("native", [False, True])
def test_every_number_of_8_bits_is_read_as_what_it_is(native: bool) -> None:
    """One key alone: attention gives its value back."""
    spec = KVSpec(1, 1, 256, 16, torch.float32, DEVICE, "fp8")
    v = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).float().view(1, 1, 256)
    if native and DEVICE.type == "cpu":
        v = v.nan_to_num(0.0)  # the interpreter's conversion knows no NaN
    backend = TritonBackend(spec)
    backend.native_fp8 = native or DEVICE.type == "cuda"
    kv, batch = backend.allocate(2)[0], batch_of(np.array([[1]], np.int32), [Seq(1, 1)], 16, DEVICE)
    backend.write(kv, torch.ones_like(v), torch.zeros_like(v), batch)
    kv.v[1, 0, :256] = v.to(torch.float8_e4m3fn).view(torch.uint8).view(256)
    out = backend.attend(torch.ones_like(v), kv, backend.prepare(batch), AttentionSpec(0, 1, 1, 256, 0.1))
    torch.testing.assert_close(out.view(256), v.view(256), atol=0, rtol=0, equal_nan=True)
