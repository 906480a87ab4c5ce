"""An adapter in a directory: its pairs, found by the names of its tensors. Torch-free; only the digest reads tensors.

PEFT's files (`adapter_config.json`, `adapter_model.safetensors`) and llama.cpp's (one GGUF file) give the same result.
Both are untrusted.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.base.json_files import gc_paused, is_there
from oarlock.base.watched_reads import OnRead, ignore_progress
from oarlock.workers.adapter_digest import GGUF_SUFFIX, WEIGHTS_FILE, AdapterFiles, adapter_digest, adapter_files
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.lora.adapter_config import AdapterConfig
from oarlock.workers.lora.adapter_pair import AdapterPair
from oarlock.workers.lora.gguf_adapter import gguf_pairs
from oarlock.workers.lora.peft_tensors import peft_pairs
from oarlock.workers.model_files.checkpoint import read_header
from oarlock.workers.model_files.located import LocatedTensor

_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")
# Further embeddings of adapters that add tokens, which vLLM read once.
_MORE_TOKENS = ("new_embeddings.safetensors", "new_embeddings.bin")


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter of one model."""

    name: str
    directory: Path
    pairs: tuple[AdapterPair, ...]  # no module has several; they are in the order of the model's tensors
    num_bytes: int  # bytes of the stored tensors of all pairs
    on_read: OnRead = field(default=ignore_progress, compare=False)  # called after each piece that `digest` reads

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of settings and weights; adapters with the same digest compute the same.

        Its first use reads every byte, and the files may have changed since `open`: whoever loads the tensors compares
        `version_of` before `open` with `version_of` after the last read. Raises `StartupError`.
        """
        return digest_of(self.directory, self.on_read)

    @property
    def max_rank(self) -> int:
        return max(pair.rank for pair in self.pairs)

    @staticmethod
    def open(directory: Path, spec: DecoderSpec, name: str = "", on_read: OnRead = ignore_progress) -> "Adapter":
        """Read the adapter in `directory` for the model `spec`. `name`: as clients call it; empty: the directory's.
        `on_read` is called after each piece of a file.

        `directory` may also be the path of a GGUF file. Raise `StartupError` naming the file, and the setting or tensor
        at fault.
        """
        files = _files_of(directory)
        weights = files.weights
        if files.settings is None:
            pairs = gguf_pairs(weights, spec)
        else:
            config = AdapterConfig.read(directory)
            stored = {key: LocatedTensor(weights, entry) for key, entry in read_header(weights).items()}
            with gc_paused():  # not while a disk is awaited
                pairs = peft_pairs(weights, stored, config, spec)
        if not pairs:
            raise StartupError(f"{weights} adapts nothing of {spec.architecture}.", "Use an adapter of this model.")
        used = {half.located for pair in pairs for half in (pair.a, pair.b)}
        num_bytes = sum(one.entry.end - one.entry.begin for one in used)
        return Adapter(name or directory.name.removesuffix(GGUF_SUFFIX), directory, pairs, num_bytes, on_read)


def digest_of(directory: Path, on_read: OnRead = ignore_progress) -> str:
    """Return `adapter_digest`. Raise `StartupError` if a file cannot be read."""
    try:
        return adapter_digest(directory, on_read)
    except OSError as error:
        raise StartupError(
            f"{error.filename or directory} cannot be read: {error.strerror or error}.",
            "Check the path and its permissions.",
        ) from error


def version_of(directory: Path) -> tuple[tuple[int, ...], ...]:
    """Return numbers that change if a file of the adapter in `directory` is written or replaced. Raise `OSError`."""
    found = [path.stat() for path in adapter_files(directory).paths]
    return tuple((one.st_dev, one.st_ino, one.st_size, one.st_ctime_ns) for one in found)


def _files_of(directory: Path) -> AdapterFiles:
    """Return the files of the adapter in `directory`. Raise `StartupError` if they are none that may be read."""
    try:
        files = adapter_files(directory)
    except OSError as error:
        raise StartupError(
            f"{directory} cannot be read: {error.strerror or error}.",
            "Name a directory that PEFT's save_pretrained wrote for a LoRA adapter, or a GGUF file.",
        ) from None
    if files.settings is None:
        return files
    for name in _MORE_TOKENS:
        if is_there(directory / name):
            raise StartupError(
                f"{directory / name} adds tokens to the vocabulary, which is not supported.",
                "Use an adapter for the model's own vocabulary.",
            )
    if is_there(files.weights):
        return files
    pickled = next((directory / name for name in _PICKLES if is_there(directory / name)), None)
    if pickled is not None:
        raise StartupError(
            f"{pickled} is a pickle, which can run code and is never read.",
            f"Load the adapter with PEFT and save it with save_pretrained, which writes {WEIGHTS_FILE}.",
        )
    raise StartupError(
        f"{directory} has settings, but no {WEIGHTS_FILE}, so it is no adapter.",
        "Name a directory that PEFT's save_pretrained wrote for a LoRA adapter.",
    )
