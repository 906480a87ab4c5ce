"""The model of a plan, its layouts on a machine, their speed, and changes that would make it fit.

Needs only the description of the model; the headers of its weights are read if they are on this machine.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.base.paths import hub_cache
from oarlock.engine.simulated_ranks import Roofline, Speed, decode_tokens_per_s, prompt_tokens_per_s
from oarlock.server.cli.plan.machine import Machine
from oarlock.server.config.settings import Settings
from oarlock.server.hub.local_model import find_local
from oarlock.server.hub.model_path import resolve
from oarlock.workers.capacity import (
    Capacity,
    capacity,
    cpu_ops,
    divides,
    smaller_slots,
    tensor_parallel_sizes,
    work_of,
)
from oarlock.workers.preflight import OpenModel, open_model

CONTEXTS = (4096, 32_768)  # tokens of one user
_PROMPT = 1024  # tokens of a prompt for which rates are given
_MORE_GPUS = 32  # maximum number of devices that is tried
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
_EXIT_CODE = 2


def find_model(settings: Settings, adapters: tuple[tuple[str, str], ...] = ()) -> tuple[OpenModel, bool]:
    """Return the model, and whether its weights are here. `adapters`: names and paths. Raises `StartupError`."""
    directory = _directory(settings)
    has_weights = any(any(directory.glob(pattern)) for pattern in _WEIGHTS)
    worker = settings.engine_config(str(directory)).worker.with_(lora_adapters=adapters)
    return open_model(worker if has_weights else worker.with_(load_format="dummy")), has_weights


def has_vectors(settings: Settings, model: OpenModel) -> bool:
    """Return whether the model is served for embeddings or scores. Raises `StartupError`."""
    from oarlock.server.llm.pooler_config import PoolerConfig

    try:
        found = PoolerConfig.load(model.config.model_path, settings.runner, settings.classifier_from_token)
    except StartupError as error:
        raise StartupError(error.cause, error.fix, _EXIT_CODE) from None
    return not found.generates


def _directory(settings: Settings) -> Path:
    """Return the directory of this machine's copy. Without one, only the description of a model on the hub is
    fetched."""
    model, is_local = settings.model, True
    try:
        is_local = model is None or find_local(model, settings.download_dir) is not None
        return Path(asyncio.run(resolve(replace(settings, offline=True), lambda *progress: None)))
    except StartupError as error:
        is_offline = settings.offline or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        if model is None or is_offline or is_local:
            raise StartupError(error.cause, error.fix, _EXIT_CODE) from None
    return _fetched(settings, model)


def _fetched(settings: Settings, model: str) -> Path:
    from huggingface_hub.errors import HFValidationError, HTTPError

    from oarlock.server.hub.fetch import explain
    from oarlock.server.hub.files import Download, Snapshot, is_code, look_up
    from oarlock.workers.preflight import DESCRIPTIONS

    revision = settings.revision or "main"
    cache = hub_cache(settings.download_dir)
    try:
        commit, files = look_up(model, revision)
        snapshot = Snapshot(cache, model, commit)
        described = [
            file for file in files if file.name in DESCRIPTIONS or (settings.trust_remote_code and is_code(file))
        ]
        Download(model, snapshot, lambda *progress: None).fetch(described)
    except HFValidationError as error:
        raise StartupError(f"{model} is no hub id ({error}).", "Name a directory or a hub id.", _EXIT_CODE) from None
    except (HTTPError, OSError) as error:
        failure = explain(error, model, revision, cache)
        raise StartupError(failure.cause, failure.fix, _EXIT_CODE) from None
    if not (snapshot.directory / "config.json").exists():
        raise StartupError(f"{model} has no config.json.", "Name a model in the transformers format.", _EXIT_CODE)
    return snapshot.directory


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout of a model on a machine: replicas of pipeline stages of tensor-parallel ranks."""

    capacity: Capacity
    time: Roofline | None  # None: the speed of the machine is not known

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Parallel sizes: TP, PP, DP."""
        config = self.capacity.config
        return config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size

    @property
    def fits(self) -> bool:
        return self.capacity.refusal is None

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit in the KV memory of all replicas."""
        return self.capacity.kv_tokens * self.sizes[2]

    def users(self, context: int) -> int:
        """Return the number of users with `context` tokens each that the KV memory of all replicas holds."""
        return self.capacity.users(context) * self.sizes[2]

    def at_once(self, context: int) -> int:
        """Return the number of users that run at once on one replica, within KV memory and `--max-num-seqs`."""
        return min(self.capacity.users(context), self.capacity.config.max_num_seqs)

    def tokens_per_s(self, users: int, context: int) -> float | None:
        """Return the tokens per second that one replica generates for `users` together, with `context` tokens each."""
        return None if self.time is None or not users else decode_tokens_per_s(self.time, users, context)

    @property
    def user_context(self) -> int:
        """Tokens of context of the users that speeds are given for."""
        assert self.capacity.config.max_model_len is not None
        return min(CONTEXTS[0], self.capacity.config.max_model_len)

    @property
    def one_user(self) -> float | None:
        return self.tokens_per_s(1, min(_PROMPT, self.user_context)) if self.fits else None

    @property
    def all_users(self) -> float | None:
        each = self.tokens_per_s(self.at_once(self.user_context), self.user_context) if self.fits else None
        return None if each is None else each * self.sizes[2]

    @property
    def prompts(self) -> float | None:
        """Prompt tokens per second of all replicas."""
        return None if self.time is None or not self.fits else prompt_tokens_per_s(self.time, _PROMPT) * self.sizes[2]


