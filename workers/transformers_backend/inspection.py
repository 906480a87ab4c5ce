"""One look at a model class before weights load: it is built without weights and runs once, under observation.

    python -m oarlock.workers.transformers_backend.inspection DIRECTORY [--tensor-parallel-size N] [--trust-remote-code]

writes the `ClassDescription` of the checkpoint in DIRECTORY as JSON. Importing transformers and torch takes seconds and
a few hundred MiB, so this runs in a process of its own (see `class_facts.py`).
"""

import argparse
import inspect
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oarlock.base.errors import StartupError
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.placement import Placement
from oarlock.workers.model_files.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from oarlock.workers.model_files.tensor_names import AS_STORED
from oarlock.workers.transformers_backend.building import build, class_tensors, without_weights
from oarlock.workers.transformers_backend.class_description import (
    CANNOT_DIVIDE,
    AttentionCall,
    ClassDescription,
    StateCall,
)
from oarlock.workers.transformers_backend.experts import ExpertsPart, experts_of
from oarlock.workers.transformers_backend.linears import UsesWeight
from oarlock.workers.transformers_backend.module_state import ModuleState
from oarlock.workers.transformers_backend.observers import (
    FIRST,
    IMPLEMENTATION,
    LaterMemory,
    ObservedMemory,
    Observer,
    Refused,
    register,
)
from oarlock.workers.transformers_backend.opening import OpenClass, open_directory, open_named
from oarlock.workers.transformers_backend.private_parts import PretrainedConfig, PreTrainedModel
from oarlock.workers.transformers_backend.switch import ClassSwitch, Switch, base_name
from oarlock.workers.transformers_backend.tracked_tensors import Positions
from oarlock.workers.transformers_backend.weights import names_fault, stored_ties

_TOKENS = 23  # of the row that runs: a prime number that is no size of any layer
_MANY_TOKENS = 131_101  # of another row, which the class has to compute in the same way
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
# Rotary angles that depend on the longest sequence of a batch, so a token's would depend on other requests.
_CHANGING_ROPE = ("dynamic", "longrope")


def describe_class(config: PretrainedConfig, ranks: int = 1) -> ClassDescription:
    """Return the description of the class that `config` names first, or a description with a refusal."""
    name = (config.architectures or [""])[0]
    try:
        return describe_opened(open_named(name, config), ranks)
    except Refused as refusal:
        return ClassDescription(name, config.model_type, str(refusal), ranks)


def describe_opened(opened: OpenClass, ranks: int) -> ClassDescription:
    """Return the description of a class. Raise `Refused` if it cannot be served by `ranks` ranks.

    A linear layer whose weight the class reads itself is left to the class, which a look finds one layer at a time.
    """
    own: list[str] = []
    while True:
        try:
            return _described(opened, ranks, own)
        except UsesWeight as use:
            if use.module in own:
                raise
            linears = [name for name, module in _whole(opened).named_modules() if type(module) is nn.Linear]
            own += [name for name in linears if _without_numbers(name) == _without_numbers(use.module)]


def _without_numbers(name: str) -> list[str]:
    """Return the parts of a module's name, with the same text for every layer."""
    return ["*" if part.isdecimal() else part for part in name.split(".")]


def _described(opened: OpenClass, ranks: int, own: list[str]) -> ClassDescription:
    _check_rope(opened.config)
    _check_time_steps(opened.config)
    model = _whole(opened)
    if type(model.get_output_embeddings()) is not nn.Linear:
        raise Refused("its output head is no plain linear layer")
    head, is_tied = model.get_output_embeddings(), _is_tied(model)
    tensors, hidden, vocabulary = tuple(class_tensors(model, own)), head.in_features, head.out_features
    has_plan = bool(model._tp_plan)
    built = _on_rank(model, 1, own)
    observer = _looked_at(built, vocabulary, 1)
    attention, states = tuple(observer.attention), tuple(observer.states)
    if ranks > 1:
        attention, states = _divided(opened, ranks, own, vocabulary, attention, states)
    return ClassDescription(
        opened.architecture,
        opened.config.model_type,
        ranks=ranks,
        config_part=opened.config_part,
        is_remote=opened.is_remote,
        layers=1 + max(call.layer for call in (*attention, *states)),
        vocab_size=vocabulary,
        hidden_size=hidden,
        longest_length=_longest_length(opened.config, observer.positions_limit),
        is_tied=is_tied,
        has_plan=has_plan,
        attention=attention,
        states=states,
        experts=tuple(experts_of(built).values()),
        tensors=tensors,
        own_linears=tuple(own),
    )


