"""Downloads of a model's files from the hub. Each continues at the point at which an earlier download stopped.

The files are kept in the cache layout of `huggingface_hub`, so files fetched by other programs are used here, and vice
versa. The code blocks, so it runs in a process of its own (`oarlock.server.launch.fetch_model`).
"""

import fcntl
import fnmatch
import os
import re
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from oarlock.base.errors import StartupError
from oarlock.server.config.options import format_size
from oarlock.server.hub.local_model import read_reference
from oarlock.server.hub.transfer import Digest, Report, TransferRate

_SMALL = ("*.json", "*.jinja", "*.txt", "*.model")  # files next to the weights; none of them can run code
# Configurations and weights of sentence-transformers' modules, whose folders are numbered.
_MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
# Additional chat templates, as transformers saves them.
_TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")
_NUM_CONNECTIONS = 4  # connections; a single one seldom fills a fast line
_TRIES = 5  # failures in a row without a new byte
_RETRY_S = 1.0
_REPORT_S = 0.5
_TIMEOUT_S = constants.HF_HUB_DOWNLOAD_TIMEOUT  # longest time without a byte
_RETRIED = (408, 429, 500, 502, 503, 504)
_HASH = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file as listed by the hub. `etag` names its content: the SHA-256 of a large file, else git's hash."""

    name: str
    size: int
    etag: str


class Snapshot:
    """One commit of one repository in the cache."""

    def __init__(self, cache: Path, model: str, commit: str) -> None:
        self.folder = cache / repo_folder_name(repo_id=model, repo_type="model")
        self.directory = self.folder / "snapshots" / commit
        self.commit = commit

    def blob(self, file: HubFile) -> Path:
        return self.folder / "blobs" / file.etag

    def partial(self, file: HubFile) -> Path:
        return self.folder / "blobs" / f"{file.etag}.incomplete"

    def missing_bytes(self, file: HubFile) -> int:
        if (self.directory / file.name).exists() or self.blob(file).exists():
            return 0
        partial = self.partial(file)
        return file.size - (min(partial.stat().st_size, file.size) if partial.exists() else 0)

    def link(self, file: HubFile) -> None:
        """Link the content under its name in this commit's folder."""
        pointer = self.directory / file.name
        if pointer.exists():
            return
        pointer.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(self.blob(file), pointer.parent)
        temporary = pointer.with_name(f"{pointer.name}.{os.getpid()}")
        try:
            temporary.symlink_to(target)
            temporary.replace(pointer)
        except OSError:  # the file system has no links, so the content itself gets the name
            self.blob(file).replace(pointer)

    def remember(self, revision: str) -> None:
        """Record that `revision` refers to this commit, for starts without a network."""
        if revision == self.commit:
            return
        path = self.folder / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(self.commit, encoding="utf-8")
        temporary.replace(path)

    @staticmethod
    def remembered(cache: Path, model: str, revision: str) -> "Snapshot | None":
        """Return the snapshot that an earlier download of `revision` left, if any."""
        commit = revision
        if not _HASH.fullmatch(revision):
            path = Snapshot(cache, model, "").folder / "refs" / revision
            if not path.is_file():
                return None
            commit = read_reference(path)
        found = Snapshot(cache, model, commit)
        return found if found.directory.is_dir() else None


def look_up(model: str, revision: str) -> tuple[str, list[HubFile]]:
    """Return the commit of `revision` on the hub, and the files of its top folder, of modules and of templates.

    Raises the library's errors.
    """
    info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    files = []
    for sibling in info.siblings or ():
        etag = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
        is_wanted = any(pattern.fullmatch(sibling.rfilename) for pattern in (_MODULE, _TEMPLATE))
        is_inside = "/" in sibling.rfilename and not is_wanted
        if is_inside or sibling.rfilename.startswith(".") or sibling.size is None:
            continue  # other subfolders hold other formats of the same weights
        if etag is None or not _HASH.fullmatch(etag):
            raise StartupError(f"The hub gives no hash for {sibling.rfilename} of {model}.", "Check HF_ENDPOINT.")
        files.append(HubFile(sibling.rfilename, sibling.size, etag))
    if info.sha is None or not _HASH.fullmatch(info.sha):
        raise StartupError(f"The hub gives no commit for {model}.", "Check HF_ENDPOINT.")
    return info.sha, files


def is_small(file: HubFile) -> bool:
    """Return whether it is a small file, such as every checkpoint has next to its weights."""
    is_foreign_index = file.name.endswith(".bin.index.json")
    return not is_foreign_index and any(fnmatch.fnmatchcase(file.name, pattern) for pattern in _SMALL)


def is_code(file: HubFile) -> bool:
    """Return whether it is Python code of the checkpoint, which is fetched only with `--trust-remote-code`."""
    return file.name.endswith(".py") and "/" not in file.name


def is_of_module(file: HubFile) -> bool:
    """Return whether it is in the folder of a sentence-transformers module."""
    return _MODULE.fullmatch(file.name) is not None


