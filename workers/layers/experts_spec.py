"""Specification of an MoE sublayer: a router, gated MLPs of which each token gets a few, and an optional shared expert.

Torch-free. `experts.py` computes it. Each expert has tensors of its own here, as in most checkpoints. Checkpoints that
store all experts as one tensor are read as if they did not (`weights/expert_tensors.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from oarlock.workers.layers.tensor_spec import (
    Computation,
    NormSpec,
    RankDtype,
    Sharding,
    Tap,
    TensorSpec,
    WithoutContext,
)


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The choice of experts for each token and the weight of each expert, from one logit per expert."""

    top_k: int
    scores: str = "softmax"  # softmax | sigmoid | sparsemixer, applied to the logits; see `tolerance`
    normalised: bool = False  # the weights of a token add up to 1 before `scale` is applied
    least_sum: float = 1e-20  # lower bound of the sum that weights are divided by, if `normalised`
    added_to_sum: float = 0.0  # added to the sum before weights are divided by it, if `normalised`
    scale: float = 1.0
    groups: int = 1  # number of equal groups of consecutive experts; experts are chosen from `top_groups` groups
    top_groups: int = 1  # number of groups that are kept, chosen by the sum of their best scores
    best_of_group: int = 2  # number of a group's best scores in that sum: 1 or 2
    bias: bool = False  # the logits have a bias
    name: str = "gate"  # name of the router's module
    # Full name of a tensor with one value per expert, added to its score to choose experts but not to its weight.
    correction: str | None = None
    corrects_logits: bool = False  # the correction is added to the logits instead of the scores
    # Full name of a vector that scales the router's input, of which each row is divided by its root mean square, and by
    # the root of the hidden size; None: the router reads the input of the sublayer as it is.
    input_scale: str | None = None
    input_epsilon: float = 1e-6  # added to the mean square, if there is an `input_scale`
    expert_scale: str | None = None  # full name of a tensor with a factor of each expert's weight
    module: str | None = None  # module that computes the routing, for a verification; None: `name`
    logits_from: str | None = None  # module that returns the logits first, for a verification; None: `name`
    # sparsemixer: an expert's weight is its softmax over the experts that were not chosen before it, and whose logits
    # are less than the expert's by at most this part of the larger absolute value.
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """An expert that every token uses."""

    width: int
    name: str = "shared_experts"
    gate: str | None = None  # module with one output, whose sigmoid scales the result; None: no scaling


