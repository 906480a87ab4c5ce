"""Decoder layers in one call on the CPU. The layers' own `__call__` is the reference implementation.

With the C++ attention backend, one kernel call runs all layers of a stage (`PreparedLayers`), because Python and torch
take longer between separate calls than the arithmetic of a small step. The layers are described once, as a program of
addresses (`Program`) to which each sublayer adds its operations. A step is described once for all layers. The results
are bitwise identical.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, LayerMemory
from oarlock.workers.attention.cpp import CppBackend, CppPlan
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.rows_by_slot import RowsBySlot
from oarlock.workers.kernels.cpu import library, recurrent
from oarlock.workers.kernels.cpu.experts import CppExpertMatmul, CppRouter
from oarlock.workers.kernels.cpu.fused_layer import ALL_ARRIVED, NUM_SCRATCH, OperationKind, Rows, bound
from oarlock.workers.kernels.cpu.gemm import (
    ELEMENT_TYPES,
    CppGatedMatmul,
    CppMatmul,
    CppPackedGatedMatmul,
    CppPackedMatmul,
    Epilogue,
)
from oarlock.workers.kernels.cpu.quantized_gemm import PackedFp8, PackedGrouped, PackedInt8
from oarlock.workers.kernels.cpu.structures import (
    MOST_PAGES_GROUPS,
    MOST_QUERY_SCALES,
    MOST_ROTARIES,
    CAdaptedWeight,
    CAddition,
    CBranch,
    CColumnProduct,
    CColumns,
    CColumnScale,
    CConvolution,
    CConvolutionLayer,
    CLayerStep,
    CMoELayer,
    CNorm,
    COperation,
    CPackedWeight,
)
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.norm import LayerNorm, LayerScalar, Norm, RMSNorm
from oarlock.workers.layers.placement import Placement

Part = TypeVar("Part")
CppPlainMatmul = CppMatmul | CppPackedMatmul
CppAnyGatedMatmul = CppGatedMatmul | CppPackedGatedMatmul
MATMULS = (CppMatmul, CppPackedMatmul)
GATED_MATMULS = (CppGatedMatmul, CppPackedGatedMatmul)
MLP_ROWS = 960  # size of the row chunks between the two matmuls of an MLP
_STEP_OF_PLAN = attrgetter("step")  # functions in C save calls for each token
_HELD = Rows.NORMED_1  # buffer of a branch's result that the next layer adds
_DENSE = 0  # `WeightKind` of a packed weight in the model's dtype, csrc/gemm/int8.h


class CannotPrepare(Exception):
    """The layers must run as separate operations. The message is the reason in one phrase."""


class Branch(Protocol):
    """A sublayer in its layer, as a `BranchSpec` describes it."""

    norm: Any
    sublayer: Any
    post_norm: Any
    scale: float
    is_held: bool


class Layer(Protocol):
    """A decoder layer, as a `LayerSpec` describes it."""

    @property
    def branches(self) -> Sequence[Branch]: ...

    @property
    def stages(self) -> Sequence[Sequence[Branch]]: ...

    @property
    def scalar(self) -> object: ...

    @property
    def sum_norms(self) -> Sequence[Norm | None]: ...

    @property
    def adds_held(self) -> bool: ...


class Program:
    """The operations of layers. It keeps the parts that they point to alive.

    Private attributes describe the branch that is being built.
    """

    def __init__(
        self,
        backends: Sequence[CppBackend],
        kernels: ctypes.CDLL,
        dtype: torch.dtype,
        hidden: int,
        inputs: int = 0,
        *,
        adapts: bool = False,
    ) -> None:
        """Start an empty program. All weights must be packed for `kernels` and `dtype`.

        `backends`: of the groups of pages, in the order of the step's arrays. `inputs`: values per token of the inputs
        of all layers. `adapts`: the program is for steps in which rows have adapters.
        """
        self.adapts, self._max_rank = adapts, 0
        self.backends = backends
        self.kernels = kernels
        self.dtype = dtype
        self.hidden = hidden
        self.inputs = inputs
        self.has_identities = False  # whether steps need a place for the weights of experts without matrices
        self.branches: list[CBranch] = []
        self.query_scale = -1  # index of the current layer's query scale in a step, or -1
        self.pages = -1  # index of the current layer's group of pages in a step, or -1
        self._alive: list[object] = []  # parts, and structures that are pointed to
        self._begin()

    @property
    def backend(self) -> CppBackend:
        """The attention backend of the current layer."""
        return self.backends[self.pages]

    def take(self, owner: object, name: str, *kinds: type[Part]) -> Part:
        """Return the attribute, whose exact type must be in `kinds`: a subclass may compute something else.

        Raises `CannotPrepare` if the type differs.
        """
        part = vars(owner).get(name)
        if not isinstance(part, kinds) or type(part) not in kinds:
            raise CannotPrepare(f"{name} is a {type(part).__name__}, not a {kinds[0].__name__}")
        self._alive.append(part)
        return part

    def take_optional(self, owner: object, name: str, *kinds: type[Part]) -> Part | None:
        """Return the attribute as `take` does, or None if it is None. A missing attribute, as of a wrapper with hooks,
        raises `CannotPrepare` as well."""
        return None if vars(owner).get(name, owner) is None else self.take(owner, name, *kinds)

    def keep(self, structure: ctypes.Structure) -> int:
        """Keep a structure alive, and return its address."""
        self._alive.append(structure)
        return ctypes.addressof(structure)

    def add(self, kind: OperationKind, source: Rows, target: Rows, parameters: ctypes.Structure, width: int) -> None:
        """Add an operation to the branch. `width`: number of values per row that it writes."""
        self._operations.append(COperation(kind, source, target, self.keep(parameters)))
        if target >= Rows.SCRATCH_0:
            buffer = target - Rows.SCRATCH_0
            self._widths[buffer] = max(self._widths[buffer], width)

    def multiply(
        self, owner: Any, source: Rows, target: Rows, *kinds: type[CppPlainMatmul] | type[CppAnyGatedMatmul]
    ) -> CPackedWeight:
        """Add the matmul of `owner`, whose type must be in `kinds`. Return its weight."""
        weight = self._weight(self.take(owner, "matmul", *kinds))
        items = 4 // self.dtype.itemsize if weight.epilogue == Epilogue.FLOAT else 1
        kind, parameters = OperationKind.MULTIPLY, weight
        if (adapted := self._adapted(owner, weight)) is not None:
            kind, parameters = OperationKind.MULTIPLY_ADAPTED, adapted
        self.add(kind, source, target, parameters, weight.columns * items)
        return weight

    def _adapted(self, owner: Any, weight: CPackedWeight) -> CAdaptedWeight | None:
        """Return the weight with the layer's pairs, if the program adapts the layer."""
        if not self.adapts or owner.adapted is None:
            return None
        pairs = owner.adapted.pairs
        self._max_rank = pairs.max_rank  # the same for all layers
        self._alive.append(pairs)
        return CAdaptedWeight(weight, ctypes.addressof(pairs.structure))

    def norm_rows(self, norm: Norm, source: Rows, target: Rows) -> None:
        self.add(OperationKind.NORM_ROWS, source, target, self.norm(norm), self.hidden)

    def norm(self, norm: Norm) -> CNorm:
        """Return the norm's structure. Raises `CannotPrepare` if no kernel computes it."""
        if not norm.has_kernel:
            raise CannotPrepare("norms are computed by torch")
        scale = self.take_optional(norm, "weight", Tensor)
        shift = self.take_optional(norm, "bias", Tensor) if isinstance(norm, LayerNorm) else None
        at = [None if vector is None else vector.data_ptr() for vector in (scale, shift)]
        return CNorm(*at, norm.size, norm.eps, isinstance(norm, LayerNorm))

    def convolve(
        self, weight: Tensor, bias: Tensor | None, states: Tensor, inputs: CColumns, target: Rows, *, silu: bool
    ) -> None:
        """Add a convolution of `inputs`, as `recurrent.causal_convolution` describes. Raises `CannotPrepare` if no
        kernel computes it."""
        channels, taps = weight.shape
        if taps not in recurrent.TAPS:
            raise CannotPrepare(f"no kernel computes a convolution over {taps} tokens")
        assert states.dtype == self.dtype and states.shape[1:] == (channels, taps - 1)
        at = None if bias is None else bias.data_ptr()
        convolution = CConvolution(weight.data_ptr(), at, channels, taps, silu)
        layer = CConvolutionLayer(convolution, states.data_ptr(), inputs)
        self._alive += [weight, bias]
        self.add(OperationKind.CONVOLVE, Rows(inputs.rows), target, layer, channels)

    def moe_layer(
        self,
        router: object,
        routed: Any,
        shared: Any,
        shared_gate: object,
        norms: tuple[CNorm | None, CNorm | None] = (None, None),
        expert_scale: Tensor | None = None,
        identities: tuple[int, Rows] | None = None,
    ) -> CMoELayer:
        """Return the structure of an MoE layer with these parts; `shared` and `shared_gate` may be None.

        `norms`: of the rows that the router and the experts read. `expert_scale`: factors of the experts' weights,
        float32 [experts]. `identities`: id of the first expert without matrices, and the rows that are its input.

        Raises `CannotPrepare` if no kernel computes it.
        """

        def address(owner: object, name: str, kind: type[CppRouter] | type[CppExpertMatmul]) -> int | None:
            if owner is None:
                return None
            part = self.take(owner, name, kind)
            if part.kernels is not self.kernels:
                raise CannotPrepare("experts are packed for other kernels")
            return ctypes.addressof(part.structure)

        def pairs(owner: Any) -> int | None:
            """Return the address of the updates of a stack of experts, if the program adapts it."""
            if not self.adapts or owner is None or owner.adapted is None:
                return None
            self._alive.append(owner.adapted)
            return ctypes.addressof(owner.adapted.structures)

        self._sums = 1 if shared is None else 2
        self._alive.append(expert_scale)
        if identities is not None:
            self.has_identities = True
            if identities[1] not in (Rows.NORMED_0, Rows.NORMED_1):
                raise CannotPrepare("the input of experts without matrices is not kept until their sum is complete")
        return CMoELayer(
            address(router, "kernel", CppRouter),
            address(routed, "matmul", CppExpertMatmul),
            address(shared, "matmul", CppExpertMatmul),
            address(shared_gate, "kernel", CppRouter),
            *(None if norm is None else self.keep(norm) for norm in norms),
            None if expert_scale is None else expert_scale.data_ptr(),
            pairs(routed),
            pairs(shared),
            *(identities or (-1, Rows.RESIDUAL)),
        )

    def finish(
        self,
        output: RowParallelLinear | CMoELayer,
        source: Rows,
        post_norm: Norm | None,
        scale: float,
        *,
        is_shared: bool,
        target: Rows = Rows.RESIDUAL,
    ) -> int | None:
        """Add `output` of `source`, the post-norm, the scale and the residual addition. Return the number of
        operations before the all-reduce, the argument of `end`.

        `is_shared`: the output is all-reduced first. `target`: other rows that get the result, which is then neither
        scaled nor added.
        """
        is_moe = isinstance(output, CMoELayer)
        first, last = OperationKind.MULTIPLY, OperationKind.FINISH_MATMUL
        if is_moe:
            first, last, parameters = OperationKind.RUN_EXPERTS, OperationKind.FINISH_EXPERTS, output
        else:
            parameters = self._weight(self.take(output, "matmul", *MATMULS))
            bias = self.take_optional(output, "bias", Tensor)  # with several ranks the matmul has none
            parameters.bias = None if bias is None else bias.data_ptr()
            self._sums = int(is_shared)
            if (adapted := self._adapted(output, parameters)) is not None:
                # A matmul that adds the bias and rounds would leave no place for the updates.
                adapted.weight.epilogue = Epilogue.FLOAT
                first, last, parameters = OperationKind.MULTIPLY_ADAPTED, OperationKind.FINISH_ADAPTED, adapted
                self._sums, self._low = 1, self._max_rank
        is_plain = post_norm is None and scale == 1.0
        other = Rows.SCRATCH_1 if source is Rows.SCRATCH_0 else Rows.SCRATCH_0
        result, before = target if is_plain else other, None
        if is_shared or is_moe or self._low:
            self.add(first, source, Rows.PARTIAL, parameters, self.hidden)
            before = len(self._operations) if is_shared else None
            self.add(last, Rows.PARTIAL, result, parameters, self.hidden)
        else:
            self.add(first, source, result, parameters, self.hidden)
        if target is not Rows.RESIDUAL:
            assert scale == 1.0, "results that are summed before the residual addition are not scaled"
            if post_norm is not None:
                self.norm_rows(post_norm, other, target)
        elif not is_plain:
            self.add_rows(other, post_norm, scale)
        return before

    def add_rows(self, source: Rows, norm: Norm | None, scale: float = 1.0) -> None:
        """Add `scale` times the rows of `source`, normed, to the residual. They are overwritten."""
        address = None if norm is None else self.keep(self.norm(norm))
        self.add(OperationKind.ADD_ROWS, source, Rows.RESIDUAL, CAddition(address, self.hidden, scale), self.hidden)

    def sum_rows(self, one: Rows, other: Rows, target: Rows) -> None:
        """Store the sum of two buffers' rows in `target`."""
        both = CColumnProduct(CColumns(one, 0, self.hidden), CColumns(other, 0, self.hidden), self.hidden)
        self.add(OperationKind.ADD_COLUMNS, one, target, both, self.hidden)

    def scale_residual(self, scale: float) -> None:
        columns = CColumns(Rows.RESIDUAL, 0, self.hidden)
        scaled = CColumnScale(columns, self.hidden, scale)
        self.add(OperationKind.SCALE_COLUMNS, Rows.RESIDUAL, Rows.RESIDUAL, scaled, self.hidden)

    def end(self, before_all_reduce: int | None = None) -> None:
        """End a branch. `before_all_reduce`: number of its operations before the all-reduce; None if there is no
        all-reduce."""
        count = len(self._operations)
        operations = (COperation * count)(*self._operations)
        self._alive.append(operations)
        widths = (ctypes.c_long * NUM_SCRATCH)(*self._widths)
        before = count if before_all_reduce is None else before_all_reduce
        self.branches.append(
            CBranch(ctypes.addressof(operations), count, before, self.rows_at_once, widths, self._sums, self._low)
        )
        self._begin()

    def _begin(self) -> None:
        self._operations: list[COperation] = []
        self._widths = [0] * NUM_SCRATCH
        self._sums = 0  # partial outputs per row in `partial`
        self._low = 0  # values of A x per adapted row in `partial`
        self.rows_at_once = 0  # rows per chunk, to keep scratch memory small; 0: all rows

    def _weight(self, matmul: CppPlainMatmul | CppAnyGatedMatmul) -> CPackedWeight:
        if isinstance(matmul, CppPackedMatmul | CppPackedGatedMatmul):
            weight = self.take(matmul, "weight", PackedInt8, PackedGrouped, PackedFp8)
            packed, columns, kind, slices = weight.memory, weight.columns, weight.kind, weight.slices
        else:
            weight, kind = matmul, _DENSE
            slices = matmul.slices if isinstance(matmul, CppMatmul) else 1
            packed = self.take(matmul, "packed", Tensor)
            columns = 2 * matmul.width if isinstance(matmul, CppGatedMatmul) else matmul.columns
        if weight.kernels is not self.kernels or matmul.dtype != self.dtype:
            raise CannotPrepare("a weight is packed for other kernels or another type")
        bias = self.take_optional(matmul, "bias", Tensor)
        return CPackedWeight(
            packed.data_ptr(), None if bias is None else bias.data_ptr(), columns, weight.inputs, matmul.epilogue,
            kind, slices,
        )  # fmt: skip


