"""Downloads files of a model on the hub, each resumed where an earlier download of it stopped.

They are kept in the cache layout of `huggingface_hub`, so files that other programs have fetched are used here, and the
other way round. It blocks, and so runs in a process of its own (`oarlock.server.launch.fetch_model`).
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

from oarlock.engine.errors import StartupError
from oarlock.server.config.options import format_size
from oarlock.server.hub.local_model import read_reference
from oarlock.server.hub.transfer import Digest, Report, TransferRate

_SMALL = ("*.json", "*.jinja", "*.txt", "*.model")  # beside the weights; nothing that could run code
# Of the modules of sentence-transformers, whose folders are numbered: how they work, and the weights of Dense ones.
_MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
# Chat templates beside the default one, as transformers saves them.
_TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")
_AT_ONCE = 4  # connections: one alone seldom fills a fast line
_TRIES = 5  # without a new byte
_RETRY_S = 1.0
_REPORT_S = 0.5
_TIMEOUT_S = constants.HF_HUB_DOWNLOAD_TIMEOUT  # without a byte
_RETRIED = (408, 429, 500, 502, 503, 504)
_HASH = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file as the hub lists it. `etag` names its content: the SHA-256 of a large file, else git's hash."""

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
        except OSError:  # a file system without links: the content itself gets the name
            self.blob(file).replace(pointer)

    def remember(self, revision: str) -> None:
        """Record that `revision` means this commit, for starts without a network."""
        if revision == self.commit:
            return
        path = self.folder / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(self.commit, encoding="utf-8")
        temporary.replace(path)

    @staticmethod
    def remembered(cache: Path, model: str, revision: str) -> "Snapshot | None":
        """The snapshot that an earlier download of `revision` left, if any."""
        commit = revision
        if not _HASH.fullmatch(revision):
            path = Snapshot(cache, model, "").folder / "refs" / revision
            if not path.is_file():
                return None
            commit = read_reference(path)
        found = Snapshot(cache, model, commit)
        return found if found.directory.is_dir() else None


def look_up(model: str, revision: str) -> tuple[str, list[HubFile]]:
    """Return the commit that `revision` means on the hub, and the files of its top folder, of modules and of templates.

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
            raise StartupError(f"The hub names no hash for {sibling.rfilename} of {model}.", "Check HF_ENDPOINT.")
        files.append(HubFile(sibling.rfilename, sibling.size, etag))
    if info.sha is None or not _HASH.fullmatch(info.sha):
        raise StartupError(f"The hub names no commit for {model}.", "Check HF_ENDPOINT.")
    return info.sha, files


def is_small(file: HubFile) -> bool:
    """Whether it is one of the files that every checkpoint has beside its weights."""
    is_foreign_index = file.name.endswith(".bin.index.json")
    return not is_foreign_index and any(fnmatch.fnmatchcase(file.name, pattern) for pattern in _SMALL)


def is_of_module(file: HubFile) -> bool:
    """Whether it is in the folder of a module of sentence-transformers."""
    return _MODULE.fullmatch(file.name) is not None


def check_room(model: str, snapshot: Snapshot, files: Sequence[HubFile]) -> None:
    """Raises `StartupError` when the disk has no room for what is still missing of `files`."""
    snapshot.folder.mkdir(parents=True, exist_ok=True)
    needed = sum(snapshot.missing_bytes(file) for file in files)
    free = shutil.disk_usage(snapshot.folder).free
    if needed > free:
        total = sum(file.size for file in files)
        raise StartupError(
            f"The weights of {model} do not fit the disk: {format_size(total)} in {len(files)} file(s), less "
            f"{format_size(total - needed)} that is here, needs {format_size(needed)}, and {snapshot.folder} has "
            f"{format_size(free)} free.",
            f"Free {format_size(needed - free)} there, or name a folder on another disk with --download-dir.",
        )


class Download:
    """Fetches files of one snapshot, and reports progress."""

    def __init__(self, model: str, snapshot: Snapshot, report: Report) -> None:
        self._model = model
        self._snapshot = snapshot
        self._report = report
        self._digests: dict[str, Digest] = {}  # of files that are being received, by name
        self._num_waiting = 0  # files that another process holds
        self._stopped = threading.Event()  # one file has failed, the others need not go on

    def fetch(self, files: Sequence[HubFile]) -> None:
        """All of `files`, a few at a time. What arrived of a file stays when another fails."""
        rate = TransferRate(sum(file.size for file in files))
        pool = ThreadPoolExecutor(_AT_ONCE, "download")
        largest_first = sorted(files, key=lambda file: -file.size)
        tasks = {pool.submit(self._fetch_one, file, rate) for file in largest_first}
        try:
            while tasks:
                done, tasks = wait(tasks, _REPORT_S, FIRST_EXCEPTION)
                for task in done:
                    task.result()
                others = f", another process fetches {self._num_waiting} of the files" if self._num_waiting else ""
                self._report(f"fetching {self._model}", rate.fraction, rate.describe() + others)
        except BaseException:
            self._stopped.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after a failure, do not wait for a lock

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
        """Wait while another process fetches the same file; its file is used then."""
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._num_waiting += 1
            fcntl.flock(out, fcntl.LOCK_EX)
            self._num_waiting -= 1

    def _complete(self, file: HubFile, out: BufferedWriter, rate: TransferRate) -> None:
        """Receive the rest of the file, behind what an earlier attempt left of it."""
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
                raise InterruptedError(f"{file.name} was left where it is, because another file failed")
            before, have = have, out.seek(0, os.SEEK_END)
            failures = 0 if have > before else failures + 1
            if error is not None and failures == _TRIES:
                raise error
            if error is not None:
                self._stopped.wait(_RETRY_S)
        if not self._digests.pop(file.name).is_right:
            out.truncate(0)
            raise StartupError(
                f"{file.name} of {self._model} is damaged: its digest is not what the hub says. It is removed.",
                "Start again to fetch it anew.",
            )

    def _receive(self, url: str, file: HubFile, have: int, out: BufferedWriter, rate: TransferRate) -> HTTPError | None:
        """Write one response of the hub to `out`. Returns what interrupted it, if another request may help."""
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        try:
            with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as response:
                hf_raise_for_status(response)
                if have and response.status_code != 206:  # the server ignores ranges: from the beginning
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
        return None if have == file.size else HTTPError(f"the answer ended after {have} of {file.size} bytes")

    def _digest_of(self, file: HubFile, path: str, size: int) -> Digest:
        """Digest of the `size` bytes that an earlier attempt left."""
        with open(path, "rb") as begun:
            return Digest(file.etag, file.size).read(begun, size)
