"""Chat templates as their authors publish them, taken from the source archive of `llama-cpp-python`.

    python -m tests.unit.server.llm.real_templates    fetches them into the cache and prints their names

Nothing of the archive is in this repository. pip's own index, proxy and certificate settings are used to find and
download it, without the build of its metadata that `pip download` would run. The user's cache keeps the templates.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from oarlock.base.paths import cache_home

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"  # of the source archive
NUM_TEMPLATES = 70
_FOLDER = "/vendor/llama.cpp/models/templates/"
_SUFFIX = ".jinja"
_UNREACHABLE = 3  # exit status
_TIMEOUT_S = 240
CACHE = cache_home() / "oarlock"
FILE = CACHE / f"chat-templates-{VERSION}-{SHA256[:12]}.json"


@cache
def real_templates() -> dict[str, str]:
    """Return the source of each template by its name, without the suffix; skip the test if no index can be reached."""
    if not FILE.is_file():
        command = [sys.executable, "-m", "tests.unit.server.llm.real_templates"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the package index did not deliver {PACKAGE} {VERSION} in {_TIMEOUT_S} s")
        if done.returncode == _UNREACHABLE:
            pytest.skip(done.stderr.strip().splitlines()[-1])
        assert done.returncode == 0, done.stderr
    found = json.loads(FILE.read_text("utf-8"))
    assert len(found) == NUM_TEMPLATES
    return found


class _UnreachableError(Exception):
    """The archive cannot be had; the text is one sentence."""


def _download(target: Path) -> None:
    """Write the source archive to `target`. Raises `_UnreachableError`."""
    # Imported here: pip changes settings of the whole process when it is imported.
    from pip._internal.commands.download import DownloadCommand
    from pip._internal.exceptions import NetworkConnectionError, PipError
    from pip._internal.models.link import Link
    from pip._vendor.requests import RequestException

    command = DownloadCommand("download", "")
    options, _ = command.parse_args(["--retries", "1", "--timeout", "30", "--no-binary", PACKAGE, PACKAGE])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        try:
            candidates = finder.find_all_candidates(PACKAGE)
            link: Link | None = next((each.link for each in candidates if str(each.version) == VERSION), None)
            if link is None:
                raise _UnreachableError(f"no package index that pip can reach offers the source of {PACKAGE} {VERSION}")
            digest = hashlib.sha256()
            with session.get(link.url_without_fragment, stream=True) as response, target.open("wb") as file:
                response.raise_for_status()
                for part in response.iter_content(1 << 20):
                    digest.update(part)
                    file.write(part)
        except (PipError, NetworkConnectionError, RequestException) as error:
            message = f"{PACKAGE} {VERSION} cannot be downloaded: {type(error).__name__}"
            raise _UnreachableError(message) from None
    if digest.hexdigest() != SHA256:
        raise SystemExit(f"{PACKAGE} {VERSION} has the sha256 {digest.hexdigest()}, and {SHA256} is expected")


def _unpack(archive: Path) -> dict[str, str]:
    """Return the templates in the archive, read as a stream."""
    found: dict[str, str] = {}
    with tarfile.open(archive, "r|gz") as members:
        for member in members:
            if _FOLDER in member.name and member.name.endswith(_SUFFIX):
                file = members.extractfile(member)
                assert file is not None
                found[member.name.rpartition("/")[2].removesuffix(_SUFFIX)] = file.read().decode("utf-8")
    return dict(sorted(found.items()))


def main() -> int:
    """Fetch the templates, if they are not in the cache, and print their names."""
    if not FILE.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            archive, written = Path(folder, "archive.tar.gz"), Path(folder, "templates.json")
            try:
                _download(archive)
            except _UnreachableError as error:
                print(error, file=sys.stderr)
                return _UNREACHABLE
            written.write_text(json.dumps(_unpack(archive), ensure_ascii=False), "utf-8")
            written.replace(FILE)
    print("\n".join(json.loads(FILE.read_text("utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
