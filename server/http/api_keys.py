"""API keys from the command line, the environment and a file, compared in constant time.

Keys are kept hashed. Logs show only a key's label.
"""

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oarlock.base.errors import StartupError


@dataclass(frozen=True, slots=True)
class Key:
    """The label and the SHA-256 of one key."""

    label: str
    digest: bytes

    @property
    def salt(self) -> str:
        """Salt that keeps this client's prompts apart from other clients' prompts in the prefix cache."""
        return self.digest.hex()[:16]


class ApiKeys:
    """All API keys of one server."""

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        self._keys = [Key(label, hashlib.sha256(key.encode()).digest()) for label, key in keys]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def find(self, authorization: bytes) -> Key | None:
        """Return the key in an `Authorization` header, compared in constant time, or None."""
        scheme, _, given = authorization.partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        # no early exit, so the time is constant
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return matches[0] if matches and scheme.lower() == b"bearer" else None


def load_keys(given: Iterable[str], file: str | None) -> ApiKeys:
    """Return the keys in `given` and the keys in the file. Raises `StartupError`."""
    keys = [(f"key-{number}", key) for number, key in enumerate(given, 1)]
    if file is not None:
        keys += _read(Path(file), len(keys))
    return ApiKeys(keys)


def load_admin_key(given: str | None, others: ApiKeys) -> ApiKeys:
    """Return the admin key, or no key. Raises `StartupError` if it is also an API key."""
    if given is not None and others.find(b"Bearer " + given.encode()) is not None:
        raise StartupError("The admin key is also one of the API keys.", "Give --admin-api-key a key of its own.")
    return ApiKeys([] if given is None else [("admin", given)])


def _read(path: Path, already: int) -> list[tuple[str, str]]:
    """Return (label, key) for each line `KEY` or `LABEL KEY`; skip empty lines and lines that begin with #."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise StartupError(
            f"The file of API keys {path} cannot be read: {error.strerror}.", "Give --api-key-file a readable file."
        ) from None
    except UnicodeDecodeError:
        raise StartupError(f"The file of API keys {path} is not UTF-8 text.", "Write one key per line.") from None
    keys: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or line.lstrip().startswith("#"):
            continue
        if len(words) > 2:
            raise StartupError(
                f"Line {number} of {path} has {len(words)} words.", "Write one key per line, with a label before it."
            )
        keys.append((words[0] if len(words) == 2 else f"key-{already + len(keys) + 1}", words[-1]))
    if not keys:  # an empty file must not open the server to every client
        raise StartupError(f"The file of API keys {path} contains no key.", "Write one key per line.")
    return keys
