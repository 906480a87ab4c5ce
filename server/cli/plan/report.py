"""A plan as text for people and as JSON for programs, and its `oarlock serve` command.

Sizes in JSON are in bytes, of one rank unless stated otherwise; rates are per second.
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from oarlock.base.host_memory import human_bytes
from oarlock.server.cli.plan.layouts import CONTEXTS, Layout, Remedy
from oarlock.server.cli.plan.machine import Machine
from oarlock.server.config.settings import OPTIONS
from oarlock.workers.capacity import expert_bytes, smaller_slots
from oarlock.workers.catalogue import code_line
from oarlock.workers.preflight import OpenModel


def as_json(
    model: OpenModel, machine: Machine, found: Sequence[Layout], command: str | None, helps: Sequence[Remedy]
) -> dict[str, Any]:
    """Return the plan as JSON. `found`: the best first. `command`: None if nothing fits; `helps` then has the
    remedies."""
    return {
        "model": {
            "architecture": model.spec.architecture,
            "parameters": model.spec.num_parameters,
            "active_parameters": model.spec.active_parameters,
            "served_by": model.spec.served_by,
        },
        "machine": {
            "device": machine.memory.device,
            "count": machine.count,
            "memory_bytes": machine.memory.total_bytes,
            "bandwidth": machine.bandwidth,
        },
        "fits": command is not None,
        "command": command,
        "remedies": [{"change": remedy.text, "kv_tokens": remedy.kv_tokens} for remedy in helps],
        "layouts": [_layout(one) for one in found],
    }


def _layout(one: Layout) -> dict[str, Any]:
    held, (tp, pp, dp) = one.capacity, one.sizes
    config = held.config
    return {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "data_parallel_size": dp,
        "fits": one.fits,
        "missing_bytes": held.missing_bytes,
        "cause": None if held.refusal is None else held.refusal.cause,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": config.max_model_len,
        "weight_bytes": max(held.weight_bytes),
        "step_bytes": held.step_bytes,
        "other_bytes": held.other_bytes,
        "adapter_slots": config.max_loras,
        "bytes_per_adapter_slot": config.adapter_slot_bytes,
        "adapter_copies_bytes": config.adapter_copies_bytes,
        "vector_bytes": held.vector_bytes,
        "kv_bytes": held.kv_bytes,
        "kv_bytes_per_token": held.groups.bytes_per_token,
        "num_blocks": held.num_blocks,
        "state_slots": held.num_slots,
        "bytes_per_state_slot": held.groups.slot_bytes,
        "kv_tokens": one.kv_tokens,
        "users": {str(context): one.users(context) for context in CONTEXTS} if one.fits else {},
        "tokens_per_s_of_one_user": one.one_user,
        "tokens_per_s_of_all_users": one.all_users,
        "prompt_tokens_per_s": one.prompts,
    }


def as_text(
    model: OpenModel, machine: Machine, found: Sequence[Layout], command: str | None, helps: Sequence[Remedy]
) -> str:
    """Return the plan as text. `command`: of the first of `found`, if it fits; else `helps` has the remedies."""
    best = found[0]
    lines = [model_line(model, best), machine.text, "", *aligned(_rows(machine, found))]
    if command is not None:
        lines += [
            "",
            *_of_best(machine, best),
            *_of_code(model, best),
            *_of_length(model, best),
            *_of_states(model, best),
            *_of_experts(model, best),
            *_of_adapters(model, best),
            "",
            f"  {command}",
        ]
    else:
        lines += ["", *_why_not(machine, best, helps)]
    return "\n".join(lines)


def model_line(model: OpenModel, best: Layout) -> str:
    config = best.capacity.config
    form = config.dtype if config.quantization == "none" else f"{config.quantization} and {config.dtype}"
    form += ", dequantised" if config.dequantize else ""
    kv = "" if config.kv_cache_dtype == config.dtype else f", keys and values in {config.kv_cache_dtype}"
    active = f" ({parameters(model.spec.active_parameters)} active)" if model.spec.has_experts else ""
    wrapper = "" if model.spec.wrapper is None else f", the text part of {model.spec.wrapper}"
    return (
        f"{model.spec.architecture}{wrapper}, {parameters(model.spec.num_parameters)} parameters{active} "
        f"in {form}{kv}, context {config.max_model_len:,} tokens"
    )


def parameters(count: int) -> str:
    """Return the number of parameters as text: `7615616512` as `7.62 billion`."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return str(count)


