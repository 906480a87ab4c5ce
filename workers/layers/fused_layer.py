"""The layers of a decoder in fewer, larger calls, with the layers' own `__call__` as the reference of both ways.

On pages of the C++ attention backend each half of a layer is one call of a kernel (`PreparedLayers`): between separate
calls, Python and torch take longer than the arithmetic of a small step. Everything that a half needs is written down
once, as addresses, and a step once for all layers. The bits are the same.

With kernels in Triton every residual addition is in the kernel of the norm that follows it, across layers too
(`run_joined`): a launch costs as much there as a pass over the rows. Results differ in when they are rounded: a sum
over ranks comes in float32, and is rounded once, with the residual.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, LayerKV
from oarlock.workers.attention.cpp import CppBackend, CppPlan
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu.fused_layer import (
    ALL_CAME,
    CAttentionHalf,
    CLayerHalf,
    CLayerStep,
    CPackedWeight,
    bound,
)
from oarlock.workers.kernels.cpu.gemm import (
    ELEMENT_TYPES,
    CppGatedMatmul,
    CppMatmul,
    CppPackedGatedMatmul,
    CppPackedMatmul,
)
from oarlock.workers.kernels.cpu.quantized_gemm import PackedFp8, PackedGrouped, PackedInt8
from oarlock.workers.kernels.triton import availability
from oarlock.workers.layers.attention import Attention
from oarlock.workers.layers.linear import GatedMLP, GatedParallelLinear, QKVParallelLinear, RowParallelLinear
from oarlock.workers.layers.norm import HeadNorm, RMSNorm

Part = TypeVar("Part")
Product = CppMatmul | CppPackedMatmul
GatedProduct = CppGatedMatmul | CppPackedGatedMatmul
_PRODUCTS = (CppMatmul, CppPackedMatmul)
_GATED_PRODUCTS = (CppGatedMatmul, CppPackedGatedMatmul)
_DENSE = 0  # the kind of a packed weight in the model's dtype: `WeightKind` in csrc/gemm/int8.h


class CannotPrepare(Exception):
    """The layers must run as separate operations; the message is the reason in one phrase."""


class Block(Protocol):
    """A decoder layer. With norms after its halves, it also has an `attention_post_norm` and an `mlp_post_norm`."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP


