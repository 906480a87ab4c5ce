"""Opens a checkpoint as a rank does, with a described family or with transformers' code."""

from functools import lru_cache
from pathlib import Path

import torch

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.models.registry import architectures, read_spec
from oarlock.workers.runner import decoder_loading
from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.inspection import look
from oarlock.workers.transformers_backend.observers import register
from tests.golden import paged_run

_CPU = torch.device("cpu")


class Refusal(Exception):
    """A code does not serve a class, for one reason."""

    def __init__(self, reason: str, *, has_no_page: bool = False) -> None:
        super().__init__(" ".join(reason.split()))
        self.has_no_page = has_no_page


def open_described(path: Path, tp: TensorParallel) -> RankModel:
    """Return the model of the family's page, with its weights."""
    name = read_config(path)["architectures"][0]
    if name not in architectures():
        raise Refusal("it has no page", has_no_page=True)
    try:
        read_spec(str(path))
        return paged_run.load_decoder(path, tp)
    except StartupError as error:
        raise Refusal(error.cause) from error


def open_transformers(path: Path, tp: TensorParallel) -> RankModel:
    """Return the class of transformers, with its weights."""
    description, fault = looked_at(path, tp.size)
    if description.refusal is not None or fault is not None:
        raise Refusal(description.refusal or str(fault))
    config = WorkerConfig(
        str(path),
        device="cpu",
        dtype="float32",
        tensor_parallel_size=tp.size,
        load_format="safetensors",
        served_class=description.encoded(),
    )
    described = decoder_loading.describe(config, _CPU, PipelineStage.solo())
    return decoder_loading.load_decoder(described, config, tp, _CPU, lambda share: None)


@lru_cache(maxsize=4)
def looked_at(path: Path, ranks: int) -> tuple[ClassDescription, str | None]:
    """Return the description of the class of a checkpoint for `ranks` ranks, and a fault of its tensors' names."""
    register()
    return look(path, ranks, trusts_code=False)