def _rows(machine: Machine, found: Sequence[Layout]) -> list[list[str]]:
    each = "rank" if machine.memory.device == "cpu" else "GPU"
    has_adapters = found[0].capacity.config.max_loras > 0
    heads = ["TP x PP x DP", "fits", f"weights/{each}", *([f"adapters/{each}"] if has_adapters else [])]
    heads += [f"step/{each}", f"KV/{each}", "KV tokens"]
    contexts, has_rates = _contexts(found[0]), machine.bandwidth is not None
    heads += [f"users at {context:,}" if context % 1024 else f"users at {context // 1024}k" for context in contexts]
    rows = [[*heads, *(["tokens/s, 1 user", f"all at {found[0].user_context:,}"] if has_rates else [])]]
    for one in found:
        held = one.capacity
        rows.append(
            [
                " x ".join(map(str, one.sizes)),
                "yes" if one.fits else f"{human_bytes(held.missing_bytes)} short",
                human_bytes(max(held.weight_bytes)),
                *([human_bytes(held.config.adapter_bytes)] if has_adapters else []),
                human_bytes(held.step_bytes),
                human_bytes(held.kv_bytes) if one.fits else "-",
                f"{one.kv_tokens:,}" if one.fits else "-",
                *(users(one, context) for context in contexts),
                *([rate(one.one_user), rate(one.all_users)] if has_rates else []),
            ]
        )
    return rows


def _contexts(best: Layout) -> list[int]:
    """Return the contexts for which users are counted: the usual ones, or the model's own if it is shorter."""
    longest = best.capacity.config.max_model_len
    assert longest is not None
    return [context for context in CONTEXTS if context <= longest] or [longest]


def users(one: Layout, context: int) -> str:
    """Return the number of users that KV memory holds, as text."""
    assert one.capacity.config.max_model_len is not None
    if not one.fits or context > one.capacity.config.max_model_len:
        return "-"
    return f"{one.users(context):,}"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _of_best(machine: Machine, best: Layout) -> list[str]:
    config, lines = best.capacity.config, []
    at_once = best.at_once(best.user_context) * best.sizes[2]
    if at_once < best.users(best.user_context):
        lines.append(f"At once run {at_once} users (--max-num-seqs {config.max_num_seqs} for each replica).")
    if best.capacity.vector_bytes:
        size = human_bytes(best.capacity.vector_bytes)
        lines.append(f"Vectors come back through {size} of the host's shared memory for each replica.")
    if best.prompts is None:
        lines.append("How fast it is follows from the bandwidth of memory: give --bandwidth, or a GPU by its name.")
    else:
        lines.append(f"Prompts: {rate(best.prompts)} tokens/s. Rates are estimates by the roofline.")
    return lines


def _of_code(model: OpenModel, best: Layout) -> list[str]:
    """Describe the code that computes a class without a description, and its costs."""
    if model.spec.served_by == "oarlock":
        return []
    is_replicated = best.sizes[0] > 1 and model.spec.is_replicated
    line = code_line(model.spec.architecture, model.spec.served_by, is_replicated=is_replicated)
    return [f"{line[0].upper()}{line[1:]}."]


def _of_length(model: OpenModel, best: Layout) -> list[str]:
    """Explain why the context is shorter than the model's, if the code limits it."""
    if model.spec.length_limit is None or best.capacity.config.max_model_len != model.spec.longest_length:
        return []
    return [f"The context ends at {model.spec.longest_length:,} tokens: {model.spec.length_limit}."]


