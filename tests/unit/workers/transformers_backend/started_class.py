"""Starts of tiny random classes that transformers' code computes, on ranks that are threads."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.model_classes.tiny import ModelClass, tiny_config, tiny_model
from oarlock.workers.attention.backend import AttentionBackend
from oarlock.workers.attention.torch_backend import TorchBackend
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.runner import decoder_loading
from oarlock.workers.runner.class_self_test import check_class
from oarlock.workers.runner.layer_memory import allocate_memory
from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.inspection import look
from oarlock.workers.transformers_backend.model import TransformersModel
from oarlock.workers.transformers_backend.observers import register
from tests.golden.paged_run import on_ranks

CPU = torch.device("cpu")
NUM_BLOCKS = 16

Plant = Callable[[TransformersModel], None]


def make_checkpoint(directory: Path, name: str, model_type: str, seed: int = 0, **settings: Any) -> Path:
    """Write a tiny checkpoint of the class `name`, whose attention is far from uniform."""
    one = ModelClass(name, model_type)
    config = tiny_config(one)
    for key, value in settings.items():
        setattr(config, key, value)
    path = directory / f"{model_type}-{len(list(directory.iterdir()))}"
    tiny_model(one, config, seed).save_pretrained(path)
    return path


@cache
def described(path: Path, ranks: int) -> ClassDescription:
    """Return what the look before the start finds."""
    register()
    description, fault = look(path, ranks, trusts_code=False)
    assert description.refusal is None and fault is None, (description.refusal, fault)
    return description


def start(
    path: Path, ranks: int = 1, dtype: str = "float32", plant: Plant = lambda model: None, **options: Any
) -> None:
    """Load the class on `ranks` ranks, change each rank's model by `plant`, and run the self-test."""
    config = WorkerConfig(
        str(path), device="cpu", dtype=dtype, tensor_parallel_size=ranks, load_format="safetensors",
        served_class=described(path, ranks).encoded(), max_model_len=128, block_size=16, **options,
    )  # fmt: skip

    one_by_one = Lock()  # transformers sets torch's default dtype for the whole process while it builds a model

    def work(tp: TensorParallel) -> None:
        description = decoder_loading.describe(config, CPU, PipelineStage.solo())
        with one_by_one:
            model = decoder_loading.load_decoder(description, config, tp, CPU, lambda share: None)
            assert isinstance(model, TransformersModel) and model.reference is not None
            model.reference.prepare(lambda: None)
        tp.all_reduce(torch.zeros(1))
        plant(model)
        specs = model.kv_specs(config.block_size, config.kv_cache_dtype)
        backends: dict[int, AttentionBackend] = {spec.group: TorchBackend(spec) for spec in specs}
        counts = [NUM_BLOCKS] * len(model.groups)
        memory = allocate_memory(model, backends, counts)
        check_class(model, model.reference, memory, backends, config, counts)

    on_ranks(ranks, work)
