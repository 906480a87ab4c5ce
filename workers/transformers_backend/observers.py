"""The requests of a class in one forward: its attention, masks and memory, recorded instead of computed.

The class sees a mask that knows its kind (`Mask`), positions that are followed (`Positions`), an attention function
that records its arguments, and a memory without values. Whatever the backend could not compute in the same way refuses
the class.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oarlock.workers.transformers_backend.class_description import AttentionCall, StateCall
from oarlock.workers.transformers_backend.divided_outputs import Divided
from oarlock.workers.transformers_backend.mask_kinds import MaskFunction, mask_kind
from oarlock.workers.transformers_backend.private_parts import AttentionInterface, AttentionMaskInterface
from oarlock.workers.transformers_backend.states import MemoryWithoutKeys
from oarlock.workers.transformers_backend.tracked_tensors import EarlierState, Logits, Mask, Positions

IMPLEMENTATION = "oarlock_observer"
FIRST = 5  # position of the first token of a look: a class that counts the tokens of the row begins at 0
# Arguments of attention that do not change its result here: dropout is off, outputs are not collected, and positions
# were applied to queries and keys before.
HARMLESS = frozenset({
    "dropout", "position_ids", "position_embeddings", "use_cache", "layer_idx", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
})  # fmt: skip
_ANGLES = {"cos", "sin", "polar"}
_COMBINED = {"embedding", "matmul", "__matmul__", "__rmatmul__", "bmm", "einsum", "outer", "mul", "__mul__", "__rmul__"}
_CONVOLUTIONS = {"conv1d"}
_RANDOM = {
    "bernoulli", "bernoulli_", "exponential_", "multinomial", "normal", "normal_", "rand", "rand_like", "randint",
    "randn", "randn_like", "randperm", "uniform_",
}  # fmt: skip
_OWN_POSITIONS = "it counts positions by itself"


class Refused(Exception):
    """The class needs something that the backend does not compute; its text says what, in one phrase."""


class Counts(list[int]):
    """Numbers of rows of each expert, which are not known without values. If rows are split, the first has them all."""


class Observer(TorchFunctionMode):
    """Records of one forward of a model.

    `names`: of its modules, by their ids. `head`: its output head. `tokens`: the length of its row. `vocabulary`: rows
    of the token embedding.
    """

    def __init__(self, names: Mapping[int, str], head: nn.Module, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.attention: list[AttentionCall] = []
        self.states: list[StateCall] = []
        self.positions_limit: int | None = None  # positions that a learned table has; None: there is no table
        self.uses_positions = False
        self.changes_logits: str | None = None  # an operation that needs the logits of all tokens
        self.operations: list[str] = []  # names of all that the class computed, in their order
        self._random: str | None = None  # an operation that draws random numbers
        self._has_own_angles = False
        self._convolutions: list[str] = []  # names of modules that compute one
        self._tokens, self._vocabulary = tokens, vocabulary
        self._names, self._head = names, head
        self._running: list[nn.Module] = []
        self._stateful: dict[int, list[str]] = {}  # layer -> names of modules that use its states

    @contextmanager
    def watching(self) -> Generator["Observer"]:
        """Observe everything that runs inside."""
        global _observer  # transformers' registries hold functions, so they find the observer here
        _observer = self
        hooks = torch.nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(lambda module, _: self._running.append(module)),
            hooks.register_module_forward_hook(lambda module, _, result: self._leave(module, result), always_call=True),
        ]
        try:
            with self:
                yield self
        finally:
            _observer = None
            for handle in handles:
                handle.remove()

    def _leave(self, module: nn.Module, result: Any) -> Any:
        assert self._running.pop() is module
        if module is self._head and isinstance(result, Tensor):
            return Logits.of(result, self._change_logits)
        if getattr(module, "has_divided_outputs", False) and isinstance(result, Tensor):
            return Divided.of(result, lambda operation: self._refuse_across(module, operation))
        return None

    def _refuse_across(self, module: nn.Module, operation: str) -> None:
        raise Refused(f"it computes {operation} over all outputs of {self._names[id(module)]}")

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Follow the operations of the class that matter on tensors without values."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self.operations.append(name)
        if name in _RANDOM or (name == "dropout" and _drops(args, kwargs)):
            self._random = name
        if name in ("nonzero", "where") and (name == "nonzero" or len(args) + len(kwargs) == 1):
            return self._no_hits(args[0], name, kwargs)
        if name == "tolist" and args[0].is_meta and args[0].dim() == 1:
            return Counts([0] * len(args[0]))
        if name == "split" and len(args) > 1 and isinstance(args[1], Counts):
            return self._split(args[0], args[1], kwargs.get("dim", args[2] if len(args) > 2 else 0))
        result = func(*args, **kwargs)
        if name == "arange" and result.numel() == self._tokens > 1:
            return Positions.of(torch.arange(self._tokens, dtype=result.dtype), self.use_positions, is_own=True)
        if name in _ANGLES or (name == "embedding" and args[1].shape[0] != self._vocabulary):
            self._has_own_angles = True
        if name in _CONVOLUTIONS and self._running:
            self._convolutions.append(self._current_name())
        return result

    def _split(self, rows: Tensor, counts: Counts, dim: int) -> tuple[Tensor, ...]:
        return rows.split([rows.shape[dim], *counts[1:]], dim)

    def _no_hits(self, tensor: Tensor, name: str, kwargs: dict[str, Any]) -> Any:
        """Return that no entry is true: which experts have tokens is not known without values."""
        if tensor.device.type != "meta":
            return torch.nonzero(tensor, as_tuple=name == "where" or kwargs.get("as_tuple", False))
        dims = tensor.dim()
        if name == "where" or kwargs.get("as_tuple"):
            return tuple(torch.empty(0, dtype=torch.int64, device="meta") for _ in range(dims))
        return torch.empty((0, dims), dtype=torch.int64, device="meta")

    def use_positions(self, operation: str, args: tuple, named: Mapping[str, Any], positions: Positions) -> None:
        """Note that the class computes with positions, or with the tokens that it has counted."""
        others = [one for one in args if isinstance(one, Tensor) and not isinstance(one, Positions)]
        if positions.is_own:
            if operation in _COMBINED and any(one.is_floating_point() for one in others):
                raise Refused(_OWN_POSITIONS)
            return
        self.uses_positions = True
        if operation != "embedding" or positions.numbers is None:
            return
        moved = positions.numbers.reshape(-1)[: self._tokens] - torch.arange(FIRST, FIRST + self._tokens)
        if bool((moved == moved[0]).all()):
            if named.get("padding_idx") is not None and int(moved[0]) == 0:
                raise Refused("its table of positions begins after the padding index")
            rows = others[0].shape[0] - int(moved[0])
            self.positions_limit = rows if self.positions_limit is None else min(rows, self.positions_limit)

    def check(self) -> None:
        """Complete the records. Raise `Refused` if the class mixes tokens of the row in ways that are not known, or if
        it does not use the given positions."""
        if not self.attention and not self.states:
            raise Refused("it computes attention by itself")
        if self._random is not None:
            raise Refused(f"it draws random numbers ({self._random})")
        if self._has_own_angles and not self.uses_positions:
            raise Refused("it does not use the given positions")
        self.states = [replace(one, module=self._module_of_states(one.layer)) for one in self.states]
        kept = {one.module for one in self.states if one.is_convolution}
        for name in self._convolutions:
            if not any(name == module or name.startswith(f"{module}.") for module in kept):
                raise Refused(f"its convolution {name} keeps no state")

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        arguments: dict[str, Any],
    ) -> Tensor:
        """Record a call of attention, and return an empty result [1, tokens, heads, width]."""
        layer, tokens = getattr(module, "layer_idx", None), query.shape[2]
        if not isinstance(layer, int):
            raise Refused("its attention does not say to which layer it belongs")
        if any(call.layer == layer for call in self.attention):
            raise Refused(f"layer {layer} has two attentions")
        window = arguments.pop("sliding_window", None)
        causal = arguments.pop("is_causal", None)
        if (getattr(module, "is_causal", True) if causal is None else causal) is False:
            raise Refused("its attention is not causal")
        sinks, softcap, scale = (arguments.pop(name, None) for name in ("s_aux", "softcap", "scaling"))
        if any(isinstance(one, Tensor) for one in (window, softcap, scale)):
            raise Refused("its attention has a window, a softcap or a scale that is a tensor")
        unknown = sorted(name for name, given in arguments.items() if given is not None and name not in HARMLESS)
        if unknown:
            raise Refused(f"its attention has the arguments {', '.join(unknown)}, which are not known here")
        if key.dim() != 4 or key.shape[2] != tokens or value.shape[2] != tokens or query.shape[0] != 1:
            raise Refused(f"its attention gets {key.shape[-2]} keys for {tokens} tokens")
        if tokens != self._tokens:
            raise Refused(f"its attention gets {tokens} queries for {self._tokens} tokens")
        _check_mask(mask, window)
        sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        self.attention.append(
            AttentionCall(layer, self._names[id(module)], *sizes, scale, window, softcap, sinks is not None)
        )
        return query.new_empty((1, tokens, query.shape[1], value.shape[3]))

    def keep(self, state: Tensor, layer: int, number: int, taps: int | None, *, is_convolution: bool) -> None:
        """Record a state of a layer. `taps`: of a convolution; None: as many as the state has."""
        shape = tuple(state.shape[1:])
        if is_convolution:
            shape = (*shape[:-1], shape[-1] if taps is None else taps)
        if any((one.layer, one.number, one.is_convolution) == (layer, number, is_convolution) for one in self.states):
            raise Refused(f"layer {layer} writes a state twice")
        self.touch(layer)
        dtype = str(state.dtype).removeprefix("torch.")
        self.states.append(StateCall(layer, self._current_name(), number, shape, dtype, is_convolution))

    def touch(self, layer: int) -> None:
        """Note that the module that runs uses a state of `layer`."""
        self._stateful.setdefault(layer, []).append(self._current_name())

    def _current_name(self) -> str:
        """Return the name of the innermost module that runs."""
        return next((self._names[id(one)] for one in reversed(self._running) if id(one) in self._names), "")

    def _module_of_states(self, layer: int) -> str:
        """Return the outermost module that uses the states of `layer`. Raise `Refused` if more than they are in it."""
        columns = zip(*(name.split(".") for name in self._stateful[layer]), strict=False)
        common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        name = ".".join(common)
        inside = [call for call in self.attention if f"{call.module}.".startswith(f"{name}.")]
        if not name or inside:
            raise Refused(f"the states of layer {layer} are used by a module that has attention as well")
        return name

    def _change_logits(self, operation: str) -> None:
        self.changes_logits = self.changes_logits or operation


class ObservedMemory(MemoryWithoutKeys):
    """The memory of earlier tokens as transformers' classes see it: none, for one sequence at its first token."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        if layer_idx is not None:
            _current().touch(layer_idx)
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        _current().touch(layer_idx)
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        _current().touch(layer_idx)
        return None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        _current().keep(conv_states, layer_idx, state_idx, conv_kernel_size, is_convolution=True)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        _current().keep(recurrent_states, layer_idx, state_idx, None, is_convolution=False)
        return recurrent_states

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refused(f"it keeps a memory of its own ({name})")


