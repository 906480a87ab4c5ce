"""The modules of a model that adapters may update, by the names that PEFT has for them. Torch-free.

PEFT names modules as transformers does. A module of transformers is a single module here, or several whose rows it
stores in one matrix, or all experts of a layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from oarlock.workers.layers.decoder_spec import DecoderSpec, fused_modules, tensors_of
from oarlock.workers.layers.tensor_spec import Sharding, TensorSpec
from oarlock.workers.lora.adapter_pair import Lines

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the model, and its rows of a stored matrix."""

    module: str
    rows: Lines


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Parameters of transformers that hold a matrix of every expert of a layer."""

    module: str  # our name, such as `model.layers.1.mlp.experts`
    experts: int
    hidden: int
    width: int
    is_gated: bool
    alternates: bool  # rows of gate and up alternate in `gate_up_proj`; otherwise all rows of gate come first
    only: str | None = None  # the parameter that is meant, if its module in transformers has no other

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters, in the order in which transformers' modules have them."""
        if self.only is not None:
            return (self.only,)
        return ("gate_up_proj" if self.is_gated else "up_proj", "down_proj")

    def sizes(self, parameter: str) -> tuple[int, int]:
        """Return (inputs, outputs) of an expert's matrix."""
        if parameter == "down_proj":
            return self.width, self.hidden
        return self.hidden, self.width * (2 if parameter == "gate_up_proj" else 1)

    def parts(self, parameter: str, expert: int) -> Iterator[Part]:
        """Yield the modules of an expert that `parameter` holds."""
        before, (_, outputs) = f"{self.module}.{expert}.", self.sizes(parameter)
        whole = Lines(outputs)
        if parameter != "gate_up_proj":
            yield Part(before + parameter, whole)
            return
        for number, name in enumerate(("gate_proj", "up_proj")):
            rows = whole.every(2, number) if self.alternates else whole.every(outputs, number * self.width, self.width)
            yield Part(before + name, rows)


class AdaptedModules:
    """The linear layers, the embedding and the head of a model."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._names = spec.names
        self._tensors = {tensor.name: tensor for tensor in tensors_of(spec)}
        if spec.tie_word_embeddings:  # the head may be adapted though its matrix is the embedding's
            table = spec.vocab_size, spec.hidden_size
            self._tensors.setdefault(f"{HEAD}.weight", TensorSpec(f"{HEAD}.weight", table, Sharding.VOCABULARY))
        self._fused: Mapping[str, list[str]] = dict(fused_modules(spec))
        self.order = {name.removesuffix(".weight"): number for number, name in enumerate(self._tensors)}

    def shape(self, module: str) -> tuple[int, int] | None:
        """Return [outputs, inputs] of a module of the model; None if it is no linear layer, embedding or head.

        The embedding maps one-hot vectors of tokens: its outputs are the hidden size.
        """
        found = self._tensors.get(f"{module}.weight")
        if found is None or not found.is_matrix:
            return None
        if found.sharding is Sharding.VOCABULARY and module not in (EMBEDDING, HEAD):  # further inputs of tokens
            return None
        rows, columns = found.shape
        return (columns, rows) if module == EMBEDDING else (rows, columns)

    def expert(self, module: str) -> int | None:
        """Return the index of the routed expert that a module of the model belongs to."""
        return self._tensors[f"{module}.weight"].expert

    def experts(self, module: str) -> int:
        """Return the number of routed experts next to the expert that a module of the model belongs to; 0: none."""
        found = self._tensors.get(f"{module}.weight")
        return 0 if found is None else found.experts

    def find(self, name: str) -> list[Part] | ExpertStack | None:
        """Return the modules that the module `name` of transformers holds; none if the model has no such linear layer.

        None: nothing reads such a module here, for example in an image encoder. `name` may lack a leading `model.`, as
        in adapters of a model without a head.
        """
        for stored in (name, f"model.{name}"):
            ours = self._names.rename(f"{stored}.weight")
            if ours is None:
                return None
            module, _, kind = ours.rpartition(".")
            if (stack := self._stack(module, None if kind == "weight" else kind)) is not None:
                return stack
            if kind == "weight" and (parts := self.parts(module)):
                return parts
        return []

    def parts(self, module: str, *, in_blocks: bool = True) -> list[Part]:
        """Return the modules whose rows `module`, by our name, holds: itself, or the modules that are fused in it.

        With `in_blocks`, their rows alternate as the family's checkpoints store them; otherwise they follow each other.
        """
        blocks = self._names.blocks_of(module)
        if blocks is not None:
            before, step = module.rpartition(".")[0], sum(blocks.rows)
            names = [f"{before}.{part}" for part in blocks.parts]
            if any(self.shape(name) is None for name in names):
                return []
            if not in_blocks:
                return self._following(names)
            whole, firsts = Lines(step * blocks.groups), [sum(blocks.rows[:place]) for place in range(len(names))]
            sizes = zip(names, firsts, blocks.rows, strict=True)
            return [Part(name, whole.every(step, first, rows)) for name, first, rows in sizes]
        if (shape := self.shape(module)) is not None:
            return [Part(module, Lines(shape[0]))]
        return self._following(self._fused.get(module, []))

    def _following(self, modules: list[str]) -> list[Part]:
        """Return modules whose rows follow each other in a matrix."""
        sizes = [(name, shape[0]) for name in modules if (shape := self.shape(name)) is not None]
        whole, first, parts = Lines(sum(count for _, count in sizes)), 0, []
        for name, count in sizes:
            parts.append(Part(name, whole.every(whole.stored, first, count)))
            first += count
        return parts

    def _stack(self, module: str, only: str | None) -> ExpertStack | None:
        """Return the stack of the experts in `module`; None if it has none. `only`: as in `ExpertStack`."""
        down = self._tensors.get(f"{module}.0.down_proj.weight")
        if down is None or down.expert is None:
            return None
        hidden, width = down.shape
        is_gated = f"{module}.0.gate_proj.weight" in self._tensors
        # Only the experts of gpt-oss have biases, and only their rows alternate.
        alternates = is_gated and f"{module}.0.gate_proj.bias" in self._tensors
        found = ExpertStack(module, down.experts, hidden, width, is_gated, alternates)
        if only is None:
            return found
        return replace(found, only=only) if only in found.parameters else None