def _on_rank(model: PreTrainedModel, ranks: int, own: list[str]) -> PreTrainedModel:
    """Make `model`, which has no weights, the model that the first of `ranks` ranks holds, and return it."""
    placement = Placement(TensorParallel(0, ranks), model.dtype, torch.device("meta"))
    try:
        built = build(model, placement, own)
    except StartupError as error:
        raise Refused(error.cause.rstrip(".")) from error
    for tensor in built.own:
        if ranks > 1:
            shape = tensor.local_shape(ranks)
            tensor.stored.put(torch.empty(shape, dtype=tensor.stored.tensor.dtype, device="meta"))
    return built.model


def _whole(opened: OpenClass) -> PreTrainedModel:
    """Return the model with its own modules, without weights."""
    try:
        model = without_weights(opened.kind, opened.config, IMPLEMENTATION, torch.bfloat16)
    except (ValueError, KeyError) as error:  # transformers' own check of implementations
        raise Refused(f"its attention cannot be replaced ({_line(error)})") from error
    except Exception as error:  # the class's code may raise anything
        raise Refused(f"it cannot be built ({_line(error)})") from error
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # a warning that reads ids
            vars(module)["warn_if_padding_and_no_attention_mask"] = lambda *_: None
    return model


def _is_tied(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _looked_at(model: PreTrainedModel, vocabulary: int, ranks: int) -> Observer:
    """Run `model` for a row of one sequence, and return what it asked for; if it has states, also for later rows."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise Refused("it counts positions by itself")
    if base_name(model) is None:
        raise Refused("its output head is not apart from its layers")
    names, head = {id(module): name for name, module in model.named_modules()}, model.get_output_embeddings()
    switch = ClassSwitch(model)
    before = ModuleState(model, {Switch: "output", ExpertsPart: "described"})
    observer = _run(switch, Observer(names, head, _TOKENS, vocabulary), ObservedMemory(), _TOKENS)
    observer.check()
    if ranks == 1 and not observer.states:
        longer = _run(switch, Observer(names, head, _MANY_TOKENS, vocabulary), ObservedMemory(), _MANY_TOKENS)
        if (longer.attention, longer.operations) != (observer.attention, observer.operations):
            raise Refused("it computes a long row in another way than a short one")
    for tokens in (_TOKENS, 1) if observer.states else ():
        memory = LaterMemory(observer.states)
        _run(switch, Observer(names, head, tokens, vocabulary), memory, tokens)
        memory.check()
    if (kept := before.changed()) is not None:
        raise Refused(f"it keeps {kept} of one forward for the next")
    if ranks > 1 and observer.changes_logits is not None:
        raise Refused(f"its logits are changed by {observer.changes_logits}")
    return observer


def _run(switch: ClassSwitch, observer: Observer, memory: ObservedMemory, tokens: int) -> Observer:
    """Run the class once for a row of `tokens`."""
    ids = torch.zeros(tokens, dtype=torch.int64, device="meta")
    positions = Positions.of(torch.arange(FIRST, FIRST + tokens), observer.use_positions)
    try:
        with torch.inference_mode(), observer.watching():
            hidden = switch.hidden_of(ids, positions, memory)
            logits = switch.logits_of(hidden[:2])
    except Refused:
        raise
    except Exception as error:  # the class's code may raise anything
        raise Refused(f"it does not run without values ({_line(error)})") from error
    if hidden.shape[0] != tokens or logits.shape[0] != min(2, tokens):
        raise Refused("its results do not have a row for each token")
    return observer


def _divided(
    opened: OpenClass,
    ranks: int,
    own: list[str],
    vocabulary: int,
    attention: tuple[AttentionCall, ...],
    states: tuple[StateCall, ...],
) -> tuple[tuple[AttentionCall, ...], tuple[StateCall, ...]]:
    """Return the calls of the whole model, each with whether `ranks` ranks divide it."""
    try:
        observer = _looked_at(_on_rank(_whole(opened), ranks, own), vocabulary, ranks)
        calls = {call.layer: call for call in observer.attention}
        memory = {(state.layer, state.number, state.is_convolution): state for state in observer.states}
        if calls.keys() != {call.layer for call in attention} or len(memory) != len(states):
            raise Refused("a rank has other layers")
        return (
            tuple(_with_heads(call, calls[call.layer], ranks) for call in attention),
            tuple(_with_rows(one, memory.get((one.layer, one.number, one.is_convolution)), ranks) for one in states),
        )
    except UsesWeight:
        raise
    except Refused as refusal:
        odd = next((call for call in attention if call.kv_heads % ranks), None)
        reason = refusal if odd is None else f"layer {odd.layer} has {odd.kv_heads} heads of keys and values"
        raise Refused(CANNOT_DIVIDE.format(ranks, reason)) from refusal


def _with_heads(whole: AttentionCall, local: AttentionCall, ranks: int) -> AttentionCall:
    """Return `whole` with whether a rank has all its heads or its part of them."""
    for is_divided, size in ((False, 1), (True, ranks)):
        heads, kv_heads = whole.heads // size, whole.kv_heads // size
        if replace(whole, heads=heads, kv_heads=kv_heads) == local and whole.heads == heads * size:
            if whole.kv_heads != kv_heads * size:
                break
            return replace(whole, is_divided=is_divided)
    raise Refused(
        f"the heads of layer {whole.layer}: {whole.heads} and {whole.kv_heads}, of a rank {local.heads} and "
        f"{local.kv_heads}"
    )


def _with_rows(whole: StateCall, local: StateCall | None, ranks: int) -> StateCall:
    """Return `whole` with whether a rank has all of the state or its part of the first dimension."""
    if local == whole:
        return replace(whole, is_divided=False)
    if local is not None and replace(local, shape=(local.shape[0] * ranks, *local.shape[1:])) == whole:
        return replace(whole, is_divided=True)
    raise Refused(f"a state of layer {whole.layer}: {list(whole.shape)}, of a rank {list(local.shape) if local else 0}")


def _longest_length(config: PretrainedConfig, table: int | None) -> int:
    """Return the most tokens that the config allows, and no more than a learned table of positions has; 0: any."""
    given = (getattr(config, name, None) for name in _LENGTHS)
    length = next((one for one in given if isinstance(one, int) and not isinstance(one, bool) and one > 0), 0)
    return length if table is None else min(length or table, table)


def _check_rope(config: PretrainedConfig) -> None:
    """Raise `Refused` if rotary angles depend on the longest sequence of a batch."""
    for kind in _rope_types(config.to_dict()):
        if kind in _CHANGING_ROPE:
            raise Refused(f"its rotary angles ({kind}) depend on the longest sequence of a batch")


def _check_time_steps(config: PretrainedConfig) -> None:
    """Raise `Refused` if time steps of a recurrence have limits: transformers ignores them if it decodes a token."""
    limits = getattr(config, "time_step_limit", None)
    if limits is not None and tuple(limits) != (0.0, math.inf):
        raise Refused(f"its time steps are limited to {list(limits)}, which transformers ignores for single tokens")


def _rope_types(settings: Any, *, is_rope: bool = False) -> list[str]:
    """Return the types of rotary angles anywhere in a parsed config."""
    if not isinstance(settings, dict):
        return []
    found = [settings[key] for key in ("rope_type", "type") if is_rope and isinstance(settings.get(key), str)]
    for key, part in settings.items():
        found += _rope_types(part, is_rope=is_rope or (isinstance(key, str) and key.startswith("rope_")))
    return found


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _with_checkpoint(
    description: ClassDescription, opened: OpenClass, directory: Path
) -> tuple[ClassDescription, str | None]:
    """Return the description with the ties of the checkpoint in `directory`, if it has tensors.

    Also one line about a tensor that it lacks or that the class does not have; None if there is none.
    """
    if not any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return description, None
    stored = {name: tensor.entry.shape for name, tensor in Checkpoint.open(directory, AS_STORED).tensors.items()}
    model, wrapper = _whole(opened), opened.wrapper_without_weights()
    fault = names_fault(model, stored, wrapper=wrapper)
    return replace(description, ties=() if fault else stored_ties(model, stored, wrapper)), fault


def look(directory: Path, ranks: int, *, trusts_code: bool) -> tuple[ClassDescription, str | None]:
    """Return the description of the class of the checkpoint in `directory`, and a fault of its tensors' names."""
    name, kind = "", ""
    try:
        opened = open_directory(directory, trusts_code=trusts_code)
        name, kind = opened.architecture, opened.config.model_type
        return _with_checkpoint(describe_opened(opened, ranks), opened, directory)
    except Refused as refusal:
        return ClassDescription(name, kind, str(refusal), ranks), None


def main() -> None:
    """Write the description of the checkpoint in a directory, and below it the fault of its tensors or nothing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # code of a checkpoint may print
        register()
        found, fault = look(
            arguments.directory, arguments.tensor_parallel_size, trusts_code=arguments.trust_remote_code
        )
        output.write(f"{found.encoded()}\n{fault or ''}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
