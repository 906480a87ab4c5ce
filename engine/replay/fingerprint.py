"""Fingerprint of everything that decides a number: the checkpoint, versions of libraries, and the configuration.

A recording carries the parts, answers carry this digest of them all. Torch-free.
"""

import hashlib
import json
from pathlib import Path

from oarlock.workers.config import WorkerConfig, WorkerInfo
from oarlock.workers.fingerprint import model_sums, versions


def numbers_digest(worker: WorkerConfig, info: WorkerInfo) -> str:
    """SHA-256 of everything below text that decides a number: the same at every start with the same inputs."""
    weights = f"dummy {worker.seed}" if worker.load_format == "dummy" else "stored"
    names = ("dtype", "quantization", "dequantize", "kv_cache_dtype", "num_threads", "block_size", "max_model_len")
    run = {name: getattr(worker, name) for name in names}
    found = {name: getattr(info, name) for name in ("tensor_parallel_size", "device", "attention_backend", "kernels")}
    if info.rank_invariant:  # neither changes a bit
        del found["tensor_parallel_size"], run["num_threads"]
    parts = [model_sums(Path(worker.model_path)), weights, run, found, versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
