"""Attention of a class that transformers computes, over our pages: the function that the class calls in each layer.

The class hands over queries, keys and values with positions applied. They are written to the layer's pages, and the
attention backend of its memory group computes the rest: masks, windows, softcap and sinks. The look before the start
(`observers.py`) has refused every class whose calls mean anything else, so nothing is judged here again.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, LayerMemory
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.transformers_backend.class_description import AttentionCall
from oarlock.workers.transformers_backend.private_parts import AttentionInterface, AttentionMaskInterface

IMPLEMENTATION = "oarlock"


@dataclass(slots=True)
class RunningStep:
    """What the attention of each layer needs of the step that runs."""

    batch: ForwardBatch
    memory: Sequence[LayerMemory]  # of each layer
    backends: Mapping[int, AttentionBackend]  # by the number of the memory group
    plans: Mapping[int, Any]
    groups: Sequence[int]  # memory group of the pages of each layer
    layers: Mapping[int, AttentionSpec]  # attention of each layer that has one


class _Running(threading.local):
    """The step that runs in this thread: transformers' registries hold functions, so they find it here."""

    step: RunningStep | None = None


_running = _Running()


def run_within(step: RunningStep | None) -> None:
    """Set the step to which the next calls of attention in this thread belong; None: no step runs."""
    _running.step = step


def attention_spec(call: AttentionCall, ranks: int) -> AttentionSpec:
    """Return the attention of one layer on each of `ranks` ranks."""
    held = ranks if call.is_divided else 1
    scale = call.key_width**-0.5 if call.scale is None else call.scale
    heads = call.heads // held, call.kv_heads // held
    return AttentionSpec(call.layer, *heads, call.key_width, scale, call.window, call.softcap)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write keys [1, K, T, D] and values [1, K, T, V]; return the attention of `query` [1, H, T, D]: [1, T, H, V]."""
    step = _running.step
    assert step is not None, "attention runs inside of a step"
    layer = module.layer_idx
    assert isinstance(layer, int)
    spec, group, memory = step.layers[layer], step.groups[layer], step.memory[layer].kv
    assert memory is not None
    backend = step.backends[group]
    rows, dtype = query.shape[2], backend.spec.dtype
    heads = _rows(query, dtype).contiguous()
    backend.write(memory, _rows(key, dtype), _rows(value, dtype), step.batch)
    mixed = backend.attend(heads, memory, step.plans[group], spec, None if s_aux is None else s_aux.float())
    return mixed.view(1, rows, spec.num_heads, -1).to(query.dtype), None


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` [1, H, T, D] as [T, H, D], with the heads of each row one after another in memory.

    The class may have computed it in any layout, and a dimension of size 1 may have any stride.
    """
    _, heads, rows, width = tensor.shape
    return tensor[0].transpose(0, 1).to(dtype).reshape(rows, heads * width).view(rows, heads, width)


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: the attention backends know the masks that the look before the start found."""
    return


def register() -> None:
    """Make transformers know this attention as the implementation `IMPLEMENTATION`."""
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