class PreparedLayers:
    """The halves of `layers`, in order. Results are as from calling the layers one after the other."""

    def __init__(
        self,
        layers: Sequence[Block],
        rotary_of: Sequence[int],
        tp: TensorParallel,
        kv: list[LayerKV],
        backend: AttentionBackend,
    ) -> None:
        """`rotary_of`: for each layer, which of the step's rotary tables. `kv`: pages that `backend` allocated.

        Raises `CannotPrepare`.
        """
        if type(backend) is not CppBackend:
            raise CannotPrepare(f"attention is computed by {type(backend).__name__}")
        self.tp = tp
        self._layers = list(layers)
        self._kv, self._backend = kv, backend
        self._pages = [(pages.k, pages.v) for pages in kv]
        self._parts = _Parts(backend.kernels, backend.spec.dtype)
        self._halves: list[CAttentionHalf | CLayerHalf] = []
        self._calls: list[tuple[Callable[[int, int], int], int]] = []
        for block, rotary, pages in zip(layers, rotary_of, kv, strict=True):
            self._add_attention(block, rotary, pages)
            self._add_mlp(block)
        self._add_total = bound(self._parts.kernels).oarlock_add_total
        # For checks: gets the number of each half, attention and MLP in turn, and what it left in `hidden`.
        self.after_half: Callable[[int, Tensor], None] | None = None

    def serves(self, layers: Sequence[Block], kv: list[LayerKV], backend: AttentionBackend) -> bool:
        """Whether these are the layers, pages and backend as they were prepared: no part was replaced since."""
        same = kv is self._kv and backend is self._backend and layers == self._layers
        return same and self._parts.are_unchanged()

    def __call__(self, hidden: Tensor, batch: ForwardBatch, tables: list[Tensor], plan: CppPlan) -> None:
        """Replace `hidden` [T, hidden size] by the last layer's result.

        `tables`: of each `RotaryTable`, the rows of all positions. `plan`: what the backend's `prepare` returned.
        """
        assert hidden.is_contiguous() and hidden.dtype == self._parts.dtype
        partial = None if self.tp.size == 1 else torch.empty(hidden.shape, dtype=torch.float32)
        group = self.tp.group_for_kernels
        step = CLayerStep(
            hidden.data_ptr(), None if partial is None else partial.data_ptr(), len(hidden), batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(), tuple((table.data_ptr(), table.shape[1]) for table in tables),
            ctypes.addressof(plan.step), None if group is None else group.address,
        )  # fmt: skip
        at = ctypes.addressof(step)
        for number, (run, half) in enumerate(self._calls):
            missing = run(half, at)
            if group is not None:
                if missing != ALL_CAME:
                    raise group.lost(missing)
            elif partial is not None:
                total = self.tp.all_reduce(partial)
                assert total.is_contiguous() and total.dtype == torch.float32
                self._add_total(half, at, total.data_ptr())
            if self.after_half is not None:
                self.after_half(number, hidden)

    def _add_attention(self, block: Block, rotary: int, pages: LayerKV) -> None:
        parts = self._parts
        attention = parts.take(block, "attention", Attention)
        norm = parts.take(block, "attention_norm", RMSNorm)
        half = self._half(
            norm,
            parts.take(parts.take(attention, "qkv", QKVParallelLinear), "product", *_PRODUCTS),
            parts.take(attention, "output", RowParallelLinear),
            parts.take_optional(block, "attention_post_norm", RMSNorm),
        )
        head_norm = parts.take_optional(attention, "norm", HeadNorm)
        described = CAttentionHalf(
            half, ctypes.addressof(self._backend.layer(attention.spec)), _scale(parts, head_norm, norm.eps),
            pages.k.data_ptr(), pages.v.data_ptr(), rotary,
        )  # fmt: skip
        self._call("oarlock_attention_half", described)

    def _add_mlp(self, block: Block) -> None:
        parts = self._parts
        mlp = parts.take(block, "mlp", GatedMLP)
        half = self._half(
            parts.take(block, "mlp_norm", RMSNorm),
            parts.take(parts.take(mlp, "gate_up", GatedParallelLinear), "product", *_GATED_PRODUCTS),
            parts.take(mlp, "down", RowParallelLinear),
            parts.take_optional(block, "mlp_post_norm", RMSNorm),
        )
        self._call("oarlock_mlp_half", half)

    def _half(
        self, norm: RMSNorm, into: Product | GatedProduct, out: RowParallelLinear, post_norm: RMSNorm | None
    ) -> CLayerHalf:
        parts = self._parts
        leaving = parts.weight(parts.take(out, "product", *_PRODUCTS))
        bias = parts.take_optional(out, "bias", Tensor)  # with several ranks it is not the product's
        leaving.bias = None if bias is None else bias.data_ptr()
        return CLayerHalf(
            _scale(parts, norm, norm.eps), _scale(parts, post_norm, norm.eps), parts.weight(into), leaving,
            norm.eps, ELEMENT_TYPES[parts.dtype],
        )  # fmt: skip

    def _call(self, function: str, half: CAttentionHalf | CLayerHalf) -> None:
        self._halves.append(half)
        self._calls.append((getattr(bound(self._parts.kernels), function), ctypes.addressof(half)))