def _of_states(model: OpenModel, best: Layout) -> list[str]:
    """Describe the slots of recurrent state of a rank, if the model has recurrent layers."""
    held, asked = best.capacity, model.config.max_num_seqs
    if not held.num_slots:
        return []
    served, slots = held.config.max_num_seqs, f"{held.num_slots} slots of {human_bytes(held.groups.slot_bytes)}"
    lowered = "" if served == asked else f" --max-num-seqs is lowered from {asked} to {served}, so that states fit."
    return [f"Recurrent state: {slots}; a running user has two, the others are checkpoints.{lowered}"]


_USERS = (1, 16)  # users whose tokens a step computes


def _of_experts(model: OpenModel, best: Layout) -> list[str]:
    """Describe a rank's experts for both methods of sharing them; both exchange the same bytes."""
    config = best.capacity.config
    if not model.spec.has_experts or config.tensor_parallel_size == 1:
        return []
    said = []
    for whole, way in ((False, "cut along their width"), (True, "whole, with --enable-expert-parallel")):
        found = expert_bytes(model, config, whole=whole, tokens=_USERS)
        reads = " and ".join(f"{human_bytes(found.read_by[count])} of {count}" for count in _USERS)
        said.append(f"{human_bytes(found.held)} {way} (a step reads {reads} tokens)")
    return [f"Experts of a rank: {said[0]}; {said[1]}."]


def _of_adapters(model: OpenModel, best: Layout) -> list[str]:
    """Describe a rank's memory for LoRA adapters, and how much of it experts take."""
    config = best.capacity.config
    if not config.max_loras:
        return []
    size = human_bytes(config.adapter_slot_bytes)
    line = (
        f"Adapters: {config.max_loras} slot(s) of {size} on each rank, for rank {config.max_lora_rank}; up to "
        f"{config.num_host_adapters} copies take as much each in host memory."
    )
    fewer = smaller_slots(model, config)
    if fewer is None:
        return [line]
    flag = f"--lora-target-modules {' '.join(fewer.targets)}"
    return [line, f"Without experts a slot takes {human_bytes(fewer.slot_bytes)}: {flag}."]


def _why_not(machine: Machine, best: Layout, helps: Sequence[Remedy]) -> list[str]:
    refusal, each = best.capacity.refusal, "on the host" if machine.memory.device == "cpu" else "on each GPU"
    assert refusal is not None
    lines = [f"It does not fit: {human_bytes(best.capacity.missing_bytes)} are missing {each}. {refusal.cause}", ""]
    if not helps:
        return [*lines, "No single change makes it fit: use more memory, or a smaller model."]
    lines.append("Any one of these makes it fit:")
    rows = aligned([[f"  {remedy.text}", f"{remedy.kv_tokens:,} KV tokens"] for remedy in helps])
    return lines + rows


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns of equal width; the first to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:<{width}}" if not column else f"{cell:>{width}}" for column, (cell, width) in enumerate(cells)
        )
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def serve_command(arguments: argparse.Namespace, chosen: Mapping[str, Any]) -> str:
    """Return the `oarlock serve` command with the flags of `plan`. `chosen`: values of options that replace the
    flags'."""
    words = ["oarlock", "serve"]
    if arguments.model is not None:
        words.append(arguments.model)
    if arguments.config is not None:
        words += ["--config", arguments.config]
    for option in OPTIONS.values():
        value = chosen.get(option.name, getattr(arguments, option.name, None))
        if option.positional or value is None:
            continue
        if option.kind is bool:
            words.append(option.flag if value else f"--no-{option.flag[2:]}")
        else:
            # A flag with many values has a list for each time that it is given.
            words += [option.flag, *(chain.from_iterable(value) if option.many else [str(value)])]
    return shlex.join(words)
