"""GPUs by name: memory, bandwidth and arithmetic as their data sheets say, and what `--gpus` means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oarlock.server.cli.arguments import UsageError
from oarlock.server.config.options import nearest, parse_size

_FIX = "Write a number and a name or a size, such as --gpus 2xH100 or --gpus 2x24GB"
_MOST = 64
_NVLINK_SUM_S, _PCIE_SUM_S = 12e-6, 25e-6  # of next to nothing, over a few devices


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. Sizes in bytes, speeds per second; None: not known."""

    name: str
    memory: int  # as the driver shows it
    bandwidth: float | None
    ops: float | None  # of dense 16-bit products
    link: float  # to one other device, in one direction

    @property
    def sum_s(self) -> float:
        return _NVLINK_SUM_S if self.link > _PCIE else _PCIE_SUM_S


_PCIE = 25e9  # bytes: 16 lanes of generation 4


def _gpu(name: str, memory_mib: int, gb_per_s: float, tflops: float, link_gb_per_s: float = 25) -> Gpu:
    return Gpu(name, memory_mib << 20, gb_per_s * 1e9, tflops * 1e12, link_gb_per_s * 1e9)


# Memory in MiB, GB/s, TFLOP/s of dense bfloat16 (float16 where there is none), GB/s to another device.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 183_359, 8000, 2250, 900),
        _gpu("H200", 143_771, 4800, 989, 450),
        _gpu("GH200", 97_871, 4000, 989, 450),
        _gpu("H100", 81_559, 3350, 989, 450),
        _gpu("H100-PCIe", 81_559, 2000, 756),
        _gpu("H100-NVL", 95_830, 3938, 835, 300),
        _gpu("A100-80GB", 81_920, 2039, 312, 300),
        _gpu("A100-40GB", 40_960, 1555, 312, 300),
        _gpu("A100-PCIe-80GB", 81_920, 1935, 312),
        _gpu("L40S", 46_068, 864, 362),
        _gpu("L40", 46_068, 864, 181),
        _gpu("L4", 23_034, 300, 121),
        _gpu("A40", 46_068, 696, 150),
        _gpu("A30", 24_576, 933, 165),
        _gpu("A10", 23_028, 600, 125),
        _gpu("A10G", 23_028, 600, 70),
        _gpu("T4", 15_360, 320, 65),
        _gpu("V100-16GB", 16_384, 900, 125, 150),
        _gpu("V100-32GB", 32_768, 900, 125, 150),
        _gpu("RTX-PRO-6000", 97_887, 1792, 500, 50),
        _gpu("RTX-6000-Ada", 49_140, 960, 364),
        _gpu("A6000", 49_140, 768, 155, 56),
        _gpu("5090", 32_607, 1792, 210, 50),
        _gpu("5080", 16_303, 960, 113, 50),
        _gpu("4090", 24_564, 1008, 165),
        _gpu("4080", 16_376, 717, 97),
        _gpu("3090", 24_576, 936, 71),
        _gpu("3080", 10_240, 760, 60),
    )
}
_SPOKEN = {"a100": "A100-80GB", "h100-sxm": "H100", "v100": "V100-16GB", "a100-sxm-80gb": "A100-80GB"}


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """Parse `2xH100`, `4090` or `2x24GB`: the number of GPUs, and their kind. Raises `UsageError`."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?(\S.*?)\s*", text)
    if match is None:
        raise UsageError("--gpus is empty.", f"{_FIX}.")
    count, kind = int(match[1] or 1), match[2]
    if not 1 <= count <= _MOST:
        raise UsageError(f"--gpus {text}: {count} is not a number of GPUs from 1 to {_MOST}.", f"{_FIX}.")
    if re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B", kind, re.IGNORECASE):
        return count, Gpu(kind, parse_size(kind), None, None, _PCIE)
    found = _named(kind)
    if found is None:
        near = nearest(_plain(kind), [_plain(name) for name in GPUS])
        hint = next((f" Did you mean {name}?" for name in GPUS if near and _plain(name) == near), "")
        raise UsageError(
            f"--gpus {text}: no GPU is known by the name {kind!r}.{hint}",
            f"{_FIX}, with --bandwidth for one that is not among {', '.join(GPUS)}.",
        )
    return count, found


def _named(kind: str) -> Gpu | None:
    plain = _plain(kind)
    for name, gpu in GPUS.items():
        if _plain(name) == plain:
            return gpu
    return next((GPUS[name] for spoken, name in _SPOKEN.items() if _plain(spoken) == plain), None)


def _plain(name: str) -> str:
    """Name of a GPU in lower case, without white space, dashes and the brand before it."""
    name = re.sub(r"[\s_-]", "", name.lower())
    return re.sub(r"^(nvidia|geforce|tesla)*(rtx(?=\d{4}$))?", "", name)
