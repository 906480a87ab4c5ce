"""How ranks divide the tensors of a class that transformers computes: by the class's own plan for tensor parallelism.

Torch-free. A plan names a style for modules and for parameters (`base_model_tp_plan`). A style that is not known here
refuses the class for more than one rank; a tensor without a style is whole on every rank.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum, auto

from oarlock.base.errors import StartupError
from oarlock.workers.layers.sharding import shard_evenly
from oarlock.workers.layers.tensor_spec import RankDtype, Sharding, TensorSpec
from oarlock.workers.transformers_backend.class_description import ClassDescription, ClassTensor, ExpertsModule


class Division(Enum):
    """Ways to divide a module among ranks."""

    WHOLE = auto()  # every rank computes all of it
    COLUMN = auto()  # outputs are divided, and the next module takes this rank's outputs
    PACKED_COLUMN = auto()  # as `COLUMN`, for two matrices that are stored as one: each is divided
    GATHERED_COLUMN = auto()  # outputs are divided and gathered, so that every rank has them all
    ROW = auto()  # inputs are divided already; the ranks' sums are all-reduced
    SPLIT_ROW = auto()  # as `ROW`, but the rank cuts its part from inputs that every rank has
    VOCABULARY = auto()  # rows are divided by token id
    EXPERTS = auto()  # the width of every expert is divided; the ranks' sums are all-reduced
    OUTPUTS = auto()  # a vector of the class's own code is divided, such as one value for each head


# Divisions of linear layers by transformers' style. `None` and the styles that only matter for training leave a layer
# whole; so does latent attention's first projection, whose parts every head uses.
_OF_LINEAR = {
    None: Division.WHOLE, "replicate": Division.WHOLE, "replicated_with_grad_allreduce": Division.WHOLE,
    "colwise": Division.COLUMN, "packed_colwise": Division.PACKED_COLUMN, "rowwise": Division.ROW,
    "colwise_gather_output": Division.GATHERED_COLUMN, "colwise_rep": Division.GATHERED_COLUMN,
    "rowwise_split_input": Division.SPLIT_ROW, "rowwise_rep": Division.SPLIT_ROW,
    "mla_kv_a_proj": Division.WHOLE,
}  # fmt: skip
# Styles with which the class's own code may keep whole tensors, because every rank has the module's inputs and results
# whole: those that matter for training, those that gather or all-reduce partial results, of which there are none then,
# and one that has no effect on tensors without a style of their own.
_OF_OWN = {
    None, "replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise",
    "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "all_reduce", "moe_tp_experts",
    "local_params",
}  # fmt: skip
_SHARDINGS = {
    Division.WHOLE: Sharding.NONE, Division.COLUMN: Sharding.OUTPUTS, Division.PACKED_COLUMN: Sharding.OUTPUTS,
    Division.GATHERED_COLUMN: Sharding.OUTPUTS, Division.ROW: Sharding.INPUTS, Division.SPLIT_ROW: Sharding.INPUTS,
    Division.VOCABULARY: Sharding.VOCABULARY, Division.OUTPUTS: Sharding.OUTPUTS,
}  # fmt: skip


def division_of(tensor: ClassTensor) -> Division:
    """Return how ranks divide `tensor`. Raise `StartupError` if its style is not known."""
    if tensor.role in ("embedding", "head"):
        return Division.VOCABULARY
    if tensor.role == "experts":
        return Division.EXPERTS
    if tensor.role == "linear" and tensor.style in _OF_LINEAR:
        return _OF_LINEAR[tensor.style]
    if tensor.role == "own" and tensor.style in _OF_OWN:
        return Division.WHOLE
    # Experts are stacked along the first dimension of tensors with more than one.
    if tensor.role == "own" and tensor.style == "colwise" and len(tensor.shape) == 1:
        return Division.OUTPUTS
    raise StartupError(
        f"{tensor.name}: the class divides it among ranks in a way that is not known here ({tensor.style}).",
        "Use --tensor-parallel-size 1.",
    )


def division_on(ranks: int, tensor: ClassTensor) -> Division:
    """Return how `ranks` divide `tensor`. Raise `StartupError` if there are several and its style is not known.

    One rank has the same divisions if they are known, because it sums inputs in the slices that several ranks share.
    """
    is_known = tensor.role != "own" and (tensor.role != "linear" or tensor.style in _OF_LINEAR)
    return division_of(tensor) if ranks > 1 or is_known else Division.WHOLE


def tensor_specs(description: ClassDescription) -> Iterator[TensorSpec]:
    """Yield every tensor that ranks hold, by its name in the class; experts of our kernels one by one.

    Raises `StartupError` if the class's plan does not divide a tensor among the ranks of the description.
    """
    experts = {one.module: one for one in description.experts}
    for one in experts.values():
        yield from _of_experts(one)
    for tensor in description.tensors:
        module, _, kind = tensor.name.rpartition(".")
        if module in experts or tensor.role == "experts":
            continue
        division = division_on(description.ranks, tensor)
        _check_divides(tensor, division, description.ranks)
        is_bias = tensor.role != "own" and kind == "bias"
        if is_bias and division in (Division.ROW, Division.SPLIT_ROW):
            division = Division.WHOLE
        dtype = RankDtype.FLOAT32 if tensor.is_float32 or (is_bias and tensor.role == "head") else RankDtype.AS_MODEL
        if tensor.role == "own" and dtype is RankDtype.AS_MODEL:
            dtype = RankDtype.UNQUANTIZED
        parts = tensor.shape[-1 if _SHARDINGS[division] is Sharding.INPUTS else 0] if tensor.shape else 1
        is_table = tensor.role == "own" and len(tensor.shape) == 2
        shape = tensor.shape or (1,)
        yield TensorSpec(tensor.name, shape, _SHARDINGS[division], parts, dtype, is_table=is_table)


def _check_divides(tensor: ClassTensor, division: Division, ranks: int) -> None:
    """Raise `StartupError` if `tensor` cannot be divided into equal parts."""
    sharding = _SHARDINGS.get(division)
    if sharding is Sharding.OUTPUTS:
        matrices = 2 if division is Division.PACKED_COLUMN else 1
        shard_evenly(tensor.name, "output size", tensor.shape[0], matrices * ranks)
    elif sharding is Sharding.INPUTS and len(tensor.shape) == 2:
        shard_evenly(tensor.name, "input size", tensor.shape[1], ranks)


def _of_experts(one: ExpertsModule) -> Iterator[TensorSpec]:
    rows = ("gate_proj", "up_proj") if one.is_gated else ("up_proj",)
    wide, narrow = (one.width, one.hidden), (one.hidden, one.width)
    tensors = [TensorSpec(f"{name}.weight", wide, Sharding.WIDTH_OUTPUTS, one.width) for name in rows]
    tensors.append(TensorSpec("down_proj.weight", narrow, Sharding.WIDTH_INPUTS, one.width))
    if one.has_bias:
        tensors += [TensorSpec(f"{name}.bias", wide[:1], Sharding.WIDTH_OUTPUTS, one.width) for name in rows]
        tensors.append(TensorSpec("down_proj.bias", narrow[:1]))
    for expert in range(one.experts):
        marks = {"expert": expert, "experts": one.experts, "used": one.top_k / one.experts}
        for tensor in tensors:
            yield replace(tensor, name=f"{one.module}.{expert}.{tensor.name}", **marks)


def smallest_shared_inputs(description: ClassDescription) -> int:
    """Return a number of inputs that divides those of every linear layer whose inputs ranks divide; 0: none."""
    rows = [tensor for tensor in tensor_specs(description) if tensor.sharding is Sharding.INPUTS]
    return math.gcd(*(tensor.shape[1] for tensor in rows)) if rows else 0
