"""Recording changes nothing: the same bits with hooks and without, and no hook is left afterwards."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.attention.backend import FusedBackend, FusedLatentBackend, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.rotary import rotate, rotate_neighbours
from oarlock.workers.verify.compare import tensor_names
from oarlock.workers.verify.rank import RecordingDecoder
from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.tiny_models import make_tiny

WORK = {0: [3, 4, 5], 1: [7]}


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("size", [1, 2])
def test_every_tensor_is_recorded_and_nothing_changes(tmp_path: Path, family: str, size: int) -> None:
    path = make_tiny(tmp_path, family)

    def work(tp: TensorParallel) -> Tensor:
        decoder = load_decoder(path, tp)
        parts = [(block, block.attention.qkv, block.mlp.down) for block in decoder.layers]
        plain = PagedRun(decoder).step(WORK)
        recording = RecordingDecoder(decoder, diagnostics=True)
        recorded = PagedRun(recording).step(WORK)  # ty: ignore[invalid-argument-type]
        partial = {"o_proj_partial", "mlp_partial"} if size > 1 else set()
        extra = {f"{layer}.{name}" for layer in range(3) for name in partial | {"gate_up_mirrored"}}
        assert set(recording.last) == {*tensor_names(decoder.spec), *extra}
        assert {len(tensor) for tensor in recording.last.values()} == {4}
        shapes = {
            name: tuple(recording.last[f"1.{name}"].shape[1:]) for name in ("q_rope", "k", "attention", "gate_up")
        }
        heads, kv_heads = 8 // size, 4 // size
        assert shapes == {
            "q_rope": (heads, 24), "k": (kv_heads, 24), "attention": (heads, 24), "gate_up": (96 // size,),
        }  # fmt: skip
        recording.close()
        assert "all_reduce" not in vars(tp)
        assert [(block, block.attention.qkv, block.mlp.down) for block in decoder.layers] == parts
        again = PagedRun(decoder).step(WORK)
        assert len(recording.steps) == 1
        return torch.stack([torch.cat(list(logits.values())) for logits in (plain, recorded, again)])

    for plain, recorded, again in on_ranks(size, work):
        assert torch.equal(plain, recorded) and torch.equal(plain, again)


class FusedReference(ReferenceBackend):
    """Has kernels for the operations before `attend`, which show keys in the pages only. `fault` multiplies these."""

    fault: ClassVar[float] = 1.0

    def rotate_and_write(
        self,
        kv: LayerKV,
        qkv: Tensor,
        norm: tuple[Tensor, float],
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        **options: object,
    ) -> Tensor:
        (weight, eps), kv_heads = norm, self.spec.num_kv_heads
        qk = F.rms_norm(qkv[:, :-kv_heads], (self.spec.head_dim,), None, eps) * weight
        qk = rotate(qk, cos, sin, qkv.dtype)
        self.write(kv, qk[:, -kv_heads:] * self.fault, qkv[:, -kv_heads:], batch)
        return qk[:, :-kv_heads]

    def norm_rotate_and_write(
        self,
        kv: LayerKV,
        q: Tensor,
        rows: Tensor,
        norm: tuple[Tensor, float],
        angles: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        **options: object,
    ) -> Tensor:
        rank, queries = self.spec.value_width, q.new_empty(*q.shape[:2], self.spec.head_dim)
        q_rope, k_rope = q[:, :, rank - self.spec.head_dim :], rows[:, None, rank:]
        both = rotate_neighbours(torch.cat((q_rope, k_rope), 1), *angles, q.dtype)
        latent = F.rms_norm(rows[:, :rank], (rank,), *norm)
        self.write(kv, torch.cat((latent, both[:, -1]), 1).unsqueeze(1) * self.fault, None, batch)
        queries[:, :, rank:] = both[:, :-1]
        return queries

    def stored_keys(self, kv: LayerKV, batch: ForwardBatch) -> Tensor:
        return kv.k.flatten(0, 1)[batch.slots[self.spec.group]]


@pytest.mark.parametrize(("family", "written"), [("qwen3", ["k_rope"]), ("youtu", ["latent", "k_rope"])])
def test_keys_of_fused_kernels_are_read_from_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, written: list[str]
) -> None:
    path = make_tiny(tmp_path, family, num_hidden_layers=1)

    def recorded(tp: TensorParallel, backend: type[ReferenceBackend]) -> dict[str, Tensor]:
        recording = RecordingDecoder(load_decoder(path, tp), diagnostics=True)
        run = PagedRun(recording, backend)  # ty: ignore[invalid-argument-type]
        (used,) = run.backends.values()
        is_fused = isinstance(used, FusedBackend), isinstance(used, FusedLatentBackend)
        assert is_fused == (backend is FusedReference,) * 2
        run.step(WORK)
        recording.close()
        return recording.last

    for right, found in on_ranks(2, lambda tp: (recorded(tp, ReferenceBackend), recorded(tp, FusedReference))):
        assert right.keys() == found.keys()
        for name, tensor in right.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(FusedReference, "fault", 3.0)
    (wrong,) = on_ranks(1, lambda tp: recorded(tp, FusedReference))
    (right,) = on_ranks(1, lambda tp: recorded(tp, ReferenceBackend))
    for name in written:
        torch.testing.assert_close(wrong[f"0.{name}"], 3 * right[f"0.{name}"], rtol=1e-4, atol=1e-5)
