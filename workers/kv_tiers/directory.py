"""The directory of files: oarlock-KEY/RANK/xx/DIGEST.kv. KEY is a hash of everything that decides a block's bytes.

Any number of processes may use it at once, for the same model and for others. Nothing is locked, except while one of
them makes room. A file appears under its name only when it is complete: a header with the block's digest and a
checksum, then the bytes of a slot. Files are checked when they are read, and rejected if they are damaged, too short or
of another block.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import struct
import time
import zlib
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from oarlock.base.errors import StartupError

_MAGIC = b"OARLKV01"
_HEADER = struct.Struct("<8s32sQI12x")  # magic, digest, bytes of content, CRC-32 of all before it and of the content
HEADER_BYTES = _HEADER.size  # 64
_CHECKED = _HEADER.size - 16  # bytes of the header that the checksum covers
SUFFIX = ".kv"
WRITING = "tmp"  # folder of files that are being written
_number = count()


class DamagedFileError(Exception):
    """The file with a block's name does not contain that block."""


def path_of(directory: Path, digest: bytes) -> str:
    name = digest.hex()
    return f"{directory}/{name[:2]}/{name}{SUFFIX}"


def write_block(directory: Path, digest: bytes, content: memoryview) -> int:
    """Write `content` as the file of `digest`; return the bytes of the file. Raises `OSError`, and then leaves nothing
    behind."""
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
        except FileNotFoundError:  # the first file of its folder
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            os.rename(writing, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(writing)
        raise
    return HEADER_BYTES + len(content)


def read_block(directory: Path, digest: bytes, into: memoryview) -> None:
    """Fill `into` with the content of the file of `digest`, and mark the file as used now.

    Raises `FileNotFoundError`, another `OSError`, or `DamagedFileError`; then the content of `into` is undefined.
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
        with contextlib.suppress(OSError):  # another user's file, or a read-only directory
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


logger = logging.getLogger("oarlock.kv_offload")

DEAD_S = 600.0  # if a file is still unfinished after this time, its process has ended
FULL_SHARE = 0.9  # fraction of the limit, down to which room is made
_LOCK = "oarlock.lock"
_PREFIX = "oarlock-"  # prefix of our folders; nothing else in the directory is touched
_HEX = "0123456789abcdef"


def check_directory(path: str) -> None:
    """Make the directory if it does not exist. Raises `StartupError` unless files can be created in it."""
    fix = "Give --kv-offload-path a directory that this user can write, on a disk with free space."
    directory = Path(path)
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        probe = directory / f"probe-{os.getpid()}"
        probe.write_bytes(b"0")
        probe.unlink()
    except OSError as error:
        raise StartupError(f"kv_offload_path {path} cannot be used: {error.strerror}.", fix) from None


def disk_limit(path: str, requested: int | None) -> int:
    """Return the bytes that all files may take: `requested`, or else half of the room for them."""
    return requested if requested is not None else room_on_disk(path) // 2


def room_on_disk(path: str) -> int:
    """Return the bytes that all files could take: free space, and the space that they take already."""
    return shutil.disk_usage(path).free + _usage(Path(path))


class Usage(NamedTuple):
    """Bytes and blocks in the directory, of all models and ranks."""

    num_bytes: int
    num_blocks: int


class BlockDirectory:
    """The files of one rank, and the room for all files."""

    def __init__(self, root: str, key: str, rank: int, max_bytes: int) -> None:
        """Make the folders. `max_bytes`: limit of all files below `root`. Raises `OSError`."""
        self.root, self.key, self.rank = Path(root), key, rank
        self.max_bytes = max_bytes
        self.path = self.root / f"{_PREFIX}{key}" / str(rank)
        self._listed: dict[str, tuple[int, set[str]]] = {}  # folder -> when it last changed, and the names in it
        self.make_folders()

    def make_folders(self) -> None:
        """Make the folders, with access only for this user. Does not recreate the root if it is gone. Raises
        `OSError`."""
        for path in (self.path.parent, self.path, self.path / WRITING):
            path.mkdir(mode=0o700, exist_ok=True)

    def remove(self, digest: bytes) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path_of(self.path, digest))

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the digests of this rank's files that appeared and that vanished since the last call."""
        appeared: list[bytes] = []
        vanished: list[bytes] = []
        for folder in (a + b for a in _HEX for b in _HEX):
            changed_ns, before = self._listed.get(folder, (0, set()))
            try:
                now_ns = os.stat(self.path / folder).st_mtime_ns
                now = before if now_ns == changed_ns else set(os.listdir(self.path / folder))
            except OSError:
                now_ns, now = 0, set()
            if now is not before:
                # A folder that changed just now may change again within the resolution of its clock.
                self._listed[folder] = (now_ns if time.time_ns() - now_ns > 2_000_000_000 else 0, now)
                appeared += _digests(now - before)
                vanished += _digests(before - now)
        return appeared, vanished

    def make_room(self) -> Usage:
        """Remove unfinished files of dead processes and, above the limit, the least recently used files of any model.
        Raises `OSError` if the directory cannot be read."""
        with self._alone() as is_alone:
            files = sorted(_files(self.root))
            total = sum(size for _, size, _ in files)
            if not is_alone or total <= self.max_bytes:
                return Usage(total, len(files))
            removed = 0
            for _, size, path in files:
                if total <= FULL_SHARE * self.max_bytes:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size
                removed += 1
            logger.info("event=kv_offload_evicted files=%d bytes_left=%d limit=%d", removed, total, self.max_bytes)
            return Usage(total, len(files) - removed)

    @contextlib.contextmanager
    def _alone(self) -> Generator[bool]:
        """Hold the lock for making room; yield False if another process has it. The kernel frees it when its holder
        ends."""
        fd = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)


def _usage(root: Path) -> int:
    return sum(size for _, size, _ in _files(root))


def _files(root: Path) -> Iterator[tuple[int, int, str]]:
    """Yield (time of last use in ns, bytes, path) of every block below `root`. Removes unfinished files of dead
    processes."""
    ours = (key for key in _folders(root) if key.name.startswith(_PREFIX))
    for rank in (rank for key in ours for rank in _folders(key.path)):
        for folder in _folders(rank.path):
            for entry in _entries(folder.path):
                with contextlib.suppress(FileNotFoundError):  # another process is making room
                    found = entry.stat(follow_symlinks=False)
                    if _digest_of(entry.name) is not None:
                        yield found.st_mtime_ns, found.st_size, entry.path
                    elif folder.name == WRITING and time.time() - found.st_mtime > DEAD_S:
                        os.unlink(entry.path)


def _folders(path: str | Path) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _entries(path) if entry.is_dir(follow_symlinks=False))


def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        return list(entries)
    return []


def _digests(names: set[str]) -> list[bytes]:
    return [digest for name in sorted(names) if (digest := _digest_of(name)) is not None]


def _digest_of(name: str) -> bytes | None:
    """Return the digest in a file's name; None if it is not the name of a block, so that the file is not ours."""
    digest = name.removesuffix(SUFFIX)
    is_ours = len(digest) == 64 and len(name) == 64 + len(SUFFIX) and not set(digest) - set(_HEX)
    return bytes.fromhex(digest) if is_ours else None