class LaterMemory(ObservedMemory):
    """The memory of a sequence that has earlier tokens: the states of `calls`, each of which must be used."""

    def __init__(self, calls: list[StateCall]) -> None:
        self._calls = {(one.layer, one.number, one.is_convolution): one for one in calls}
        self._unused = set(self._calls)

    def check(self) -> None:
        """Raise `Refused` if the class has not used a state."""
        for layer, _, is_convolution in sorted(self._unused):
            kind = "convolution" if is_convolution else "recurrence"
            raise Refused(f"the {kind} of layer {layer} forgets the tokens before a step")

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return layer_idx is not None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state((layer_idx, state_idx, True))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state((layer_idx, state_idx, False))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        state = self._state((layer_idx, state_idx, True))
        return torch.cat([state.to(conv_states.dtype), conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self._state((layer_idx, state_idx, False))
        return recurrent_states

    def _state(self, key: tuple[int, int, bool]) -> Tensor:
        call = self._calls.get(key)
        if call is None:
            raise Refused(f"layer {key[0]} has other states in later steps")
        dtype = getattr(torch, call.dtype)
        return EarlierState.of((1, *call.shape), dtype, lambda: self._unused.discard(key))


_observer: Observer | None = None


def _current() -> Observer:
    assert _observer is not None, "a class runs inside of its observer"
    return _observer


def _drops(args: tuple, named: Mapping[str, Any]) -> bool:
    """Return whether a dropout with these arguments drops values."""
    given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(named)
    return bool(given.get("training", True)) and given.get("p", 0.5) > 0


def _check_mask(mask: Tensor | None, window: int | None) -> None:
    """Raise `Refused` unless `mask` is the causal one with `window`."""
    kind = getattr(mask, "kind", None)
    if kind is None:
        raise Refused("its attention gets no mask" if mask is None else "its attention gets a mask of its own")
    if kind.other is not None:
        raise Refused(f"its mask {kind.other}")
    if kind.window != window:
        raise Refused(f"its mask has a window of {kind.window}, its attention one of {window}")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **arguments: Any
) -> tuple[Tensor, None]:
    return _current().attend(module, query, key, value, attention_mask, arguments), None


def _mask(q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Mask:
    with torch._C.DisableTorchFunction():
        kind = mask_kind(mask_function)
    return Mask.of(kind, q_length, kv_length)


def register() -> None:
    """Make transformers know the observer as an implementation of attention, called `IMPLEMENTATION`."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
