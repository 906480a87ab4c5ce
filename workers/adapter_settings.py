"""Check of a LoRA adapter's settings, for a download that has not fetched its weights yet. Torch-free.

A file of its own, because the server may import no other file about adapters.
"""

from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.lora.adapter_config import AdapterConfig


def check_adapter_settings(directory: Path, config: WorkerConfig) -> None:
    """Raise `StartupError` if adapter_config.json in `directory` has a setting that is not served, or only ranks above
    the slots'. The tensors show which of several ranks are used."""
    settings = AdapterConfig.read(directory)
    ranks = (settings.rank, *settings.ranks)
    if min(ranks) > config.max_lora_rank:
        rank = max(ranks)
        raise StartupError(
            f"The adapter {directory} has rank {rank}, above --max-lora-rank {config.max_lora_rank}.",
            f"Start the server with --max-lora-rank {rank}.",
        )
