"""Checks of a start with LoRA adapters, before weights are read: limits, support, memory, and the adapters themselves.

Torch-free. Adapters that are loaded later are checked by the ranks as they read them.
"""

from collections import Counter
from functools import partial
from pathlib import Path

from oarlock.base.errors import EXIT_OUT_OF_MEMORY, StartupError, shown
from oarlock.base.host_memory import human_bytes
from oarlock.base.watched_reads import run_watched
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.target_modules import EXPERTS, check_adapter, resolved_targets, targets_of
from oarlock.workers.quantization.formats.weight_format import WeightFormats
from oarlock.workers.runner.memory_needs import adapter_slot_bytes, free_before_load, weight_bytes_of_node

_LARGE = 0.5  # share of a slot from which experts are worth leaving out


def check_adapter_limits(config: WorkerConfig) -> None:
    """Check the limits of adapters against each other. Raises `StartupError`."""
    for field in ("max_loras", "max_cpu_loras"):
        if (getattr(config, field) or 0) < 0:
            raise StartupError(f"{field} is {getattr(config, field)}.", "It must not be negative.")
    if not config.max_loras:
        if config.lora_adapters or config.lora_target_modules is not None:
            raise StartupError("Adapters are given, but max_loras is 0: none can be served.", "Use --enable-lora.")
        return
    if config.max_lora_rank < 1:
        raise StartupError(f"max_lora_rank is {config.max_lora_rank}.", "It must be at least 1.")
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise StartupError(
            f"max_cpu_loras {config.max_cpu_loras} is less than max_loras {config.max_loras}: host memory must hold "
            "every adapter that is in a slot.",
            "Raise --max-cpu-loras or lower --max-loras.",
        )
    for name, times in Counter(name for name, _ in config.lora_adapters).items():
        if times > 1:
            raise StartupError(f"{times} adapters have the name {shown(name)}.", "Give each adapter a name of its own.")


def with_target_modules(config: WorkerConfig, spec: DecoderSpec, device: str) -> WorkerConfig:
    """Return `config` with the modules that adapters may update on `device`: on CUDA all but experts.

    Raises `StartupError` for modules that the model does not have, and for experts on CUDA if they were chosen.
    """
    if not config.max_loras:
        return config
    given = config.lora_target_modules
    targets = targets_of(spec) if given is None else resolved_targets(given, spec)
    if device != "cuda" or EXPERTS not in targets:
        return config if given is None else config.with_(lora_target_modules=tuple(targets))
    left = tuple(target for target in targets if target != EXPERTS)
    if given is not None:
        instead = f"--lora-target-modules {' '.join(left)}" if left else "other modules"
        raise StartupError(
            f"--lora-target-modules {EXPERTS}: on CUDA devices no kernel updates experts.",
            f"Use {instead}, or --device cpu.",
        )
    return config.with_(lora_target_modules=left)


def with_slot_bytes(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats) -> WorkerConfig:
    """Return `config` with its target modules and the bytes of a slot. The device and the dtype must be resolved.

    Raises `StartupError`, as `with_target_modules`.
    """
    if not config.max_loras:
        return config
    config = with_target_modules(config, spec, config.device)
    stages = range(config.pipeline_parallel_size)
    return config.with_(adapter_slot_bytes=max(adapter_slot_bytes(config, spec, formats, stage) for stage in stages))


def check_adapters_fit(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats) -> None:
    """Check that slots and copies of adapters fit into the free memory of the host, on the CPU in addition to the
    weights. Raises `StartupError` (exit code 4) with the arithmetic."""
    if not config.max_loras:
        return
    ranks, slot, copies = config.ranks_on_host, config.adapter_slot_bytes, config.num_host_adapters
    on_host, weights, parts = copies, 0, [f"{copies} copies in host memory"]
    if config.device != "cuda":
        weights = config.data_parallel_size * weight_bytes_of_node(config, spec, config.dtype, formats)
        on_host, parts = copies + config.max_loras, [f"{config.max_loras} slot(s)", *parts]
    need, free = weights + ranks * on_host * slot, free_before_load(config)
    if need <= free:
        return
    of_ranks = "" if ranks == 1 else f" of {ranks} ranks"
    also = f" and {human_bytes(weights)} of weights" if weights else ""
    raise StartupError(
        f"Not enough memory for adapters: {' and '.join(parts)}{of_ranks}, each of up to {human_bytes(slot)} (rank "
        f"{config.max_lora_rank}),{also} take {human_bytes(need)}, and {human_bytes(free)} is free.",
        f"Lower --max-loras, --max-cpu-loras or --max-lora-rank{_smaller(config, spec, formats)}.",
        EXIT_OUT_OF_MEMORY,
    )


def _smaller(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats) -> str:
    found = without_experts(config, spec, formats)
    return "" if found is None else f", or use --lora-target-modules {' '.join(found.lora_target_modules or ())}"


def without_experts(config: WorkerConfig, spec: DecoderSpec, formats: WeightFormats) -> WorkerConfig | None:
    """Return `config` with slots that have no memory for experts; None if experts take little of a slot."""
    targets = config.lora_target_modules or targets_of(spec)
    left = tuple(target for target in targets if target != EXPERTS)
    if not config.max_loras or not left or len(left) == len(targets):
        return None
    fewer = with_slot_bytes(config.with_(lora_target_modules=left), spec, formats)
    return fewer if fewer.adapter_slot_bytes < (1 - _LARGE) * config.adapter_slot_bytes else None


def check_adapter_files(config: WorkerConfig, spec: DecoderSpec) -> None:
    """Check each adapter that is served from the start, by its settings and the header of its weights. Raises
    `StartupError` with its name."""
    adapters = []
    for name, directory in config.lora_adapters:
        try:
            opened = partial(Adapter.open, Path(directory), spec, name)
            adapters.append(run_watched(opened, directory))
        except StartupError as error:
            raise StartupError(f"adapter {shown(name)}: {error.cause}", error.fix) from error
    # The highest rank first, so that the error names a rank that suffices for all.
    for adapter in sorted(adapters, key=lambda one: -one.max_rank):
        check_adapter(adapter, spec, config.max_lora_rank, config.lora_target_modules, config.device)
