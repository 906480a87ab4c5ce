"""Identity of a LoRA adapter: the digest of its settings and weights. Imports neither torch nor numpy, as checks of a
start use the digest."""

import os
from errno import EFBIG, EINVAL, ENOENT
from hashlib import blake2b
from pathlib import Path
from stat import S_ISREG

from oarlock.base.watched_reads import OnRead, ignore_progress

ADAPTER_DIGEST_BYTES = 16
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_READ_BYTES = 1 << 20
# The largest file. A sparse file may claim any size, and every byte is read.
_MOST_BYTES = 256 << 30


def adapter_digest(directory: str | Path, on_read: OnRead = ignore_progress) -> str:
    """Return the digest of the adapter in `directory`, or of a GGUF file: hexadecimal blake2b of the size and the
    content of its settings and of its weights.

    Reads every byte, so call it in a thread; `on_read` is called after each piece. Raises `OSError` if there is no
    adapter, or a file cannot be read or is too large.
    """
    folder, found = Path(directory), blake2b(digest_size=ADAPTER_DIGEST_BYTES)
    paths = [folder / name for name in _FILES]
    if folder.suffix == ".gguf" and not folder.is_dir():
        paths = [folder]
    elif not paths[0].exists():
        paths = sorted(folder.glob("*.gguf"))
        if len(paths) != 1:
            raise FileNotFoundError(ENOENT, f"neither {_FILES[0]} nor one GGUF file is there", str(folder))
    for path in paths:
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
