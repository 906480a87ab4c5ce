"""Opens a checkpoint as a rank does, with a described family or with transformers' code."""

from functools import lru_cache
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.models.registry import architectures, read_spec
from oarlock.workers.transformers_backend.inspection import describe_class
from oarlock.workers.transformers_backend.observers import register
from oarlock.workers.transformers_backend.private_parts import AutoConfig
from tests.golden.paged_run import load_decoder


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
        return load_decoder(path, tp)
    except StartupError as error:
        raise Refusal(error.cause) from error


def open_transformers(path: Path, tp: TensorParallel) -> RankModel:
    """Return the class of transformers, with its weights."""
    reason = _refusal(path, tp.size)
    raise Refusal(reason or "transformers' code is not served yet")


@lru_cache(maxsize=4)
def _refusal(path: Path, ranks: int) -> str | None:
    register()
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return describe_class(config).refusal