def check_room(model: str, snapshot: Snapshot, files: Sequence[HubFile]) -> None:
    """Raise `StartupError` if the disk has no room for the missing bytes of `files`."""
    snapshot.folder.mkdir(parents=True, exist_ok=True)
    needed = sum(snapshot.missing_bytes(file) for file in files)
    free = shutil.disk_usage(snapshot.folder).free
    if needed > free:
        total = sum(file.size for file in files)
        raise StartupError(
            f"The weights of {model} do not fit on the disk: {format_size(total)} in {len(files)} file(s), "
            f"minus {format_size(total - needed)} that is already here, needs {format_size(needed)}, and "
            f"{snapshot.folder} has {format_size(free)} free.",
            f"Free {format_size(needed - free)} there, or choose a folder on another disk with --download-dir.",
        )


class Download:
    """A download of files of one snapshot, which reports its progress."""

    def __init__(self, model: str, snapshot: Snapshot, report: Report) -> None:
        self._model = model
        self._snapshot = snapshot
        self._report = report
        self._digests: dict[str, Digest] = {}  # digests of files that are being received, by name
        self._num_waiting = 0  # files that another process is fetching
        self._stopped = threading.Event()  # set when one file has failed, so the others can stop

    def fetch(self, files: Sequence[HubFile]) -> None:
        """Fetch all `files`, a few at a time. Received bytes of a file are kept if another file fails."""
        rate = TransferRate(sum(file.size for file in files))
        pool = ThreadPoolExecutor(_NUM_CONNECTIONS, "download")
        largest_first = sorted(files, key=lambda file: -file.size)
        tasks = {pool.submit(self._fetch_one, file, rate) for file in largest_first}
        try:
            while tasks:
                done, tasks = wait(tasks, _REPORT_S, FIRST_EXCEPTION)
                for task in done:
                    task.result()
                others = f", another process is fetching {self._num_waiting} of the files" if self._num_waiting else ""
                self._report(f"fetching {self._model}", rate.fraction, rate.describe() + others)
        except BaseException:
            self._stopped.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # does not wait for a lock after a failure

    def _fetch_one(self, file: HubFile, rate: TransferRate) -> None:
        snapshot = self._snapshot
        blob, partial = snapshot.blob(file), snapshot.partial(file)
        if not (snapshot.directory / file.name).exists() and not blob.exists():
            blob.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("ab") as out:
                self._lock(out)
                if not blob.exists():
                    self._complete(file, out, rate)
                    partial.replace(blob)
                    snapshot.link(file)
                    return
            partial.unlink(missing_ok=True)
        rate.add(file.size, is_new=False)
        snapshot.link(file)

    def _lock(self, out: BufferedWriter) -> None:
        """Wait while another process fetches the same file, which is then used here."""
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._num_waiting += 1
            fcntl.flock(out, fcntl.LOCK_EX)
            self._num_waiting -= 1

    def _complete(self, file: HubFile, out: BufferedWriter, rate: TransferRate) -> None:
        """Receive the rest of the file, after the bytes that an earlier attempt left."""
        have = out.seek(0, os.SEEK_END)
        if have > file.size:
            have = out.truncate(0)
        rate.add(have, is_new=False)
        self._digests[file.name] = self._digest_of(file, out.name, have)
        url = hf_hub_url(self._model, file.name, revision=self._snapshot.commit)
        failures = 0
        while have < file.size:
            error = self._receive(url, file, have, out, rate)
            if self._stopped.is_set():
                raise InterruptedError(f"{file.name} was left incomplete, because another file failed")
            before, have = have, out.seek(0, os.SEEK_END)
            failures = 0 if have > before else failures + 1
            if error is not None and failures == _TRIES:
                raise error
            if error is not None:
                self._stopped.wait(_RETRY_S)
        if not self._digests.pop(file.name).is_right:
            out.truncate(0)
            raise StartupError(
                f"{file.name} of {self._model} is damaged: its digest differs from the hub's. It has been removed.",
                "Start again to fetch it again.",
            )

    def _receive(self, url: str, file: HubFile, have: int, out: BufferedWriter, rate: TransferRate) -> HTTPError | None:
        """Write one response of the hub to `out`. Return the error that interrupted it, if another request may help."""
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        try:
            with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as response:
                hf_raise_for_status(response)
                if have and response.status_code != 206:  # the server ignores ranges, so start from the beginning
                    out.truncate(0)
                    rate.add(-have, is_new=False)
                    have = 0
                    self._digests[file.name] = Digest(file.etag, file.size)
                for chunk in response.iter_bytes():
                    if self._stopped.is_set():
                        return None
                    have += len(chunk)
                    if have > file.size:
                        raise StartupError(f"The hub sent more than {file.size} bytes for {file.name}.", "Try again.")
                    out.write(chunk)
                    self._digests[file.name].update(chunk)
                    rate.add(len(chunk))
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code not in _RETRIED:
                raise
            return error
        return None if have == file.size else HTTPError(f"the response ended after {have} of {file.size} bytes")

    def _digest_of(self, file: HubFile, path: str, size: int) -> Digest:
        """Return the digest of the `size` bytes that an earlier attempt left."""
        with open(path, "rb") as begun:
            return Digest(file.etag, file.size).read(begun, size)
