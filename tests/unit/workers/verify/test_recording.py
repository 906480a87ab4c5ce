"""Recording changes nothing: the same bits with hooks and without, and no hook is left afterwards."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from oarlock.workers.attention.backend import FusedBackend, FusedLatentBackend
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.distributed.parallel_state import TensorParallel
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
    """Has a kernel for the operations before `attend`, which shows none of their results."""

    def rotate_and_write(self, *inputs: object, **named: object) -> Tensor:
        raise AssertionError("a recording layer calls separate operations")

    norm_rotate_and_write = rotate_and_write


@pytest.mark.parametrize("family", ["qwen3", "youtu"])
def test_fused_backends_are_recorded_by_separate_operations(tmp_path: Path, family: str) -> None:
    path = make_tiny(tmp_path, family, num_hidden_layers=1)

    def work(tp: TensorParallel) -> Tensor:
        decoder = load_decoder(path, tp)
        plain = PagedRun(decoder).step(WORK)
        recording = RecordingDecoder(decoder, diagnostics=True)
        run = PagedRun(recording, FusedReference)  # ty: ignore[invalid-argument-type]
        (backend,) = run.backends.values()
        assert isinstance(backend, FusedBackend) and isinstance(backend, FusedLatentBackend)
        recorded = run.step(WORK)
        recording.close()
        partial = {"o_proj_partial", "mlp_partial", "gate_up_mirrored"}
        latents = {"absorbed", "attended"} if family == "youtu" else set()
        assert set(recording.last) == {*tensor_names(decoder.spec), *(f"0.{name}" for name in partial | latents)}
        return torch.stack([torch.cat(list(logits.values())) for logits in (plain, recorded)])

    for plain, recorded in on_ranks(2, work):
        assert torch.equal(plain, recorded)
