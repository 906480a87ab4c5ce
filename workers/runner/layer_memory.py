"""Memory of a rank's layers: pages by the attention backend of their group, and slots of recurrent state.

Groups have the numbers of the whole model; a pipeline stage may have no layer of a group.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, LayerKV, LayerMemory
from oarlock.workers.layers.memory_spec import PagesSpec, SlotsSpec, StatePart
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.platform.huge_pages import huge_page_empty
from oarlock.workers.recurrent.states import LayerStates


def allocate_memory(
    model: RankModel, backends: Mapping[int, AttentionBackend], counts: Sequence[int]
) -> list[LayerMemory]:
    """Return the zeroed memory of each layer of `model`. `counts`: blocks, or slots, of each group, by its number.

    A layer that reads the pages of another has the same tensors. There is one more slot than in `counts`, the last,
    for padding sequences.
    """
    pages: dict[int, LayerKV] = {}
    states: dict[int, LayerStates] = {}
    for number, (memory, layers) in enumerate(model.groups):
        own = [layer for layer in layers if layer in model.stage]
        if isinstance(memory, SlotsSpec):
            states |= {layer: _states(memory, counts[number] + 1, model) for layer in own}
        elif number in backends:
            pages |= zip(own, backends[number].allocate(counts[number]), strict=True)
    found = []
    for layer in model.stage:
        for memory in model.spec.layers[layer].memories:
            if isinstance(memory, PagesSpec) and memory.of_layer is not None:
                pages[layer] = pages[memory.of_layer]
        found.append(LayerMemory(pages.get(layer), states.get(layer)))
    return found


def _states(memory: SlotsSpec, num_slots: int, model: RankModel) -> LayerStates:
    """Return zeroed states of one layer: `num_slots` of them."""
    place = model.placement

    def part_of(part: StatePart) -> Tensor:
        shape = num_slots, *part.shape_of_rank(place.tp.size)
        dtype = torch.float32 if part.is_float32 else place.dtype
        if place.device.type == "cpu":
            return huge_page_empty(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=place.device)

    return LayerStates(tuple(part_of(part) for part in memory.parts))
