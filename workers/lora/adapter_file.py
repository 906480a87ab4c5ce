"""An adapter in a directory: its pairs, found by the names of its tensors. Torch-free; reads tensors only to digest.

PEFT's files (`adapter_config.json`, `adapter_model.safetensors`) and llama.cpp's (one GGUF file) give the same result.
Both are untrusted.
"""

from dataclasses import dataclass
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.base.json_files import gc_paused
from oarlock.base.watched_reads import OnRead, ignore_progress
from oarlock.workers.adapter_digest import adapter_digest
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.lora.adapter_config import CONFIG_FILE, AdapterConfig
from oarlock.workers.lora.adapter_pair import AdapterPair
from oarlock.workers.lora.gguf_adapter import gguf_pairs
from oarlock.workers.lora.peft_tensors import peft_pairs
from oarlock.workers.model_files.checkpoint import read_header
from oarlock.workers.model_files.located import LocatedTensor

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")
# Further embeddings of adapters that add tokens, which vLLM read once.
_MORE_TOKENS = ("new_embeddings.safetensors", "new_embeddings.bin")
_GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter of one model."""

    name: str
    directory: Path
    digest: str  # hexadecimal, of its settings and weights: adapters with the same digest compute the same
    pairs: tuple[AdapterPair, ...]  # no module has several; they are in the order of the model's tensors
    num_bytes: int  # bytes of the stored tensors of all pairs

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
        weights = _weights(directory)
        if weights.suffix == _GGUF:
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
        digest = digest_of(directory, on_read)
        return Adapter(name or directory.name.removesuffix(_GGUF), directory, digest, pairs, num_bytes)


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
    paths = sorted(directory.iterdir()) if directory.is_dir() else [directory]
    found = [path.stat() for path in paths if path.suffix in (_GGUF, ".safetensors") or path.name == CONFIG_FILE]
    return tuple((one.st_dev, one.st_ino, one.st_size, one.st_ctime_ns) for one in found)


def _weights(directory: Path) -> Path:
    """Return the file with the tensors. Raise `StartupError` if there is none that may be read."""
    if directory.suffix == _GGUF and not directory.is_dir():
        return directory
    try:
        names = {entry.name for entry in directory.iterdir()}
    except OSError as error:
        raise StartupError(
            f"{directory} cannot be read: {error.strerror or error}.", "Name the directory of an adapter."
        ) from None
    for name in _MORE_TOKENS:
        if name in names:
            raise StartupError(
                f"{directory / name} adds tokens to the vocabulary, which is not supported.",
                "Use an adapter for the model's own vocabulary.",
            )
    if WEIGHTS_FILE in names:
        return directory / WEIGHTS_FILE
    files = sorted(name for name in names if name.endswith(_GGUF))
    if len(files) == 1 and CONFIG_FILE not in names:
        return directory / files[0]
    if len(files) > 1:
        raise StartupError(f"{directory} has several GGUF files, such as {files[0]} and {files[1]}.", "Name a file.")
    pickled = next((name for name in _PICKLES if name in names), None)
    if pickled is not None:
        raise StartupError(
            f"{directory / pickled} is a pickle, which can run code and is never read.",
            f"Load the adapter with PEFT and save it with save_pretrained, which writes {WEIGHTS_FILE}.",
        )
    raise StartupError(
        f"{directory} has neither {WEIGHTS_FILE} nor a GGUF file, so it is no adapter.",
        "Name a directory that PEFT's save_pretrained wrote for a LoRA adapter.",
    )
