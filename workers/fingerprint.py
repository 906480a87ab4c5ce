"""Fingerprints of everything that decides results below text: checkpoint, software, layout of a step. Torch-free.

Reads config.json, the headers of the weight files, which list every tensor and its offset, and samples of their data.
Reading all data would take as long as loading.
"""

import hashlib
import json
import platform
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from oarlock.workers.config import WorkerConfig
from oarlock.workers.protocol import StepMetadata, StepOutput

_MAX_HEADER_BYTES = 100_000_000  # the loader's limit; a larger value means a damaged file
_GGUF_BEGINNING = 1 << 16  # bytes read instead of a header of unknown length, from which config.json is made
_SAMPLES, _SAMPLE_BYTES = 16, 4096
KV_FORMAT = 1  # format of the files of KV blocks; existing files are not found after it changes
_PACKAGES = ("oarlock", "torch", "numpy", "safetensors", "transformers")
_SOURCE_FOLDERS = ("base", "workers")
_SOURCES = (".py", ".c", ".cc", ".cpp", ".h", ".cu")
# Settings of one host: its paths, its resources, and its logs.
_OF_ONE_HOST = frozenset(
    {
        "model_path",
        "num_threads",
        "cpu_affinity",
        "log_level",
        "log_format",
        "kv_cache_bytes",
        "gpu_memory_utilization",
        "kv_offload_path",
        "kv_offload_disk_bytes",
    }
)


def model_sums(directory: Path) -> dict[str, str]:
    """Return file name -> SHA-256 of config.json, and of each weight file's size, header and a few samples of its data.

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


def code_sums(directory: Path) -> dict[str, str]:
    """Return file name -> SHA-256 of each Python file of a checkpoint whose own code computes the model."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.py"))}


def _sample_at(begin: int, end: int, number: int) -> int:
    """Return the offset of sample `number` in a file. Samples are spread evenly over its data."""
    room = max(0, end - begin - _SAMPLE_BYTES)
    return begin + room * number // (_SAMPLES - 1)


def layout() -> str:
    """Return a hash of the field names of a packed step and its output, which changes with the ranks' protocol."""
    names = [field.name for kind in (StepMetadata, StepOutput) for field in fields(kind)]
    return hashlib.sha256(",".join(names).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions of the software that influences results."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a checkout that was not installed
            found[name] = "unknown"
    return found


def sources() -> str:
    """Return a hash of the sources that ranks run, since two checkouts of one version can differ."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for folder in _SOURCE_FOLDERS:
        for path in sorted(path for path in (root / folder).rglob("*") if path.suffix in _SOURCES):
            found.update(f"{path.relative_to(root)}:{path.stat().st_size}:".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def kv_key(config: WorkerConfig, **facts: Any) -> str:
    """Return a hash of everything that decides a rank's KV memory for given tokens, and its layout. `config` is
    resolved; `facts`: further values that the rank knows.

    A weight file's modification time counts too, since samples of its data cannot show every change.
    """
    names = ("dtype", "quantization", "kv_cache_dtype", "block_size", "max_model_len", "num_threads", "load_format")
    directory = Path(config.model_path)
    sums = model_sums(directory)
    changed = {name: (directory / name).stat().st_mtime_ns for name in sums}
    parts = [
        KV_FORMAT,
        {name: getattr(config, name) for name in names},
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
        config.seed if config.load_format == "dummy" else changed,
        sums,
        config.served_class,
        code_sums(directory) if config.served_class is not None and config.trust_remote_code else {},
        versions(),
        sources(),
        facts,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def node_facts(config: WorkerConfig) -> dict[str, dict[str, Any]]:
    """Return facts that must be equal on every node before any node loads: group -> name -> value, causes before
    effects. Values are as JSON has them, in which other nodes send theirs.

    `config` is resolved. Dummy weights follow from the settings and config.json.
    """
    found = versions()
    weights = {name: digest[:16] for name, digest in model_sums(Path(config.model_path)).items()}
    if config.load_format == "dummy":
        weights = {name: digest for name, digest in weights.items() if name == "config.json"}
    settings = {name: value for name, value in asdict(config).items() if name not in _OF_ONE_HOST}
    return {
        "version of": {
            "oarlock": found["oarlock"],
            "torch": found["torch"],
            "the machine": found["machine"],
            "the layout of steps": layout(),
            "the sources in workers/ and base/": sources(),
        },
        "setting": json.loads(json.dumps(settings)),
        "weights in": weights,
    }
