"""Check of a LoRA adapter's settings, for a download that has not fetched its weights yet. Torch-free.

A file of its own, because the server may import no other file about adapters.
"""

from pathlib import Path

from oarlock.workers.config import WorkerConfig
from oarlock.workers.lora.adapter_config import AdapterConfig, rank_too_high


def check_adapter_settings(directory: Path, config: WorkerConfig) -> None:
    """Raise `StartupError` if adapter_config.json in `directory` has a setting that is not served, or only ranks above
    the slots'. The tensors show which of several ranks are used."""
    settings = AdapterConfig.read(directory)
    ranks = (settings.rank, *settings.ranks)
    if min(ranks) > config.max_lora_rank:
        raise rank_too_high(str(directory), max(ranks), config.max_lora_rank)
