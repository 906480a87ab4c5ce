"""Finds the form of each weight of a quantised checkpoint. Torch-free.

The settings say how weights are quantised; which of them are is seen from the tensors. A module whose weight is stored
in floating point of 16 bits or more is read as it is, whatever lists of modules the settings have.
"""

from oarlock.workers.platform.dtypes import SAFETENSORS_DTYPES
from oarlock.workers.quantization.formats.form import Form, Scheme, StoredForm
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.weights.checkpoint import FUSED_TENSORS, Checkpoint

_FUSED = {part: fused for fused, parts in FUSED_TENSORS.items() for part in parts}
_LARGEST_BIAS = 1 << 20  # bytes
# Scales for a KV cache, whose keys and values we keep as they are.
_OF_THE_KV_CACHE = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")


class CheckpointForms:
    """`WeightForms` of a quantised checkpoint."""

    def __init__(self, scheme: Scheme, checkpoint: Checkpoint) -> None:
        self.description = scheme.description
        self._scheme = scheme
        self._checkpoint = checkpoint
        self._modules: set[str] = set()  # and what contains them
        for name in checkpoint.tensors:
            while name := name.rpartition(".")[0]:
                self._modules.add(name)

    @property
    def of_head(self) -> "CheckpointForms":
        return self

    def has(self, module: str) -> bool:
        """Whether the checkpoint holds a tensor of the module."""
        return module in self._modules

    def form_of(self, module: str) -> Form:
        return self.stored_form(module) or NONE

    def stored_form(self, module: str) -> StoredForm | None:
        """The stored form of a module's weight; None: it is not quantised."""
        stored = self._stored_module(module)
        weight = self._checkpoint.find(f"{stored}.weight")
        if (weight is not None and weight.entry.dtype in SAFETENSORS_DTYPES) or not self.has(stored):
            return None
        return self._scheme.form_of(stored)

    def ignores(self, name: str) -> bool:
        if name.endswith(_OF_THE_KV_CACHE):
            return True
        module, _, kind = name.rpartition(".")
        form = self.stored_form(module)
        if form is None:
            return False
        return kind in form.spare or (kind == "bias" and self._is_zero(name))

    def _stored_module(self, module: str) -> str:
        """The module's name, or that of the fused module in which the checkpoint holds it."""
        above, _, part = module.rpartition(".")
        inner = above.rpartition(".")
        fused = _FUSED.get(f"{inner[2]}.{part}")
        if fused is None or self.has(module) or not self.has(f"{inner[0]}.{fused}"):
            return module
        return f"{inner[0]}.{fused}"

    def _is_zero(self, name: str) -> bool:
        """Old tools store a bias of zeros for every module that they quantised."""
        found = self._checkpoint.find(name)
        if found is None or found.entry.end - found.entry.begin > _LARGEST_BIAS:
            return False
        with found.path.open("rb") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little") + found.entry.begin)
            return not any(file.read(found.entry.end - found.entry.begin))