@dataclass(frozen=True, slots=True)
class ExpertsSpec(WithoutContext):
    """The sum of `weight * down(activation(gate(x)) * up(x))` over a token's experts, plus the shared expert.

    Without a gate (`is_gated`), the sum of `weight * down(activation(up(x)))`.

    With `weighs_inputs`, the sum of `down(activation(gate(weight * x)) * up(weight * x))`.

    The router chooses among the experts and `identities`, which have no matrices and add `weight * x`.
    """

    experts: int
    width: int  # intermediate size of each expert
    router: RouterSpec
    activation: str = "silu"  # silu | gelu_tanh | clamped_swiglu; without a gate as in `MLPSpec`
    alpha: float = 1.702  # clamped_swiglu: `g * sigmoid(alpha * g) * (u + 1)`
    limit: float = 7.0  # clamped_swiglu: g = min(gate, limit), u = clamp(up, -limit, limit)
    bias: bool = False  # gate, up and down have biases
    weighs_inputs: bool = False  # a routed expert's weight multiplies its input instead of its result
    is_gated: bool = True  # False: experts and the shared expert have no gate
    identities: int = 0  # further experts, whose result is their input; their ids follow the others'
    shared: SharedSpec | None = None
    norm: NormSpec | None = None  # norm of the experts' input, but not of the router's; called `norm`
    module: str = "mlp"
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False, compare=False)

    title: ClassVar[str] = "experts"
    reads: ClassVar[str] = "mlp_norm"  # names, in a verification, of the sublayer's input and of the residual after it
    leaves: ClassVar[str] = "mlp_residual"
    gguf_norms: ClassVar[tuple[str, str]] = ("ffn_norm", "post_ffw_norm")

    @property
    def choices(self) -> int:
        """Number of experts that the router chooses from."""
        return self.experts + self.identities

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return the tensors of a checkpoint with separate experts and hidden size `hidden`, named relative to
        `module`."""
        router = self.router
        found = [TensorSpec(f"{router.name}.weight", (self.choices, hidden), rank_dtype=RankDtype.FLOAT32)]
        if router.bias:
            found.append(TensorSpec(f"{router.name}.bias", (self.choices,), rank_dtype=RankDtype.FLOAT32))
        of_experts = (self.choices,)
        for name, shape in (
            (router.correction, of_experts), (router.input_scale, (hidden,)), (router.expert_scale, of_experts)
        ):  # fmt: skip
            if name is not None:
                found.append(TensorSpec(name, shape, rank_dtype=RankDtype.FLOAT32))
        found += [] if self.norm is None else self.norm.tensors("norm.", hidden)
        for expert in range(self.experts):
            used = self.router.top_k / self.choices
            one = self._mlp(f"experts.{expert}", self.width, hidden, self.bias)
            found += [replace(tensor, expert=expert, experts=self.experts, used=used) for tensor in one]
        if self.shared is not None:
            found += self._mlp(self.shared.name, self.shared.width, hidden, False)
            if self.shared.gate is not None:
                found.append(TensorSpec(f"{self.shared.gate}.weight", (1, hidden), rank_dtype=RankDtype.FLOAT32))
        return found

    @property
    def gguf(self) -> Mapping[str, str]:
        """GGUF names of the modules. A star is any expert index: the file has one tensor for all experts."""
        parts = ("gate", "up", "down") if self.is_gated else ("up", "down")
        found = {f"experts.*.{part}_proj": f"ffn_{part}_exps" for part in parts} | {self.router.name: "ffn_gate_inp"}
        if self.shared is not None:
            found |= {f"{self.shared.name}.{part}_proj": f"ffn_{part}_shexp" for part in parts}
            if self.shared.gate is not None:
                found[self.shared.gate] = "ffn_gate_inp_shexp"
        return found if self.router.correction is None else found | {self.router.correction: "exp_probs_b"}

    @property
    def taps(self) -> list[Tap]:
        """The tensors that a verification compares, in the order of their computation."""
        found = [
            Tap("router", Computation.LOGITS, self.router.logits_from or self.router.name, width=self.choices),
            Tap("routing", Computation.ROUTING, self.router.module or self.router.name, width=self.choices),
            Tap("experts", Computation.EXPERTS, "experts"),
        ]
        return found if self.shared is None else [*found, Tap("shared", Computation.EXPERTS, self.shared.name)]

    @property
    def memory(self) -> None:
        """Nothing is kept of a sequence."""

    @property
    def most_ranks(self) -> int:
        return self.width

    def divides(self, size: int) -> bool:
        """Return whether `size` ranks can share the sublayer: the width is padded, so they can if `size <= width`."""
        return size <= self.width

    @property
    def sizes(self) -> str:
        """The sizes that are divided among ranks, for messages."""
        return f"experts' width {self.width}"

    @property
    def shared_inputs(self) -> int:
        """Always 0: the inputs of the down projections are padded to whole slices."""
        return 0

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.width} of each expert's"

    def step_values(self, size: int) -> int:
        """Return the values per token that exist at the same time on each of `size` ranks."""
        return 3 * (self.router.top_k * self.width + (0 if self.shared is None else self.shared.width)) // size

    def _mlp(self, name: str, width: int, hidden: int, bias: bool) -> list[TensorSpec]:
        found: list[TensorSpec] = []
        for part in ("gate", "up") if self.is_gated else ("up",):
            found.append(TensorSpec(f"{name}.{part}_proj.weight", (width, hidden), Sharding.WIDTH_OUTPUTS))
            if bias:
                found.append(TensorSpec(f"{name}.{part}_proj.bias", (width,), Sharding.WIDTH_OUTPUTS))
        found.append(TensorSpec(f"{name}.down_proj.weight", (hidden, width), Sharding.WIDTH_INPUTS))
        return [*found, TensorSpec(f"{name}.down_proj.bias", (hidden,))] if bias else found
