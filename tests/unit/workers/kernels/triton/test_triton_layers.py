"""The Triton kernels of norms and activations against torch's operations, and layers whose halves they join.

On a CUDA device, or else on the CPU in Triton's interpreter.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.attention.backend import AttentionBackend
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.attention.triton_backend import TritonBackend
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.triton.elementwise import activated, add_and_norm, gate_rows, gated, rms_norm
from oarlock.workers.layers import joined_layers, placement
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.norm import RMSNorm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.quantization import matmul
from oarlock.workers.quantization.fixed_order import FIXED_ORDER
from oarlock.workers.quantization.matmul import PLAIN_ACTIVATIONS, activated_with_torch, gated_with_torch
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.verify.rank import RecordingDecoder
from tests.golden.paged_run import PagedRun, load_decoder
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.weights_in_memory import MemoryWeights, RecordingRank, random_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's, for -60
each_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def normed(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """RMSNorm in float32, not rounded."""
    return F.rms_norm(x.float(), (x.shape[1],), weight.float(), eps)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), atol=4e-6, rtol=ROUNDING[found.dtype])


@each_dtype
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1000), (5, 1024), (0, 64)])
def test_a_gate_multiplies_by_its_sigmoid(rows: int, width: int, dtype: torch.dtype) -> None:
    x, gate = noise(rows, width, dtype=dtype), noise(rows, width, dtype=dtype, seed=1) * 4
    wanted = x.float() * torch.sigmoid(gate.float())
    close(gate_rows(x.clone(), gate), wanted)


def theirs(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of transformers: rounded before the weight, and after it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", [torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("post", [False, True])
def test_a_rounded_product_loses_no_more_than_in_transformers(post: bool, dtype: torch.dtype) -> None:
    """One rank's product comes rounded into the joined kernel, where several ranks' sum is float32.

    Without a norm before the addition the sum has the bits of transformers'; its norm has one rounding less: 0.85 of
    their error, against float64. The interpreter cuts bfloat16 off in place of rounding, so that is left to devices.
    """
    x, weight = noise(64, 512, dtype=dtype), noise(768, 512, dtype=dtype, seed=1) / 512**0.5
    residual, scale, post_scale = noise(64, 768, dtype=dtype, seed=2), *(noise(2, 768, dtype=dtype, seed=3) / 5 + 1)
    product = F.linear(x, weight)
    ours = add_and_norm(product, residual, scale, EPS, (post_scale, EPS) if post else None)
    added = residual + (theirs(product, post_scale) if post else product)
    true = F.linear(x.double(), weight.double())
    truth = residual.double() + (exact(true, post_scale) if post else true)
    assert post or torch.equal(ours[0], added)
    for found, other, wanted in zip(ours, (added, theirs(added, scale)), (truth, exact(truth, scale)), strict=True):
        error, bound = ((each.double() - wanted).pow(2).mean().sqrt() for each in (found, other))
        assert error <= bound


@each_dtype
@pytest.mark.parametrize("size", [16, 96, 896, 4096])
def test_norm(size: int, dtype: torch.dtype) -> None:
    wide = noise(5, size + 8, dtype=dtype)
    x = wide[:, :size]  # rows lie further apart than they are long
    for weight in (noise(size, dtype=dtype, seed=1), 1.0 + noise(size, seed=2)):
        found = rms_norm(x, weight, EPS)
        assert found.dtype == dtype
        close(found, normed(x, weight))
        assert torch.equal(rms_norm(x[3:4], weight, EPS), found[3:4])


@each_dtype
@pytest.mark.parametrize("size", [96, 896])
@pytest.mark.parametrize("sums", ["float32 sums", "rounded sums"])
@pytest.mark.parametrize("post", [False, True], ids=["", "normed before"])
def test_norm_of_a_sum(size: int, dtype: torch.dtype, sums: str, post: bool) -> None:
    x = noise(5, size, dtype=torch.float32 if sums == "float32 sums" else dtype)
    residual, weight, post_weight = noise(5, size, dtype=dtype, seed=1), noise(size, seed=2), noise(size, seed=3)
    total, found = add_and_norm(x, residual, weight, EPS, (post_weight, 1e-3) if post else None)
    assert total.dtype == found.dtype == dtype
    close(total, (normed(x, post_weight, 1e-3) if post else x.float()) + residual.float())
    close(found, normed(total, weight))


@each_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [48, 1500])
def test_activation(width: int, activation: str, dtype: torch.dtype) -> None:
    y = noise(3, 2 * width, dtype=dtype) * 4
    y[0, :3] = torch.tensor([60.0, -60.0, 0.0])
    found = gated(y, activation)
    assert found.dtype == dtype
    close(found, gated_with_torch(y.double(), activation))
    assert torch.equal(gated(y[1:2], activation), found[1:2])


@each_dtype
@pytest.mark.parametrize("activation", PLAIN_ACTIVATIONS)
@pytest.mark.parametrize("sums", ["float32 sums", "rounded sums"])
@pytest.mark.parametrize("width", [48, 1500])
def test_activation_without_a_gate(width: int, sums: str, activation: str, dtype: torch.dtype) -> None:
    y = noise(3, width, dtype=torch.float32 if sums == "float32 sums" else dtype) * 4
    y[0, :4] = torch.tensor([60.0, -60.0, 0.0, float("nan")])
    found = activated(y, activation, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.float(), activated_with_torch(y, activation, torch.float32), atol=4e-6, rtol=ROUNDING[dtype],
        equal_nan=True,
    )  # fmt: skip
    assert torch.equal(activated(y[1:2], activation, dtype), found[1:2])


def logits(model: Decoder, backend: type[AttentionBackend] = ReferenceBackend) -> Tensor:
    """Logits of a prompt in two chunks, beside another sequence."""
    run = PagedRun(model, backend)
    steps = [run.step({0: [3, 4, 5], 1: [5]}), run.step({0: [7, 8], 1: [6]})]
    return torch.cat([rows for step in steps for rows in step.values()])


FORMS = {"int8": QUANTIZATIONS["int8"], "int4": QUANTIZATIONS["int4"], "in one order": FIXED_ORDER}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "with bias"])
def test_a_sum_over_ranks_meets_the_residual_in_the_kernel_of_the_norm(
    monkeypatch: pytest.MonkeyPatch, as_on_cuda: None, form: str, with_bias: bool
) -> None:
    """In the model's type; where bits must not depend on the batch, in float32, so that it is rounded once."""
    monkeypatch.setattr(placement, "runs_on_host", lambda device: False)
    rank = RecordingRank(1, 2)
    place = Placement(rank, torch.float16, DEVICE, FORMS[form])
    shapes = {"down.weight": (48, 256), "down.bias": (48,), "norm.weight": (48,)}
    weights = MemoryWeights({name: tensor.half() for name, tensor in random_weights(shapes).items()})
    down, norm = RowParallelLinear("down", 256, 48, with_bias, place), RMSNorm("norm", 48, EPS, place)
    down.load(weights)
    norm.load(weights)
    assert norm.triton is not None
    x, residual = noise(5, 128, dtype=torch.float16), noise(5, 48, dtype=torch.float16, seed=1)
    total = down.unrounded(x)
    (sent,) = rank.sent
    is_rounded = form != "in one order"
    assert sent.dtype == total.dtype == (torch.float16 if is_rounded else torch.float32)
    assert torch.equal(total, sent + down.bias if with_bias else sent)
    assert torch.equal(total, total.half().float()) == is_rounded
    found, normed_sum = norm.add_and_norm(residual, total)
    assert found.dtype == normed_sum.dtype == torch.float16
    assert torch.equal(found, (total + residual).half()) and torch.equal(found, down(x, residual))
    norm.triton = None
    judge, normed_judge = norm.add_and_norm(residual, total)
    assert torch.equal(judge, found)
    close(normed_sum, normed_judge)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.slow
