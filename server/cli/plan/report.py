"""A plan as JSON for programs. Sizes in bytes, of one rank where nothing else is said; rates per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oarlock.engine.preflight import OpenModel
from oarlock.server.cli.plan.layouts import CONTEXTS, Layout, Remedy
from oarlock.server.cli.plan.machine import Machine


def as_json(
    model: OpenModel, machine: Machine, found: Sequence[Layout], command: str | None, helps: Sequence[Remedy]
) -> dict[str, Any]:
    """Plan as JSON. `found`: the best first. `command`: None where nothing fits; then `helps` says what would."""
    return {
        "model": {"architecture": model.spec.architecture, "parameters": model.spec.num_parameters},
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
        "vector_bytes": held.vector_bytes,
        "kv_bytes": held.kv_bytes,
        "kv_bytes_per_token": held.kv.bytes_per_token,
        "num_blocks": held.num_blocks,
        "kv_tokens": one.kv_tokens,
        "users": {str(context): one.users(context) for context in CONTEXTS} if one.fits else {},
        "tokens_per_s_of_one_user": one.one_user,
        "tokens_per_s_of_all_users": one.all_users,
        "prompt_tokens_per_s": one.prompts,
    }