def layouts(model: OpenModel, machine: Machine, given: Mapping[str, int]) -> list[Layout]:
    """Return the layouts that use all devices, or that have the `given` sizes, the best first. Raises `StartupError` if
    a given size does not divide the model."""
    found = []
    for tp, pp, dp in _sizes(model, machine, given):
        found.append(layout(model, machine, dict(zip(SIZES, (tp, pp, dp), strict=True))))
    return sorted(found, key=_worth, reverse=True)


SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def layout(model: OpenModel, machine: Machine, changes: Mapping[str, Any]) -> Layout:
    """Return the layout of the model with `changes`. Raises `StartupError`."""
    held = capacity(model, changes, machine.memory)
    return Layout(held, _time(model, machine, held))


def _sizes(model: OpenModel, machine: Machine, given: Mapping[str, int]) -> list[tuple[int, int, int]]:
    if machine.memory.device == "cpu" or all(name in given for name in SIZES):
        return [(given.get(SIZES[0], 1), given.get(SIZES[1], 1), given.get(SIZES[2], 1))]
    dividing = tensor_parallel_sizes(model, machine.count)
    found = []
    for tp in [given[SIZES[0]]] if SIZES[0] in given else dividing:
        stages = range(1, min(machine.count, model.spec.num_layers) + 1)
        for pp in [given[SIZES[1]]] if SIZES[1] in given else [pp for pp in stages if divides(model, tp, pp)]:
            dp = given.get(SIZES[2], machine.count // (tp * pp))
            if tp * pp * dp == machine.count or (given and dp and tp * pp * dp <= machine.count):
                found.append((tp, pp, dp))
    if found:
        return found
    # No layout uses all devices: take the largest tensor-parallel size.
    most = max((size for size in dividing if size <= machine.count), default=1)
    return [(given.get(SIZES[0], most), given.get(SIZES[1], 1), given.get(SIZES[2], 1))]


def _worth(one: Layout) -> tuple[Any, ...]:
    tp, pp, dp = one.sizes
    return one.fits, -one.capacity.missing_bytes, one.all_users or 0.0, dp, -pp, one.capacity.kv_tokens, -tp


def _time(model: OpenModel, machine: Machine, held: Capacity) -> Roofline | None:
    if machine.bandwidth is None:
        return None
    ops = machine.ops or (cpu_ops(held.config) if machine.memory.device == "cpu" else float("inf"))
    speed = Speed.reached(machine.memory.device, machine.bandwidth, ops, machine.link, machine.sum_s)
    config = held.config
    return Roofline(work_of(model, config), config.tensor_parallel_size, speed, config.data_parallel_size)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change that makes the model fit: a flag, or more devices."""

    text: str
    kv_tokens: int


def remedies(model: OpenModel, machine: Machine, nearest: Layout) -> list[Remedy]:
    """Return single changes that make the model fit, each checked by the same arithmetic."""
    sizes = dict(zip(SIZES, nearest.sizes, strict=True))
    changes: list[tuple[str, dict[str, Any]]] = []
    if model.config.quantization == "none":
        changes += [(f"--quantization {form}", {"quantization": form}) for form in ("int8", "int4")]
    if not nearest.capacity.groups.is_rounded:
        changes += [(f"--kv-cache-dtype {form}", {"kv_cache_dtype": form}) for form in ("fp8", "int8")]
    fewer = smaller_slots(model, nearest.capacity.config)
    if fewer is not None:
        changes.append((f"--lora-target-modules {' '.join(fewer.targets)}", {"lora_target_modules": fewer.targets}))
    found = []
    if machine.memory.device == "cpu" and model.config.kv_cache_bytes is None:
        changes.append(
            (
                f"--kv-cache-memory {nearest.capacity.least_kv_mib}MiB",
                {"kv_cache_bytes": nearest.capacity.least_kv_mib << 20},
            )
        )
    for text, change in changes:
        tried = _tried(model, machine, sizes | change)
        if tried is not None:
            found.append(Remedy(text, tried.kv_tokens))
    found += [one for one in (_fewer_slots(model, machine, sizes), _shorter(model, machine, sizes, nearest)) if one]
    return found + _more_devices(model, machine)


def _tried(model: OpenModel, machine: Machine, changes: dict[str, Any]) -> Layout | None:
    form = changes.get("quantization")
    if form is not None:
        model = open_model(model.config.with_(quantization=form))
    try:
        tried = layout(model, machine, changes)
    except StartupError:
        return None
    return tried if tried.fits else None


def _fewer_slots(model: OpenModel, machine: Machine, sizes: dict[str, int]) -> Remedy | None:
    """Return the most slots for adapters that fit, of the half, a quarter and so on."""
    slots = model.config.max_loras // 2
    while slots:
        tried = _tried(model, machine, {**sizes, "max_loras": slots})
        if tried is not None:
            return Remedy(f"--max-loras {slots}", tried.kv_tokens)
        slots //= 2
    return None


def _shorter(model: OpenModel, machine: Machine, sizes: dict[str, int], nearest: Layout) -> Remedy | None:
    """Return the longest context, a power of two, that fits."""
    length = nearest.capacity.config.max_model_len
    assert length is not None
    length = 1 << (length - 1).bit_length() - 1
    while length >= 512:
        tried = _tried(model, machine, {**sizes, "max_model_len": length})
        if tried is not None:
            return Remedy(f"--max-model-len {length}", tried.kv_tokens)
        length //= 2
    return None


def _more_devices(model: OpenModel, machine: Machine) -> list[Remedy]:
    """Return the smallest number of GPUs of the same kind that holds the model."""
    if machine.memory.device == "cpu":
        return []
    for size in tensor_parallel_sizes(model, _MORE_GPUS):
        if size > machine.count:
            tried = _tried(model, machine, dict(zip(SIZES, (size, 1, 1), strict=True)))
            if tried is not None:
                return [Remedy(f"{size} GPUs of this kind (--tensor-parallel-size {size})", tried.kv_tokens)]
    return []
