"""Checks of the processor and of the C++ kernels for it. Compiles nothing."""

import platform
import subprocess
from pathlib import Path

from oarlock.workers.doctor.finding import ERROR, NOTE, WARNING, Finding
from oarlock.workers.errors import StartupError
from oarlock.workers.kernels.cpu import build
from oarlock.workers.kernels.cpu.build import KernelsUnavailable
from oarlock.workers.platform import processor


def level() -> Finding:
    """The level of instruction set that is used, and the better ones that this processor lacks."""
    try:
        chosen = build.chosen()
    except StartupError as error:
        return Finding("CPU level", error.cause, ERROR, error.fix)
    if chosen is None:
        text = f"{platform.machine()} has none of the levels that there are kernels for: torch's operations serve"
        fix = "Use a processor with AVX2, AVX-512 or NEON, or a GPU."
        return Finding("CPU level", text, WARNING, fix)
    lacking = [
        f"{better.name} ({', '.join(sorted(better.needs - processor.features())) or 'not allowed by the system'})"
        for better in build.LEVELS[: build.LEVELS.index(chosen)]
        if better.machine == chosen.machine
    ]
    used = ", ".join(dict.fromkeys(filter(None, (chosen.vectors, chosen.bfloat16, chosen.tiles))))
    text = f"{chosen.name}: {used}" + (f"; not {', '.join(lacking)}" if lacking else "")
    if chosen not in build.available()[:1]:
        best = build.available()[0].name
        text = f"{chosen.name}: {used}; {build.ENVIRONMENT} names it, and this processor has {best}"
        return Finding("CPU level", text, WARNING, f"Unset {build.ENVIRONMENT}.", {"level": chosen.name})
    return Finding("CPU level", text, facts={"level": chosen.name, "lacking": lacking})


def number_types() -> Finding:
    """Reports the 16-bit types that the processor multiplies: others are widened to float32 as they are read."""
    cpu = processor.here()
    native = [name for name in ("bfloat16", "float16") if cpu.multiplies(name)]
    if native:
        return Finding("16-bit types", f"{' and '.join(native)} in hardware", facts={"native": native})
    text = f"{cpu.name}: 16-bit weights are widened as they are read, and products are float32's"
    return Finding("16-bit types", text, NOTE, facts={"native": native})


def compiler() -> Finding:
    """The C++ compiler, and whether the kernels are there already."""
    chosen = build.chosen()
    if chosen is None:
        return Finding("kernels", "none for this processor", NOTE)
    reason = build.why_not_obtainable(chosen)
    if reason is not None:
        fix = "Install g++ (apt install g++), or a wheel of `make wheel`, which has them."
        return Finding("kernels", f"{reason}; torch's operations serve, which are slower", WARNING, fix)
    if build.prebuilt(chosen).exists():
        return Finding("kernels", "came with the installation", facts={"ready": True})
    found = build.compiler()
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[
        0
    ]
    ready = [name for name in ("bfloat16", "float16", "float32") if _is_compiled(build.of_one_type(chosen, name))]
    if build.existing(chosen) is not None:
        ready = ["all types"]
    done = f"compiled for {', '.join(ready)}" if ready else "to be compiled by the first start: about a minute"
    facts = {"compiler": found, "version": version, "ready": bool(ready)}
    return Finding("kernels", f"{done}; compiler {version or found}", facts=facts)


def _is_compiled(level: build.Level) -> bool:
    return build.existing(level) is not None


def cache() -> Path | None:
    """Directory of compiled kernels; None where none can be."""
    try:
        return build.cache_directory()
    except KernelsUnavailable:
        return None
