"""The output of a start: progress on one line, then URL, model, memory and a command to try.

Other commands show their progress in the same way.
"""

import json
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, Self, TextIO

from oarlock.engine.types import EngineInfo
from oarlock.server.config.options import format_size
from oarlock.server.hub.transfer import in_words
from oarlock.server.observability.logs import event, logger
from oarlock.workers.catalogue import code_line
from oarlock.workers.config import window_blocks

_log = logger("start")
_TYPICAL_CONTEXT = 4096
_MAX_ADAPTERS = 8  # names in the banner
_ON_CUDA = "not measured on a GPU yet: `oarlock verify` checks the values on this one, `make gpu-check` also times it"
# First request to try: a path and a body, for a chat or for the model's task.
_TRIALS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "temperature": 0},
    ),
    "generate": ("/v1/completions", {"prompt": "import os\n", "max_tokens": 32, "temperature": 0}),
    "embed": ("/v1/embeddings", {"input": ["The sea is blue"]}),
    "score": ("/v1/rerank", {"query": "What is blue?", "documents": ["The sea is blue", "Grass is green"]}),
}
_ROW_CHARACTERS = 100  # width of wrapped text
_PLAIN_STEP = 0.25  # fraction between lines without a terminal
_REDRAW_S = 0.1  # shortest interval between updates of a count
_WAIT_REPORT_INTERVAL_S = 30.0  # interval of lines about the cause of a wait, without a terminal


class Progress:
    """Phase and percent: one rewritten line on a terminal, few lines elsewhere. `seconds`: the time of each phase."""

    def __init__(self, stream: TextIO | None = None, *, as_events: bool = False) -> None:
        """Start in the phase "starting". `as_events`: write log lines, for programs that read nothing else."""
        self._stream = stream or sys.stderr
        self._as_events = as_events
        self._tty = not as_events and self._stream.isatty()
        self._phase = "starting"  # imports and processes, until the first report
        self._shown = -1.0
        self._detail = ""
        self._since = self._written = time.monotonic()
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, fraction: float, detail: str = "") -> None:
        if phase != self._phase:
            self._close_phase()
            self._phase, self._shown, self._detail = phase, -1.0, ""
        if not self._is_shown(fraction, detail):
            return
        self._shown, self._detail, self._written = fraction, detail, time.monotonic()
        if self._as_events:
            _log.info(event("progress", phase=phase, fraction=round(fraction, 4), detail=detail or None))
            return
        text = f"{phase} {fraction:4.0%}{f' ({detail})' if detail else ''}"
        if self._tty:  # a line that wraps could not be rewritten
            text = text[: shutil.get_terminal_size().columns - 1]
        self._stream.write(f"\r\x1b[K{text}" if self._tty else f"{text}\n")
        self._stream.flush()

    def _is_shown(self, fraction: float, detail: str) -> bool:
        if detail != self._detail and (self._tty or time.monotonic() - self._written >= _WAIT_REPORT_INTERVAL_S):
            return True
        if fraction <= self._shown:
            return False
        if self._tty or detail:
            return fraction >= 1.0 or fraction - self._shown >= (0.01 if self._tty else _PLAIN_STEP)
        return fraction >= 1.0 or fraction - max(0.0, self._shown) >= _PLAIN_STEP  # a phase may be over at once

    def finish(self) -> None:
        self._close_phase()
        self._phase = ""
        if self._tty:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _close_phase(self) -> None:
        now = time.monotonic()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._since = now


