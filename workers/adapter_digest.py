"""The files of a LoRA adapter, and the digest that identifies their content. Imports neither torch nor numpy, as checks
of a start use both.

An adapter is a directory with the two files that PEFT writes, a directory with one GGUF file, or the path of a GGUF
file. Clients may have written any of them.
"""

import os
from dataclasses import dataclass
from errno import EFBIG, EINVAL, ENOENT, ENOTDIR
from hashlib import blake2b
from pathlib import Path
from stat import S_ISREG

from oarlock.base.json_files import is_there
from oarlock.base.watched_reads import OnRead, ignore_progress

ADAPTER_DIGEST_BYTES = 16
SETTINGS_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # of PEFT
GGUF_SUFFIX = ".gguf"
_READ_BYTES = 1 << 20
# The largest file. A sparse file may claim any size, and every byte is read.
_MOST_BYTES = 256 << 30


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files that an adapter consists of, which may be missing or of another kind than regular files."""

    settings: Path | None  # None: a GGUF file has both
    weights: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files, in the order in which the digest reads them."""
        return (self.weights,) if self.settings is None else (self.settings, self.weights)


def adapter_files(path: str | Path) -> AdapterFiles:
    """Return the files of the adapter at `path`: a directory, or a GGUF file.

    A directory with `adapter_config.json` has PEFT's files, even if the weights are missing. Raises `OSError` with the
    reason as `strerror` if there is no adapter, or the directory cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        path.stat()  # raises if there is nothing
        if path.suffix != GGUF_SUFFIX:
            raise NotADirectoryError(ENOTDIR, "it is neither a directory nor a GGUF file", str(path))
        return AdapterFiles(None, path)
    if is_there(path / SETTINGS_FILE):
        return AdapterFiles(path / SETTINGS_FILE, path / WEIGHTS_FILE)
    found = [name for name in os.listdir(path) if name.endswith(GGUF_SUFFIX)]
    if len(found) != 1:
        reason = "several GGUF files" if found else f"neither {SETTINGS_FILE} nor a GGUF file"
        raise FileNotFoundError(ENOENT, f"the directory has {reason}", str(path))
    return AdapterFiles(None, path / found[0])


def adapter_digest(directory: str | Path, on_read: OnRead = ignore_progress) -> str:
    """Return the digest of the adapter in `directory`, or of a GGUF file: hexadecimal blake2b of the size and the
    content of its settings and of its weights.

    Reads every byte, so call it in a thread; `on_read` is called after each piece. Raises `OSError` if there is no
    adapter, or a file cannot be read or is too large.
    """
    found = blake2b(digest_size=ADAPTER_DIGEST_BYTES)
    for path in adapter_files(directory).paths:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            status = os.fstat(file.fileno())
            if not S_ISREG(status.st_mode):
                raise OSError(EINVAL, f"{path.name} is not a regular file", str(path))
            left = status.st_size
            if left > _MOST_BYTES:
                raise OSError(EFBIG, f"{path.name} has {left} bytes, more than any adapter", str(path))
            found.update(left.to_bytes(8, "little"))
            while data := file.read(min(left, _READ_BYTES)):
                found.update(data)
                left -= len(data)
                on_read()
    return found.hexdigest()
