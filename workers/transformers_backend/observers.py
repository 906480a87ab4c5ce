"""What a class asks for in one forward: its attention, its masks and its memory, recorded instead of computed.

The class sees a mask that knows its kind (`Mask`), an attention function that records its arguments, and a memory whose
states are empty. Whatever the backend could not compute in the same way refuses the class.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oarlock.workers.transformers_backend.class_description import AttentionCall, StateCall
from oarlock.workers.transformers_backend.mask_kinds import MaskFunction, MaskKind, mask_kind
from oarlock.workers.transformers_backend.private_parts import AttentionInterface, AttentionMaskInterface

IMPLEMENTATION = "oarlock_observer"
# Arguments of attention that do not change its result here: dropout is off, outputs are not collected, and positions
# were applied to queries and keys before.
HARMLESS = frozenset({
    "dropout", "position_ids", "position_embeddings", "use_cache", "layer_idx", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
})  # fmt: skip
_SAME_VALUES = {"__getitem__", "expand", "to", "contiguous", "bool", "clone", "detach"}


class Refused(Exception):
    """The class needs something that the backend does not compute; its text says what, in one phrase."""


class Mask(Tensor):
    """A mask [1, 1, queries, keys] without values that knows its kind, also after it is cut or expanded."""

    kind: MaskKind

    @staticmethod
    def of(kind: MaskKind, queries: int, keys: int) -> "Mask":
        mask = torch.empty((1, 1, queries, keys), dtype=torch.bool, device="meta").as_subclass(Mask)
        mask.kind = kind
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Mask):
            name = getattr(func, "__name__", str(func))
            before = next((one.kind for one in args if isinstance(one, Mask) and hasattr(one, "kind")), None)
            keeps = name in _SAME_VALUES and before is not None
            result.kind = before if keeps else MaskKind(other=f"is changed by the class ({name})")
        return result


class Observer:
    """Records of one forward of `model`, whose modules it watches between `start` and `stop`."""

    def __init__(self, model: nn.Module) -> None:
        self.attention: list[AttentionCall] = []
        self.states: list[StateCall] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[nn.Module] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> "Observer":
        global _observer  # transformers' registries hold functions, so they find the observer here
        _observer = self
        hooks = torch.nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(lambda module, _: self._running.append(module)),
            hooks.register_module_forward_hook(lambda module, *_: self._leave(module), always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        global _observer
        _observer = None
        for hook in self._hooks:
            hook.remove()

    def _leave(self, module: nn.Module) -> None:
        assert self._running.pop() is module

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
        unknown = sorted(name for name, given in arguments.items() if given is not None and name not in HARMLESS)
        if unknown:
            raise Refused(f"its attention has the arguments {', '.join(unknown)}, which are not known here")
        if key.dim() != 4 or key.shape[2] != tokens or value.shape[2] != tokens or query.shape[0] != 1:
            raise Refused(f"its attention gets {key.shape[-2]} keys for {tokens} tokens")
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
        dtype = str(state.dtype).removeprefix("torch.")
        name = self._names[id(self._running[-1])]
        self.states.append(StateCall(layer, name, number, shape, dtype, is_convolution))


class ObservedMemory:
    """The memory of earlier tokens as transformers' classes see it: none, for one sequence at its first token."""

    is_compileable = False
    is_sliding = is_linear = is_dummy = ()  # of each layer: none is known before it runs

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, *_: object) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: object) -> tuple[int, int]:
        return query_length, 0

    def is_recording_past(self, *_: object) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
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


_observer: Observer | None = None


def _current() -> Observer:
    assert _observer is not None, "a class runs inside of its observer"
    return _observer


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
    return Mask.of(mask_kind(mask_function), q_length, kv_length)


def register() -> None:
    """Make transformers know the observer as an implementation of attention, called `IMPLEMENTATION`."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
