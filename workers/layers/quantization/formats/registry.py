"""The methods by which checkpoints are quantised, by the names in their settings. Torch-free.

A new one is a file beside this one, its reader in `readers/`, and one line here.
"""

from collections.abc import Callable

from oarlock.workers.layers.quantization.formats.awq import awq
from oarlock.workers.layers.quantization.formats.bitsandbytes import bitsandbytes
from oarlock.workers.layers.quantization.formats.compressed_tensors import compressed_tensors
from oarlock.workers.layers.quantization.formats.form import Scheme
from oarlock.workers.layers.quantization.formats.fp8 import fp8
from oarlock.workers.layers.quantization.formats.gptq import gptq
from oarlock.workers.layers.quantization.formats.settings import Settings

STORED: dict[str, Callable[[Settings], Scheme]] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gptq": gptq,
}
