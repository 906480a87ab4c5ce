"""The methods by which checkpoints are quantised, by the names in their settings. Torch-free.

A new one is a file beside this one, its reader in `readers/`, and one line here.
"""

from collections.abc import Callable

from oarlock.workers.quantization.formats.awq import awq
from oarlock.workers.quantization.formats.bitsandbytes import bitsandbytes
from oarlock.workers.quantization.formats.compressed_tensors import compressed_tensors
from oarlock.workers.quantization.formats.form import Scheme
from oarlock.workers.quantization.formats.fp8 import fp8
from oarlock.workers.quantization.formats.gptq import gptq
from oarlock.workers.quantization.formats.settings import Settings

STORED: dict[str, Callable[[Settings], Scheme]] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gptq": gptq,
}
