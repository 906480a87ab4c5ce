"""Listens to a transformers model: the tensors that `taps.py` names, from hooks on its modules.

Knows the module names that transformers gives to decoder-only models. `q_rope`, `k_rope` are caught in an attention
function that is registered under names of our own and calls the model's usual one.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from workers.layers.decoder_spec import DecoderSpec
from workers.verify.exact import exact_attention


class Recording:
    """While open, remembers each tensor as [T, columns]; several calls of the model follow one another along T."""

    def __init__(self, model: PreTrainedModel, spec: DecoderSpec, keep: torch.dtype) -> None:
        """`keep`: the dtype to remember tensors in."""
        self.spec = spec
        self._model = model
        self._keep = keep
        self._parts: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []
        self._usual_attention = model.config._attn_implementation
        self._install(_inner_model(model))

    def tensors(self) -> dict[str, Tensor]:
        """Everything heard so far; asking empties the memory."""
        joined = {name: torch.cat(parts) for name, parts in self._parts.items()}
        self._parts = {}
        return joined

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._model.set_attn_implementation(self._usual_attention)

    def record(self, name: str, value: Tensor) -> None:
        """`value` [1, T, ...]."""
        rows = value.detach()[0]
        self._parts.setdefault(name, []).append(rows.reshape(rows.shape[0], -1).to(self._keep, copy=True).cpu())

    # -- hooks

    def _install(self, inner: Any) -> None:
        self._after(inner.norm, "final_norm")
        for index, layer in enumerate(inner.layers):
            self._install_layer(index, layer)
        self._model.set_attn_implementation(_listening_attention(self._usual_attention))
        _LISTENERS[id(self._model.config)] = self
        self._handles.append(_Forget(id(self._model.config)))

    def _install_layer(self, index: int, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        spec = self.spec
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if hasattr(attention, "qkv_proj"):
            self._before(attention.qkv_proj, f"{index}.input_norm")
            self._after_split(attention.qkv_proj, [f"{index}.{part}" for part in "qkv"], [heads, kv_heads, kv_heads])
        else:
            self._before(attention.q_proj, f"{index}.input_norm")
            for part in "qkv":
                self._after(getattr(attention, f"{part}_proj"), f"{index}.{part}")
        if hasattr(mlp, "gate_up_proj"):
            size = spec.intermediate_size
            self._after_split(mlp.gate_up_proj, [f"{index}.gate", f"{index}.up"], [size, size])
        else:
            self._after(mlp.gate_proj, f"{index}.gate")
        self._before(attention.o_proj, f"{index}.attention")
        self._after(attention.o_proj, f"{index}.o_proj")
        # Gemma norms a half-block's result as well: there `post_attention_layernorm` stands before the addition.
        norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        self._before(norm, f"{index}.mid_residual")
        self._after(norm, f"{index}.mlp_norm")
        self._before(mlp.down_proj, f"{index}.gate_up")
        self._after(mlp.down_proj, f"{index}.mlp")
        self._after(layer, f"{index}.residual")
        if index == 0:
            self._before(layer, "embedding")

    def _before(self, module: nn.Module, name: str) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.record(name, args[0] if args else named["hidden_states"])

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: nn.Module, name: str) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            self.record(name, result[0] if isinstance(result, tuple) else result)

        self._handles.append(module.register_forward_hook(hook))

    def _after_split(self, module: nn.Module, names: list[str], sizes: list[int]) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
            for name, part in zip(names, result.split(sizes, dim=-1), strict=True):
                self.record(name, part)

        self._handles.append(module.register_forward_hook(hook))


def _inner_model(model: PreTrainedModel) -> Any:
    """The decoder inside a model with a head."""
    return model.model


# The registered function gets no more than the attention module, whose config is the model's own.
_LISTENERS: dict[int, Recording] = {}


class _Forget:
    """Shaped like a hook's handle, so that everything is closed in one loop."""

    def __init__(self, key: int) -> None:
        self._key = key

    def remove(self) -> None:
        _LISTENERS.pop(self._key, None)


def _listening_attention(usual: str) -> str:
    """Register, under a name of our own, attention that listens and then does what `usual` does."""
    name = f"oarlock_{usual}"
    AttentionInterface.register(name, _listening(usual))
    AttentionMaskInterface.register(name, sdpa_mask if usual == "sdpa" else eager_mask)
    return name


def _listening(usual: str) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        listener = _LISTENERS[id(module.config)]
        listener.record(f"{module.layer_idx}.q_rope", query.transpose(1, 2))
        listener.record(f"{module.layer_idx}.k_rope", key.transpose(1, 2))
        if query.dtype == torch.float64:
            scale = named.get("scaling") or query.shape[-1] ** -0.5
            return exact_attention(query, key, value, attention_mask, scale, named.get("softcap")), None
        if usual == "eager":
            function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            function = AttentionInterface()[usual]
        return function(module, query, key, value, attention_mask, **named)[0], None

    return attend
