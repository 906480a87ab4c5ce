"""Fingerprints of everything that decides a number: the checkpoint, versions of libraries, and the configuration.

A recording carries the parts, answers carry one digest of them all. Reads config.json, the headers of the weight files,
which name every tensor and its place, and samples of their data; not all of it, which would take as long as loading.
Torch-free.
"""

import hashlib
import json
import platform
from dataclasses import fields
from importlib import metadata
from pathlib import Path

from workers.config import WorkerConfig, WorkerInfo
from workers.protocol import StepMetadata, StepOutput

_MAX_HEADER_BYTES = 100_000_000  # the loader's limit; a larger value means a damaged file
_GGUF_BEGINNING = 1 << 16  # bytes, instead of a header of unknown length: config.json is made from that
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_PACKAGES = ("oarlock", "torch", "numpy", "safetensors", "transformers")


def model_sums(directory: Path) -> dict[str, str]:
    """File name -> SHA-256 of config.json, and of each weight file's size, header and a few samples of its data.

    Without samples, two trainings of one model would look the same.
    """
    sums = {}
    config = directory / "config.json"
    if config.is_file():
        sums[config.name] = hashlib.sha256(config.read_bytes()).hexdigest()
    for path in sorted((*directory.glob("*.safetensors"), *directory.glob("*.gguf"))):
        with path.open("rb") as file:
            length = file.read(8)
            begin = _GGUF_BEGINNING if path.suffix == ".gguf" else int.from_bytes(length, "little")
            header = file.read(min(begin, _MAX_HEADER_BYTES))
            size = path.stat().st_size
            found = hashlib.sha256(b"%d:" % size + length + header)
            for number in range(_SAMPLES):
                file.seek(_sample_at(8 + len(header), size, number))
                found.update(file.read(_SAMPLE_BYTES))
        sums[path.name] = found.hexdigest()
    return sums


def _sample_at(begin: int, end: int, number: int) -> int:
    """Where sample `number` of a file's data begins: samples are spread evenly over the data."""
    room = max(0, end - begin - _SAMPLE_BYTES)
    return begin + room * number // (_SAMPLES - 1)


def numbers_digest(worker: WorkerConfig, info: WorkerInfo) -> str:
    """SHA-256 of everything below text that decides a number: the same at every start with the same inputs."""
    weights = f"dummy {worker.seed}" if worker.load_format == "dummy" else "stored"
    names = ("dtype", "quantization", "kv_cache_dtype", "num_threads", "block_size", "max_model_len")
    run = {name: getattr(worker, name) for name in names}
    found = {name: getattr(info, name) for name in ("tensor_parallel_size", "device", "attention_backend", "kernels")}
    if info.rank_invariant:  # neither changes a bit
        del found["tensor_parallel_size"], run["num_threads"]
    parts = [model_sums(Path(worker.model_path)), weights, run, found, versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def layout() -> str:
    """Hash of the field names of a packed step and its answer: changes when the ranks' protocol does."""
    names = [field.name for kind in (StepMetadata, StepOutput) for field in fields(kind)]
    return hashlib.sha256(",".join(names).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of the software that decides a number."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a checkout that was not installed
            found[name] = "unknown"
    return found