class CountedProgress:
    """Progress of a number of equal items: the number done, the rate, and the remaining time.

    As a context manager, it removes its line at the end. `total`: None if only the end of a time is known. `is_shown`:
    None: if standard error is a terminal.
    """

    def __init__(self, what: str, total: int | None, *, is_shown: bool | None = None) -> None:
        self._what = what
        self._total = total
        self._progress = Progress() if (sys.stderr.isatty() if is_shown is None else is_shown) else None
        self._began = self._shown_at = time.monotonic()
        self.done = 0

    def add(self, count: int = 1, note: str = "") -> None:
        """Count `count` more items as done. `note` is shown after the figures."""
        self.done += count
        now = time.monotonic()
        if self._progress is None or (now - self._shown_at < _REDRAW_S and self.done != self._total):
            return
        self._shown_at, rate = now, self.done / max(now - self._began, 1e-9)
        fraction = 0.0 if self._total is None else self.done / self._total
        parts = [str(self.done) if self._total is None else f"{self.done}/{self._total}", f"{rate:.3g}/s"]
        parts += [f"{in_words((self._total - self.done) / rate)} left"] if self._total and rate and fraction < 1 else []
        self._progress(self._what, fraction, ", ".join([*parts, *([note] if note else [])]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.finish()


def banner(
    url: str,
    names: tuple[str, ...],
    info: EngineInfo,
    max_len: int,
    chat: bool,
    seconds: dict[str, float],
    key: bool,
    page: bool = False,
    task: str = "generate",
    about: str | None = None,
    adapters: Sequence[str] = (),
) -> str:
    """Return the summary of a successful start. `max_len`: tokens of prompt and completion; `key`: requests need an API
    key; `page`: there is a web page; `task`: the task that the model is served for; `about`: the introduction of its
    owner; `adapters`: names of the loaded LoRA adapters."""
    context = min(_TYPICAL_CONTEXT, max_len)
    users = _plural(info.data_parallel_size * _sequences(info, context), "user")
    label = "4k" if context == _TYPICAL_CONTEXT else f"{context} tokens"
    phases = ", ".join(f"{phase} {took:.1f} s" for phase, took in seconds.items() if took >= 0.05)
    form = "" if info.quantization == "none" else f" as {info.quantization}"
    compute = f"{info.dtype} on {info.device} x {_ranks(info)}"
    per_rank = format_size(info.weight_bytes_per_rank)
    total = sum(seconds.values())
    lines = [
        f"  URL      {url}",
        *([f"  page     {url}/ in a browser"] if page else []),
        f"  model    {', '.join(names)} ({info.architecture}{_whole(info)}, {_parameters(info)})",
        *_code(info),
        *(_wrapped("about", about) if about else []),
        f"  compute  {compute}, attention {info.attention_backend}, weights{form} {per_rank} per rank",
        *([f"  values   {_rounding(info)}"] if info.input_rounding else []),
        *_memory(info, users, label, max_len),
        *(_wrapped("adapters", _adapters(info, adapters)) if info.max_loras else []),
        f"  steps    up to {info.max_num_batched_tokens} tokens; a step counts as hung after {info.step_timeout_s:g} s",
        f"  started  in {total:.1f} s{f' ({phases})' if phases else ''}",
        *([f"  note     {_ON_CUDA}"] if info.device == "cuda" else []),
        "  try      " + _curl(url, "chat" if chat else task, key),
    ]
    return "\n".join(["Oarlock is ready.", *lines])


def _wrapped(label: str, text: str) -> list[str]:
    """Return the lines of a row whose text is longer than a line."""
    lines = textwrap.wrap(text, _ROW_CHARACTERS)
    return [f"  {name:<8} {line}" for name, line in zip([label, *[""] * len(lines)], lines, strict=False)]


def _whole(info: EngineInfo) -> str:
    """Return the multimodal model whose text part is served, as text; empty for a text model."""
    return "" if info.text_part_of is None else f", the text part of {info.text_part_of}"


def _code(info: EngineInfo) -> list[str]:
    """Return the lines about the code that computes the model; none for a described family."""
    if info.served_by == "oarlock":
        return []
    return _wrapped("code", code_line(info.architecture, info.served_by, is_replicated=info.is_replicated))


def _rounding(info: EngineInfo) -> str:
    """Return a text about the rounding of matmul inputs, and the cost of the alternative."""
    return (
        f"matmul inputs are rounded to {info.input_rounding}; --dequantize computes in {info.dtype}, and "
        "stores the weights in it"
    )


def _ranks(info: EngineInfo) -> str:
    """Return the number of ranks as text: `2`, `2 x 2 stages`, `4 on 2 hosts`, `1 x 2 replicas`."""
    stages = "" if info.pipeline_parallel_size == 1 else f" x {_plural(info.pipeline_parallel_size, 'stage')}"
    hosts = "" if info.nnodes == 1 else f" on {_plural(info.nnodes, 'host')}"
    replicas = "" if info.data_parallel_size == 1 else f" x {_plural(info.data_parallel_size, 'replica')}"
    return f"{info.tensor_parallel_size}{stages}{replicas}{hosts}"


def _kv_size(info: EngineInfo) -> str:
    """Return the size of KV memory as text: `64 blocks of 16 = 1024 tokens`."""
    blocks = info.num_blocks - 1
    return f"{blocks} blocks of {info.block_size} = {blocks * info.block_size} tokens{_each(info)}"


def _each(info: EngineInfo) -> str:
    return "" if info.data_parallel_size == 1 else f" on each of {info.data_parallel_size} replicas"


def _sequences(info: EngineInfo, context: int) -> int:
    """Return the number of sequences of `context` tokens that the memory of one replica holds at once."""
    found = [(info.num_blocks - 1) * info.block_size // context]
    for group in info.groups:
        if group.is_recurrent:
            found.append(min((group.num_blocks - 1) // 2, info.max_num_seqs))
        elif group.span is not None and len(info.groups) > 1:
            step = min(info.max_num_batched_tokens, info.max_model_len)
            blocks = min(-(-context // info.block_size), window_blocks(group.span, step, info.block_size))
            found.append((group.num_blocks - 1) // blocks)
    return min(found)


def _memory(info: EngineInfo, users: str, label: str, max_len: int) -> list[str]:
    """Return the lines about keys, values and recurrent state. `users`: the number that fits at the context `label`."""
    states = [group for group in info.groups if group.is_recurrent]
    if not info.kv_bytes_per_token_per_rank and not states:
        return [f"  texts    up to {max_len} tokens, each in one step, without KV memory"]
    lines = []
    if info.kv_bytes_per_token_per_rank:
        lines.append(f"  KV       {_kv_size(info)} = {users} at {label}, {_kv_form(info)}")
    if len(info.groups) > 1:
        windows = [group for group in info.groups if group.span is not None and not group.is_recurrent]
        lines += [f"  window   {group.num_blocks - 1} blocks for the latest {group.span} tokens" for group in windows]
    if states:
        size = format_size(sum(group.bytes_per_block for group in states))
        use = "two for each running request, the others for checkpoints"
        lines.append(f"  state    {states[0].num_blocks - 1} slots of {size}{_each(info)}: {use}")
    return lines


def _adapters(info: EngineInfo, names: Sequence[str]) -> str:
    """Return the loaded LoRA adapters and the slots for them as text."""
    shown = ", ".join(names[:_MAX_ADAPTERS]) or "none yet"
    more = f" and {len(names) - _MAX_ADAPTERS} more" if len(names) > _MAX_ADAPTERS else ""
    size = f"of {format_size(info.adapter_slot_bytes)} per rank{_each(info)}"
    return f"{shown}{more}; {_plural(info.max_loras, 'slot')} {size}, LoRA rank {info.max_lora_rank} at most"


def _kv_form(info: EngineInfo) -> str:
    """Return dtype and size of a token's keys and values on each rank, as text."""
    return f"{info.kv_cache_dtype}, {format_size(info.kv_bytes_per_token_per_rank)} per token"


def _curl(url: str, form: str, key: bool) -> str:
    """Return a command for a shell. `form`: `chat`, or the model's task."""
    auth = " -H 'Authorization: Bearer KEY'" if key else ""
    if url.startswith("unix:"):
        url = f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} http://localhost"
    path, body = _TRIALS[form]
    return f"curl -s {url}{path} -H 'Content-Type: application/json'{auth} -d '{json.dumps(body)}'"


def _plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _parameters(info: EngineInfo) -> str:
    active = "" if info.active_parameters is None else f", {_count(info.active_parameters)} active"
    return f"{_count(info.num_parameters)} parameters{active}"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
