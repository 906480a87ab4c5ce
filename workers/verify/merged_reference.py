"""transformers' model with an adapter merged into its weights, for some sequences of a verification and not for others.

The truth has the merged weights in float64, or in float32 if the model's dtype is coarser. transformers' own run has
them rounded to the dtype, as PEFT's `merge_and_unload` leaves them.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.lora.adapted_modules import EMBEDDING, AdaptedModules, ExpertStack
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.adapter_pair import AdapterPair
from oarlock.workers.verify.dequantised_reference import weighs_inputs
from oarlock.workers.verify.stored_adapter import StoredUpdate, pair_update, peft_updates


@dataclass(frozen=True, slots=True)
class _Delta:
    """An addition to some rows of a matrix of a parameter."""

    update: StoredUpdate
    rows: Sequence[int] | None = None  # rows [outputs] of the matrix; None: all
    expert: int | None = None  # index of the matrix in a stack
    is_transposed: bool = False  # the parameter has the matrix as [inputs, outputs]

    def add_to(self, wide: Tensor) -> None:
        matrix = wide if self.expert is None else wide[self.expert]
        matrix = matrix.T if self.is_transposed else matrix
        if self.rows is None:
            matrix += self.update.matrix.to(wide.device)
        else:
            matrix[list(self.rows)] += self.update.matrix.to(wide.device)


class MergedModel:
    """A model of transformers, and the additions of an adapter to its parameters."""

    def __init__(self, model: nn.Module, spec: DecoderSpec, adapter: Path, *, is_quantised: bool = False) -> None:
        """Read the adapter. Raises `StartupError` if it updates a module that transformers' model does not have.

        An embedding and a head that share their matrix get one each, since an adapter may update either.
        """
        self._deltas: dict[nn.Parameter, list[_Delta]] = {}
        self._left = {pair.module: pair for pair in Adapter.open(adapter, spec).pairs}
        self._by_name, self._modules = peft_updates(adapter), AdaptedModules(spec)
        self._is_quantised = is_quantised
        for name, module in list(model.named_modules()):
            found = self._modules.find(name)
            if isinstance(found, ExpertStack):
                self._add_experts(module, found)
            elif found and any(part.module in self._left for part in found):
                self._untie(model, module)
                self._add(name, module)
        if self._left:
            raise StartupError(
                f"the adapter updates {next(iter(self._left))}, which is no module in transformers' model.",
                "Verify with an adapter of other modules.",
            )

    def _add(self, name: str, module: nn.Module) -> None:
        """Note the additions to a linear layer, an embedding or the head."""
        parts = self._modules.find(name)
        assert isinstance(parts, list)
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        is_transposed = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
        pairs = {part: self._left.pop(part.module) for part in parts if part.module in self._left}
        deltas = self._deltas.setdefault(weight, [])
        stored = next((key for key in (name, name.removeprefix("model.")) if key in self._by_name), None)
        if stored is not None:
            deltas.append(_Delta(self._by_name[stored], is_transposed=is_transposed))
            return
        for part, pair in pairs.items():
            rows = None if part.module == EMBEDDING else part.rows.numbers()
            deltas.append(_Delta(pair_update(pair), rows, is_transposed=is_transposed))

    def _add_experts(self, module: nn.Module, stack: ExpertStack) -> None:
        """Note the additions to the parameters of a stack of experts."""
        for parameter in stack.parameters:
            weight = module.weight if stack.only is not None else getattr(module, parameter)
            assert isinstance(weight, nn.Parameter)
            inputs, outputs = stack.sizes(parameter)
            is_transposed = tuple(weight.shape[1:]) != (outputs, inputs)
            if inputs == outputs:
                is_transposed = bool(getattr(module, "is_transposed", weighs_inputs(module)))
            for expert in range(stack.experts):
                for part in stack.parts(parameter, expert):
                    pair: AdapterPair | None = self._left.pop(part.module, None)
                    if pair is not None:
                        delta = _Delta(pair_update(pair), part.rows.numbers(), expert, is_transposed)
                        self._deltas.setdefault(weight, []).append(delta)

    def _untie(self, model: nn.Module, module: nn.Module) -> None:
        """Give `module` a parameter of its own if another module has the same."""
        weight = module.weight
        shared = [
            other for other in model.modules() if other is not module and getattr(other, "weight", None) is weight
        ]
        if not shared:
            return
        if self._is_quantised:
            raise StartupError(
                "the adapter updates an embedding or a head that have one quantized matrix in this model, for which "
                "transformers has no exact form.",
                "Verify without --quantization, or with an adapter of other modules.",
            )
        assert isinstance(weight, nn.Parameter)
        module.weight = nn.Parameter(weight.data, requires_grad=False)

    @contextmanager
    def weights(self, dtype: torch.dtype | None = None) -> Generator[None]:
        """Use merged weights within the context. `dtype`: to store them in; None: as each parameter is stored."""
        before = {parameter: parameter.data for parameter in self._deltas}
        try:
            for parameter, deltas in self._deltas.items():
                wide = parameter.data.to(torch.float64, copy=True)
                for delta in deltas:
                    delta.add_to(wide)
                parameter.data = wide.to(dtype or before[parameter].dtype)
                del wide
            yield
        finally:
            for parameter, data in before.items():
                parameter.data = data


def updates_by_module(adapter: Path, spec: DecoderSpec) -> Mapping[str, StoredUpdate]:
    """Return the updates of an adapter by our names of modules, by PEFT's rules if the files are PEFT's."""
    modules = AdaptedModules(spec)
    found = {pair.module: pair_update(pair) for pair in Adapter.open(adapter, spec).pairs}
    for name, update in peft_updates(adapter).items():
        parts = modules.find(name)
        for part in parts if isinstance(parts, list) else ():
            found[part.module] = replace(update, b=update.b[list(part.rows.numbers())])
    return found