class _Parts:
    """Keeps alive the parts that the descriptions point into, and checks that the layers still use these parts."""

    def __init__(self, kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
        """The kernels and element type that all weights must be packed for."""
        self.kernels = kernels
        self.dtype = dtype
        self._taken: list[tuple[dict[str, Any], str, object]] = []

    def take(self, owner: object, name: str, *kinds: type[Part]) -> Part:
        """The attribute, which must be exactly one of `kinds`: anything else may compute something else."""
        part = vars(owner).get(name)
        if not isinstance(part, kinds) or type(part) not in kinds:
            raise CannotPrepare(f"{name} is a {type(part).__name__}, not a {kinds[0].__name__}")
        self._taken.append((vars(owner), name, part))
        return part

    def take_optional(self, owner: object, name: str, kind: type[Part]) -> Part | None:
        """The attribute as `take` returns it; None if it is None or missing."""
        if vars(owner).get(name) is not None:
            return self.take(owner, name, kind)
        self._taken.append((vars(owner), name, None))
        return None

    def weight(self, product: Product | GatedProduct) -> CPackedWeight:
        if isinstance(product, CppPackedMatmul | CppPackedGatedMatmul):
            weight = self.take(product, "weight", PackedInt8, PackedGrouped, PackedFp8)
            packed, columns, kind, slices = weight.memory, weight.columns, weight.kind, weight.slices
        else:
            weight, kind = product, _DENSE
            slices = product.slices if isinstance(product, CppMatmul) else 1
            packed = self.take(product, "packed", Tensor)
            columns = 2 * product.width if isinstance(product, CppGatedMatmul) else product.columns
        if weight.kernels is not self.kernels or product.dtype != self.dtype:
            raise CannotPrepare("a weight is packed for other kernels or another type")
        bias = self.take_optional(product, "bias", Tensor)
        return CPackedWeight(
            packed.data_ptr(), None if bias is None else bias.data_ptr(), columns, weight.inputs, product.epilogue,
            kind, slices,
        )  # fmt: skip

    def are_unchanged(self) -> bool:
        return all(owner.get(name) is part for owner, name, part in self._taken)


def _scale(parts: _Parts, norm: RMSNorm | HeadNorm | None, eps: float) -> int | None:
    """The address of a norm's scale, float32. Raises `CannotPrepare` unless kernels compute it, with epsilon `eps`."""
    if norm is None:
        return None
    if not norm.has_kernel or norm.eps != eps:
        raise CannotPrepare("norms are computed by torch, or differ in epsilon")
    return parts.take(norm, "weight", Tensor).data_ptr()


def joining_pays_off(device: torch.device) -> bool:
    """Whether there are kernels for it on `device`; without, layers compute the same in more operations."""
    return availability.can_serve(device)


def can_join(layers: Sequence[Block]) -> bool:
    """Whether no norm was replaced, by what records its result for example."""
    return all(type(norm) is RMSNorm for block in layers for norm in _norms(block) if norm is not None)


def run_joined(
    layers: Sequence[Block],
    last_norm: RMSNorm,
    hidden: Tensor,
    angles: Sequence[tuple[Tensor, Tensor]],
    batch: ForwardBatch,
    kv: list[LayerKV],
    backend: AttentionBackend,
    plan: Any,
) -> Tensor:
    """`hidden` [T, hidden size] -> the same shape, after the last layer and `last_norm`.

    `angles`: cos and sin for each layer (`RotaryTable`). `plan`: what the backend's `prepare` returned for this step.
    """
    normed = layers[0].attention_norm(hidden)
    following = [*(block.attention_norm for block in layers[1:]), last_norm]
    for block, (cos, sin), pages, next_norm in zip(layers, angles, kv, following, strict=True):
        _, attention_post_norm, _, mlp_post_norm = _norms(block)
        mixed = block.attention.mixed(normed, cos, sin, batch, pages, backend, plan)
        attended = block.attention.output.unrounded(mixed)
        hidden, normed = block.mlp_norm.of_sum(hidden, attended, attention_post_norm)
        fed = block.mlp.unrounded(normed)
        hidden, normed = next_norm.of_sum(hidden, fed, mlp_post_norm)
    return normed


def _norms(block: Block) -> tuple[RMSNorm, RMSNorm | None, RMSNorm, RMSNorm | None]:
    """Norms before and after attention, before and after the MLP. Only some families have norms after."""
    after = getattr(block, "attention_post_norm", None), getattr(block, "mlp_post_norm", None)
    return block.attention_norm, after[0], block.mlp_norm, after[1]
