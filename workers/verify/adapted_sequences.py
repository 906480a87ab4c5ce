"""The adapter of a verification in the slots of a rank, by the engine's commands, and the slot of each sequence.

Slot 1 holds the same adapter with its updates negated, and so does slot 2 before the adapter replaces it: a row that
reads another slot, or a slot that still has a part of its previous adapter, has other values.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.workers.adapters import NO_SLOT, AdapterCommand, AdapterControl, AdapterError, CommandKind
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.adapter_slots import HostAdapter
from oarlock.workers.lora.loaded_adapters import LoadedAdapters
from oarlock.workers.lora.rank_adapter import read_adapter
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.verify.request import NUM_SLOTS, VerifyRequest

MIRRORED_SLOT, SLOT = range(1, NUM_SLOTS + 1)


def put_adapter(runner: ModelRunner, request: VerifyRequest) -> list[int]:
    """Put the adapter of `request` into its slot. Return the slot of each sequence; empty without an adapter.

    Raises `StartupError` if the rank cannot load the adapter.
    """
    if request.adapter is None:
        return []
    loaded, path = runner.adapters, Path(request.adapter)
    assert isinstance(loaded, LoadedAdapters), "the ranks of a verification have slots"
    adapter = Adapter.open(path, runner.spec)
    mirrored = _mirrored(read_adapter(adapter, loaded.slots))
    for slot in (MIRRORED_SLOT, SLOT):
        loaded.slots.put(mirrored, slot)
    prepare = AdapterCommand(CommandKind.PREPARE, adapter.digest, name=adapter.name, directory=str(path))
    try:
        AdapterControl(loaded).run([prepare, AdapterCommand(CommandKind.PUT, adapter.digest, SLOT)])
    except AdapterError as error:
        raise StartupError(f"{error}.", "See the reason above.") from error
    return [SLOT if request.is_adapted(sequence) else NO_SLOT for sequence in range(len(request.prompts))]


def _mirrored(adapter: HostAdapter) -> HostAdapter:
    """Return the adapter with negated updates."""
    pairs = {at: [replace(pair, b=-pair.b) for pair in held] for at, held in adapter.pairs.items()}
    return replace(adapter, digest="ff" * (len(adapter.digest) // 2), pairs=pairs)


def slots_of_step(slots: Sequence[int], sequences: Sequence[int]) -> Sequence[int]:
    """Return the slots of the `sequences` of a step; empty if none of them has an adapter."""
    found = [slots[sequence] for sequence in sequences] if slots else []
    return found if any(found) else []
