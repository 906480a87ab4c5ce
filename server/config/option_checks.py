"""Checks that one option alone cannot make: unknown names, host patterns, and options that depend on each other."""

from __future__ import annotations

from collections.abc import Iterable

from server.config import vllm_flags
from server.config.allowed_hosts import is_pattern
from server.config.options import OptionError, nearest


def check_allowed_hosts(patterns: Iterable[str]) -> None:
    """Raises `OptionError` for a pattern of `--allowed-hosts` that is neither a name nor an address."""
    for pattern in patterns:
        if not is_pattern(pattern):
            raise OptionError(
                f"--allowed-hosts is {pattern[:80]!r}, but it must be a name or an address without scheme or port.",
                "For example: --allowed-hosts llm.example.org '*.example.org'",
            )


def check_step_size(max_num_batched_tokens: int | None, max_num_seqs: int) -> None:
    """Raises `OptionError` when a step has fewer tokens than running sequences."""
    if max_num_batched_tokens is not None and max_num_batched_tokens < max_num_seqs:
        raise OptionError(
            f"--max-num-batched-tokens ({max_num_batched_tokens}) is below --max-num-seqs "
            f"({max_num_seqs}): a step could not give every running sequence a token.",
            f"Raise --max-num-batched-tokens to at least {max_num_seqs}, or lower --max-num-seqs.",
        )


def unknown_name(what: str, name: str, known: Iterable[str]) -> OptionError:
    """The error for an unknown name: it suggests the nearest known one. `what` is the kind of name."""
    near = nearest(name, known)
    fix = f"Did you mean {near}?" if near else "`oarlock config show` lists all of them."
    fix = vllm_flags.what_holds(name) or fix
    return OptionError(f"Unknown {what}: {name}.", fix)