def test_fused_layers_match_separate_layers(tmp_path: Path, family: str, as_on_cuda: None) -> None:
    """All kernels of a layer on CUDA, with attention, against torch's operations one after the other."""
    model = load_decoder(make_tiny(tmp_path, family, num_hidden_layers=2), TensorParallel.solo(), device=DEVICE)
    assert model.joins_layers and model.norm.triton is not None
    found = logits(model, TritonBackend)
    for norm in [model.norm, *(part for block in model.layers for part in block.parts if isinstance(part, RMSNorm))]:
        norm.triton = None
    joined = logits(model)
    model.joins_layers = False
    torch.testing.assert_close(joined, logits(model), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, joined, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["arcee", "starcoder2", "olmo"])
@pytest.mark.slow
def test_layers_without_a_gate_and_with_limits_match_separate_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, as_on_cuda: None
) -> None:
    """The kernels of activations, rotation and attention against torch's operations. LayerNorm has no kernel."""
    model = load_decoder(make_tiny(tmp_path, family, num_hidden_layers=2), TensorParallel.solo(), device=DEVICE)
    found = logits(model, TritonBackend)
    monkeypatch.setattr(matmul.availability, "can_serve", lambda device: False)
    torch.testing.assert_close(found, logits(model), atol=2e-5, rtol=2e-5)


def test_recorded_layers_are_not_joined(tmp_path: Path, as_on_cuda: None) -> None:
    model = load_decoder(make_tiny(tmp_path, "gemma2"), TensorParallel.solo())
    assert joined_layers.can_join(model.layers)
    recording = RecordingDecoder(model)
    assert not joined_layers.can_join(model.layers)
    recording.close()
    assert joined_layers.can_join(model.layers)
