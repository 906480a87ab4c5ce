"""Mixture of experts as plain values: a router, gated MLPs of which each token gets a few, and one that all tokens get.

Torch-free; `experts.py` computes it. Each expert has tensors of its own here, as most checkpoints store them; one that
stores all experts as one tensor is read as if it did not (`weights/expert_tensors.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from oarlock.workers.layers.tensor_spec import Cut, Kept, Made, Tap, TensorSpec


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The choice of experts for each token, and the weight of each, from one logit an expert."""

    top_k: int
    scores: str = "softmax"  # softmax | sigmoid: of the logits
    normalised: bool = False  # the weights of a token add up to 1, before `scale`
    least_sum: float = 1e-20  # by which weights are divided at least, where they are normalised
    scale: float = 1.0
    groups: int = 1  # equal ones, of neighbours; experts are chosen from `top_groups` of them,
    top_groups: int = 1  # those in which the two best have the largest sum
    bias: bool = False  # of the logits
    name: str = "gate"  # of the router's module
    # A number for each expert, added to its score when experts are chosen, but not to its weight: its whole name.
    correction: str | None = None


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """An expert for every token."""

    width: int
    name: str = "shared_experts"
    gate: str | None = None  # a module with one output, whose sigmoid scales the result; None: it is not scaled


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The sum over a token's experts of `weight * down(activation(gate(x)) * up(x))`, and of the shared expert."""

    experts: int
    width: int  # of each expert
    router: RouterSpec
    activation: str = "silu"  # silu | gelu_tanh | clamped_swiglu
    alpha: float = 1.702  # clamped_swiglu: `g * sigmoid(alpha * g) * (u + 1)`,
    limit: float = 7.0  # of g = min(gate, limit), and of u = up, kept within the limit on both sides
    bias: bool = False  # of all three products
    shared: SharedSpec | None = None
    module: str = "mlp"
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False, compare=False)

    title: ClassVar[str] = "experts"
    reads: ClassVar[str] = "mlp_norm"  # names, in a verification, of what it reads and of the residual after it
    leaves: ClassVar[str] = "mlp_residual"
    gguf_norms: ClassVar[tuple[str, str]] = ("ffn_norm", "post_ffw_norm")

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Tensors in a checkpoint with experts apart, of a model of `hidden` numbers a token, by their names in
        `module`."""
        router = self.router
        found = [TensorSpec(f"{router.name}.weight", (self.experts, hidden), kept=Kept.FLOAT32)]
        if router.bias:
            found.append(TensorSpec(f"{router.name}.bias", (self.experts,), kept=Kept.FLOAT32))
        if router.correction is not None:
            found.append(TensorSpec(router.correction, (self.experts,), kept=Kept.FLOAT32))
        for expert in range(self.experts):
            used = self.router.top_k / self.experts
            one = _mlp(f"experts.{expert}", self.width, hidden, self.bias)
            found += [replace(tensor, expert=expert, experts=self.experts, used=used) for tensor in one]
        if self.shared is not None:
            found += _mlp(self.shared.name, self.shared.width, hidden, False)
            if self.shared.gate is not None:
                found.append(TensorSpec(f"{self.shared.gate}.weight", (1, hidden), kept=Kept.FLOAT32))
        return found

    @property
    def gguf(self) -> Mapping[str, str]:
        """Names in GGUF of parts; a star stands for the number of an expert, of which the file has one tensor."""
        parts = ("gate", "up", "down")
        found = {f"experts.*.{part}_proj": f"ffn_{part}_exps" for part in parts} | {self.router.name: "ffn_gate_inp"}
        if self.shared is not None:
            found |= {f"{self.shared.name}.{part}_proj": f"ffn_{part}_shexp" for part in parts}
            if self.shared.gate is not None:
                found[self.shared.gate] = "ffn_gate_inp_shexp"
        return found if self.router.correction is None else found | {self.router.correction: "exp_probs_b"}

    @property
    def taps(self) -> list[Tap]:
        """Tensors that a verification compares, in the order they are computed."""
        found = [
            Tap("router", Made.LOGITS, self.router.name, width=self.experts),
            Tap("routing", Made.ROUTING, self.router.name, width=self.experts),
            Tap("experts", Made.EXPERTS, "experts"),
        ]
        return found if self.shared is None else [*found, Tap("shared", Made.EXPERTS, self.shared.name)]

    @property
    def most_ranks(self) -> int:
        return self.width

    def divides(self, size: int) -> bool:
        """Whether `size` ranks can share it: always, since the width is filled up."""
        return size <= self.width

    @property
    def sizes(self) -> str:
        """The sizes that ranks share, for messages."""
        return f"experts' width {self.width}"

    @property
    def shared_inputs(self) -> int:
        """0: inputs of the products whose results ranks add up are filled up to whole slices."""
        return 0

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.width} of each expert's"

    @property
    def step_values(self) -> int:
        """Numbers of a token that exist at once while it computes, over all ranks."""
        return 3 * (self.router.top_k * self.width + (0 if self.shared is None else self.shared.width))

    @property
    def pair_ops(self) -> int:
        """Multiplications and additions of a token for each token of its context: tokens do not meet here."""
        return 0

    def for_length(self, length: int) -> "ExpertsSpec":
        """As served for sequences of up to `length` tokens: always the same."""
        return self


def _mlp(name: str, width: int, hidden: int, bias: bool) -> list[TensorSpec]:
    found: list[TensorSpec] = []
    for part in ("gate", "up"):
        found.append(TensorSpec(f"{name}.{part}_proj.weight", (width, hidden), Cut.WIDTH_OUTPUTS))
        if bias:
            found.append(TensorSpec(f"{name}.{part}_proj.bias", (width,), Cut.WIDTH_OUTPUTS))
    found.append(TensorSpec(f"{name}.down_proj.weight", (hidden, width), Cut.WIDTH_INPUTS))
    return [*found, TensorSpec(f"{name}.down_proj.bias", (hidden,))] if bias else found
