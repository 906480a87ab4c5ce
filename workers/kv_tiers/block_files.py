"""One file for each block: a header with the block's digest and a checksum, then the bytes of a slot.

A file appears under its name only when it is whole, so that processes may share a directory without locks. What is
read is checked: a file that is damaged, short or of another block is not taken.
"""

import contextlib
import os
import struct
import zlib
from itertools import count
from pathlib import Path

_MAGIC = b"OARLKV01"
_HEADER = struct.Struct("<8s32sQI12x")  # magic, digest, bytes of content, CRC-32 of all before it and of the content
HEADER_BYTES = _HEADER.size  # 64
_CHECKED = _HEADER.size - 16  # bytes of the header that the checksum covers
SUFFIX = ".kv"
WRITING = "tmp"  # the folder of files that are being written
_number = count()


class DamagedFileError(Exception):
    """The file with a block's name does not hold that block."""


def path_of(directory: Path, digest: bytes) -> str:
    name = digest.hex()
    return f"{directory}/{name[:2]}/{name}{SUFFIX}"


def write_block(directory: Path, digest: bytes, content: memoryview) -> int:
    """Write `content` as the file of `digest`; return the bytes of the file. Raises
    `OSError`, and then leaves nothing behind."""
    header = _header(digest, content)
    writing = f"{directory}/{WRITING}/{os.getpid()}-{next(_number)}"
    path = path_of(directory, digest)
    fd = os.open(writing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            _write_all(fd, header, content)
        finally:
            os.close(fd)
        try:
            os.rename(writing, path)
        except FileNotFoundError:  # the first of its folder
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            os.rename(writing, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(writing)
        raise
    return HEADER_BYTES + len(content)


def read_block(directory: Path, digest: bytes, into: memoryview) -> None:
    """Fill `into` with the content of the file of `digest`, which counts as used now.

    Raises `FileNotFoundError`, another `OSError`, or `DamagedFileError`; then `into` means nothing.
    """
    fd = os.open(path_of(directory, digest), os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = bytearray(HEADER_BYTES)
        wanted = HEADER_BYTES + len(into)
        size = os.fstat(fd).st_size
        if size != wanted:
            raise DamagedFileError(f"it has {size} bytes instead of {wanted}")
        found = os.preadv(fd, [header, into], 0)
        if found != wanted:
            raise DamagedFileError(f"only {found} of {wanted} bytes could be read")
        if bytes(header) != _header(digest, into):
            raise DamagedFileError("its checksum does not match")
        with contextlib.suppress(OSError):  # of another user's file, or a directory that cannot be written
            os.utime(fd)
    finally:
        os.close(fd)


def drop_from_cache(directory: Path, digest: bytes) -> None:
    """Make the next read of a block's file come from the disk."""
    fd = os.open(path_of(directory, digest), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _header(digest: bytes, content: memoryview) -> bytes:
    plain = _HEADER.pack(_MAGIC, digest, len(content), 0)
    checksum = zlib.crc32(content, zlib.crc32(plain[:_CHECKED]))
    return _HEADER.pack(_MAGIC, digest, len(content), checksum)


def _write_all(fd: int, header: bytes, content: memoryview) -> None:
    written = os.writev(fd, [header, content])
    while written < len(header) + len(content):  # signals and limits may cut a write short
        assert written >= len(header)
        written += os.write(fd, content[written - len(header) :])