class PreparedLayers:
    """The program of `layers`, in order. Results equal those of calling the layers one after the other."""

    def __init__(
        self,
        layers: Sequence[Layer],
        last_norm: Norm | None,
        rotary_of: Sequence[int],
        scale_of: Sequence[int],
        pages_of: Sequence[int],
        hidden: int,
        placement: Placement,
        memory: list[LayerMemory],
        backends: Mapping[int, AttentionBackend],
        inputs: int = 0,
        *,
        adapts: bool = False,
    ) -> None:
        """Build the program.

        `last_norm`: norm after the last layer, or None. `rotary_of`, `scale_of`: index of each layer's rotary table
        and of its query scale in a step, or -1. `pages_of`: number of its group of pages, or -1. `hidden`: values per
        row. `memory`: memory of each layer, with pages that `backends` allocated, by the number of the group.
        `inputs`: values per token of the inputs of all layers. `adapts`: for steps in which rows have adapters.

        Raises `CannotPrepare` if the layers cannot run in one call.
        """
        for backend in backends.values():
            if type(backend) is not CppBackend:
                raise CannotPrepare(_other_attention(backend))
        if (reason := _no_kernels(placement)) is not None:
            raise CannotPrepare(f"the C++ kernels are not used: {reason}")
        if len(backends) > MOST_PAGES_GROUPS:
            raise CannotPrepare(f"layers have more than {MOST_PAGES_GROUPS} groups of pages")
        if max(rotary_of, default=0) >= MOST_ROTARIES:
            raise CannotPrepare(f"layers have more than {MOST_ROTARIES} kinds of rotary embedding")
        if max(scale_of, default=0) >= MOST_QUERY_SCALES:
            raise CannotPrepare(f"layers have more than {MOST_QUERY_SCALES} kinds of query scale")
        self.tp, dtype = placement.tp, placement.dtype
        self._layers, self._last_norm = list(layers), last_norm
        self._memory, self._backends = memory, backends
        self._groups = list(backends)  # numbers of groups in the order of the step's arrays
        self._kept: list[tuple[Tensor, ...]] = [(pages.k, pages.v) for one in memory if (pages := one.kv) is not None]
        self._kept += [one.states.parts for one in memory if one.states is not None]
        of_groups = [backend for backend in backends.values() if isinstance(backend, CppBackend)]
        self._program = program = Program(of_groups, library.library(dtype), dtype, hidden, inputs, adapts=adapts)
        self._is_shared = self.tp.size > 1
        self._has_states = any(one.states is not None for one in memory)
        self._num_normed = 0  # number of buffers for normed rows that branches of a stage share
        self._is_holding = False  # whether a branch so far holds a result that no layer has added yet
        self._adding: list[int] = []  # indices of the branches that add to `hidden`; others compute shared norms
        for layer, rotary, scale, pages, own in zip(layers, rotary_of, scale_of, pages_of, memory, strict=True):
            program.query_scale = scale
            program.pages = -1 if pages < 0 else self._groups.index(pages)
            self._add_layer(layer, rotary, own)
        # True if the program applies the final norm. A wrapped norm (e.g. one that records its output) is called
        # separately.
        self.norms_last = type(last_norm) in (RMSNorm, LayerNorm)
        if last_norm is not None and self.norms_last:
            program.norm_rows(last_norm, Rows.RESIDUAL, Rows.RESIDUAL)
            program.end()
        kernels = bound(program.kernels)
        self._run, self._finish = kernels.oarlock_run_branches, kernels.oarlock_finish_branch
        self._branches = (CBranch * len(program.branches))(*program.branches)
        self._at = ctypes.addressof(self._branches)
        self._sums = max((branch.sums for branch in program.branches), default=0)
        self._low = max((branch.low for branch in program.branches), default=0)
        # For checks: called after each branch that adds to `hidden`, with the branch's index among them and `hidden`.
        self.after_branch: Callable[[int, Tensor], None] | None = None

    def serves(
        self,
        layers: Sequence[Layer],
        last_norm: Norm | None,
        memory: list[LayerMemory],
        backends: Mapping[int, AttentionBackend],
    ) -> bool:
        """Return whether these are the layers, norm, memory and backends that were prepared.

        The parts of the layers are not compared: there are twenty per layer, and comparing them costs measurable time
        in every step. See `Decoder.parts_were_replaced`.
        """
        same = memory is self._memory and backends is self._backends and last_norm is self._last_norm
        return same and layers == self._layers

    def __call__(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        tables: list[Tensor],
        plans: Mapping[int, CppPlan],
        scales: Sequence[Tensor] = (),
        inputs: Tensor | None = None,
    ) -> None:
        """Replace `hidden` [T, hidden size] by the last layer's result, normed if `norms_last`.

        `tables`: rows of all positions of each `RotaryTable`. `plans`: results of the backends' `prepare`.
        `scales`: float32 [T] of each `QueryScaleTable`. `inputs`: inputs of all layers [T, layers, width].
        """
        program = self._program
        assert hidden.is_contiguous() and hidden.dtype == program.dtype and hidden.shape[1] == program.hidden
        normed = [torch.empty_like(hidden) for _ in range(self._num_normed)]
        rows = len(hidden)
        adapted = batch.adapters
        assert adapted is None or isinstance(adapted, RowsBySlot), "rows of a step on a device"
        adapters = None if adapted is None else adapted.structure
        assert (adapters is not None) == program.adapts
        low = 0 if adapted is None else self._low * len(adapted.rows)
        sums = self._sums * rows * program.hidden + low
        partial = torch.empty(sums, dtype=torch.float32) if sums else None
        group = self.tp.group_for_kernels
        assert batch.state is not None or not self._has_states, "recurrent layers need slots in every step"
        states = None if batch.state is None else recurrent.state_step(batch.state)
        identity_weights = torch.empty(rows) if program.has_identities else None
        step = CLayerStep(
            hidden.data_ptr(), tuple(map(Tensor.data_ptr, normed)),
            None if partial is None else partial.data_ptr(), rows, program.hidden,
            ELEMENT_TYPES[program.dtype], batch.positions.data_ptr(),
            tuple(map(Tensor.data_ptr, map(batch.slots.__getitem__, self._groups))),
            tuple([(table.data_ptr(), table.shape[1]) for table in tables]),
            tuple(map(Tensor.data_ptr, scales)),
            tuple(map(ctypes.addressof, map(_STEP_OF_PLAN, map(plans.__getitem__, self._groups)))),
            None if states is None else ctypes.addressof(states),
            None if inputs is None else inputs.data_ptr(), program.inputs,
            None if adapters is None else ctypes.addressof(adapters),
            None if identity_weights is None else identity_weights.data_ptr(),
            None if group is None else group.address,
        )  # fmt: skip
        if self.after_branch is None and (group is not None or not self._is_shared):
            self._run_some(0, len(self._branches), step)
            return
        for number in range(len(self._branches)):
            self._run_some(number, number + 1, step)
            if group is None and self._is_shared and number in self._adding:
                assert partial is not None
                branch = self._branches[number]
                low = 0 if adapted is None else branch.low * len(adapted.rows)
                total = self.tp.all_reduce(partial[: branch.sums * rows * program.hidden + low])
                assert total.is_contiguous() and total.dtype == torch.float32
                step.partial = total.data_ptr()
                self._finish(self._at + number * ctypes.sizeof(CBranch), ctypes.addressof(step))
                step.partial = partial.data_ptr()
            if self.after_branch is not None and number in self._adding:
                self.after_branch(self._adding.index(number), hidden)

    def _run_some(self, first: int, last: int, step: CLayerStep) -> None:
        missing = self._run(self._at, first, last, ctypes.addressof(step))
        if missing != ALL_ARRIVED:
            group = self.tp.group_for_kernels
            assert group is not None
            raise group.lost(missing)

    def _add_layer(self, layer: Layer, rotary: int, memory: LayerMemory) -> None:
        scalar = self._program.take_optional(layer, "scalar", LayerScalar)
        factor = None if scalar is None else scalar.weight.item()
        last = len(layer.stages) - 1
        for number, (stage, norm) in enumerate(zip(layer.stages, layer.sum_norms, strict=True)):
            if norm is not None and type(norm) not in (RMSNorm, LayerNorm):
                raise CannotPrepare(f"a norm of a sum is a {type(norm).__name__}")
            is_last = number == last
            self._add_stage(
                stage, norm, rotary, memory, factor if is_last else None, adds_held=layer.adds_held and is_last
            )

    def _add_stage(
        self,
        stage: Sequence[Branch],
        sum_norm: Norm | None,
        rotary: int,
        memory: LayerMemory,
        scalar: float | None,
        *,
        adds_held: bool,
    ) -> None:
        """Add the branches. `sum_norm`: of the sum of their results, or None. `scalar`: factor of the residual after
        them, or None. `adds_held`: the result that the layer before holds is added after them."""
        program = self._program
        norms = [program.take_optional(branch, "norm", RMSNorm, LayerNorm) for branch in stage]
        normed = self._norm_together(norms) if len(stage) > 1 and sum_norm is None else {}
        if sum_norm is not None and len(stage) != 2:
            raise CannotPrepare("the sum of other than two results is normed")
        shared = max(len(normed), 0 if sum_norm is None else 2)
        self._is_holding |= any(branch.is_held for branch in stage)
        if self._is_holding and shared > 1:
            raise CannotPrepare("no buffer is left for a result that the next layer adds")
        self._num_normed = max(self._num_normed, shared, 2 if self._is_holding else 0)
        for number, (branch, norm) in enumerate(zip(stage, norms, strict=True)):
            source = Rows.RESIDUAL if norm is None else normed.get(id(norm), Rows.SCRATCH_0)
            if source is Rows.SCRATCH_0 and norm is not None:
                program.norm_rows(norm, Rows.RESIDUAL, source)
            post_norm = program.take_optional(branch, "post_norm", RMSNorm, LayerNorm)
            sublayer = vars(branch)["sublayer"]
            if "fuse" not in vars(type(sublayer)):  # a wrapper with hooks delegates unknown attributes to the sublayer
                raise CannotPrepare(f"a sublayer is a {type(sublayer).__name__}")
            program.take(branch, "sublayer", type(sublayer))
            output, mixed = sublayer.fuse(program, source, rotary, memory)
            target = Rows.RESIDUAL if sum_norm is None else Rows(Rows.NORMED_0 + number)
            target = _HELD if branch.is_held else target
            before = program.finish(output, mixed, post_norm, branch.scale, is_shared=self._is_shared, target=target)
            if number == len(stage) - 1:
                if sum_norm is not None:
                    program.sum_rows(Rows.NORMED_0, Rows.NORMED_1, Rows.NORMED_0)
                    program.add_rows(Rows.NORMED_0, sum_norm)
                if adds_held:
                    program.add_rows(_HELD, None)
                    self._is_holding = False
                if scalar is not None:
                    program.scale_residual(scalar)
            program.end(before)
            self._adding.append(len(program.branches) - 1)

    def _norm_together(self, norms: Sequence[Norm | None]) -> dict[int, Rows]:
        """Add the norms of parallel branches, which read the residual that the first branch changes. Return the rows of
        each, by its id."""
        normed: dict[int, Rows] = {}
        for norm in {id(norm): norm for norm in norms}.values():
            if norm is None or len(normed) == 2:
                raise CannotPrepare("parallel branches must read one or two norms")
            normed[id(norm)] = Rows(Rows.NORMED_0 + len(normed))
            self._program.norm_rows(norm, Rows.RESIDUAL, normed[id(norm)])
        self._program.end()
        return normed


def _no_kernels(placement: Placement) -> str | None:
    """Return the reason why there are no C++ kernels for the layers, or None if there are."""
    if placement.device.type != "cpu" or placement.dtype not in ELEMENT_TYPES:
        return f"the model is in {placement.dtype} on {placement.device.type}"
    return library.why_not(placement.dtype)


def _other_attention(backend: AttentionBackend) -> str:
    reason = CppBackend.why_not(backend.spec)
    backend_name = f"attention is computed by {type(backend).__name__}"
    return backend_name if reason is None else f"{backend_name}, not by the C++ kernel ({reason})"
