"""Fetching of a model's files from the hub, or from the cache when offline or when the hub cannot be reached.

Small files are fetched and checked first, so a model that cannot be served costs only kilobytes. The code blocks, so it
runs in a process of its own (`oarlock.server.launch.fetch_model`).
"""

import errno
import sys
import urllib.request
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from oarlock.base.errors import StartupError
from oarlock.base.paths import hub_cache
from oarlock.server.hub.files import Download, HubFile, Snapshot, check_room, is_code, is_of_module, is_small, look_up
from oarlock.server.hub.model_path import HubModel
from oarlock.server.hub.transfer import Report, damaged, remove
from oarlock.workers.adapter_digest import SETTINGS_FILE, WEIGHTS_FILE
from oarlock.workers.adapter_settings import check_adapter_settings
from oarlock.workers.model_files.checkpoint import weight_files
from oarlock.workers.preflight import DESCRIPTIONS, check_without_weights

ADAPTER_FILES = (SETTINGS_FILE, WEIGHTS_FILE)
_TOKEN = "set HF_TOKEN to a token of an account that may read it"


def is_outage(error: Exception) -> bool:
    """Return whether the hub cannot be reached or fails, so that files fetched earlier may be served instead."""
    return isinstance(error, HTTPError) and (not isinstance(error, HfHubHTTPError) or error.response.status_code >= 500)


def explain(error: HTTPError | OSError, model: str, revision: str, cache: Path) -> StartupError:
    """Return the error as cause and fix."""
    page = f"{constants.ENDPOINT}/{model}"
    if isinstance(error, GatedRepoError):
        return StartupError(
            f"{model} is gated: the hub provides it only to accounts that have accepted its terms.",
            f"Accept them at {page}, and set HF_TOKEN to a token of that account.",
        )
    if isinstance(error, DisabledRepoError):
        return StartupError(f"The hub has disabled {model}.", "Choose another model, or a directory.")
    if isinstance(error, RepositoryNotFoundError):
        return _unknown(model)
    if isinstance(error, RevisionNotFoundError):
        return StartupError(
            f"{model} has no revision {revision!r} on the hub.",
            f"Give --revision a branch, a tag or a full commit that {page} lists.",
        )
    if isinstance(error, HfHubHTTPError):
        return _refusal(error, model)
    if isinstance(error, OSError):
        return _disk(error, cache)
    return _network(error, model)


def _unknown(model: str) -> StartupError:
    return StartupError(
        f"{model} is neither a directory on this machine nor a model on the hub ({constants.ENDPOINT}).",
        f"Check the spelling; if it is private, {_TOKEN}.",
    )


def _refusal(error: HfHubHTTPError, model: str) -> StartupError:
    status = error.response.status_code
    if status == 401 and "Invalid credentials" not in error.response.headers.get("X-Error-Message", ""):
        return _unknown(model)  # the hub gives this response for a model that does not exist, too
    if status == 401:
        return StartupError(f"The hub rejects the token that was sent for {model} (401).", "Renew or unset HF_TOKEN.")
    if status == 403:
        return StartupError(f"The hub refuses {model} to this account (403).", f"Ask its owner, or {_TOKEN}.")
    if status == 429:
        return StartupError(
            f"The hub limits requests from this address or account (429): {model} cannot be fetched now.",
            "Wait some minutes; a token in HF_TOKEN allows more.",
        )
    return StartupError(
        f"The hub ({constants.ENDPOINT}) responds {status} to the request for {model}.",
        "Try again later, or give a local directory. Files that have arrived are kept.",
    )


def _disk(error: OSError, cache: Path) -> StartupError:
    if error.errno == errno.ENOSPC:
        return StartupError(
            f"The disk of {cache} is full.",
            "Free some space and start again, which resumes the download, or choose another folder with "
            "--download-dir.",
        )
    return StartupError(
        f"The files of the model cannot be stored in {cache}: {error.strerror or error}.",
        "Choose a folder that this user can write to with --download-dir.",
    )


def _network(error: HTTPError, model: str) -> StartupError:
    """Return the error for no response at all. It names a configured proxy, without its password."""
    proxies, endpoint = urllib.request.getproxies(), urlsplit(constants.ENDPOINT)
    proxy = None
    if not urllib.request.proxy_bypass(endpoint.hostname or ""):
        proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    detail = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    if proxy:
        shown = urlsplit(proxy if "//" in proxy else f"//{proxy}").netloc.rpartition("@")[2]
        return StartupError(
            f"The hub ({constants.ENDPOINT}) cannot be reached through the proxy {shown} to fetch {model} ({detail}).",
            f"Correct {endpoint.scheme.upper()}_PROXY, or add the hub to NO_PROXY. Files that have arrived are kept.",
        )
    return StartupError(
        f"{model} is not a directory on this machine, and the hub ({constants.ENDPOINT}) cannot be reached "
        f"to fetch it ({detail}).",
        "Check the network, or set HTTPS_PROXY behind a proxy; or give a local directory. Files that have "
        "arrived are kept.",
    )


CheckFiles = Callable[[Path], None]  # raises `StartupError` if the files next to the weights cannot be used


def fetch(request: HubModel, report: Report, check_small_files: CheckFiles) -> str:
    """Return the directory of the model's files. Raises `StartupError`.

    `check_small_files` is called with the directory before any weights are fetched.
    """
    cache = hub_cache(request.download_dir)
    if request.offline or constants.is_offline_mode():
        try:
            return _checked(request, _from_cache(request, cache), report)
        except OSError as error:
            raise _disk(error, cache) from None
    try:
        return _from_hub(request, cache, report, check_small_files)
    except HFValidationError as error:
        raise StartupError(
            f"{request.model} is neither a directory on this machine nor a hub id ({error}).",
            "Hub ids look like Qwen/Qwen2.5-0.5B-Instruct.",
        ) from None
    except (HTTPError, OSError) as error:
        failure = explain(error, request.model, request.revision, cache)
        if request.check_digests or not is_outage(error):
            raise failure from None
        try:
            directory = _from_cache(request, cache)
        except StartupError:  # the cache has no complete copy, so the outage is the cause
            raise failure from None
        sys.stderr.write(f"warning: {failure.cause} The version that was fetched earlier is served.\n")
        return directory


def _from_cache(request: HubModel, cache: Path) -> str:
    """Return the model's directory in the cache. Raises `StartupError` if earlier downloads left it incomplete."""
    fix = "Start once with the network (without --offline and HF_HUB_OFFLINE), or give a directory."
    snapshot = Snapshot.remembered(cache, request.model, request.revision)
    if snapshot is not None and request.tokenizer_only:
        return str(snapshot.directory)
    if snapshot is None:
        raise StartupError(
            f"{request.model} is neither a directory on this machine nor in the cache {cache} in revision "
            f"{request.revision!r}, and the network must not be used.",
            fix,
        )
    names = {path.name for path in snapshot.directory.iterdir() if path.exists()}
    here = f"{request.model} is only partly in the cache {cache}"
    try:
        wanted = [*ADAPTER_FILES] if request.adapter_only else ["config.json", *_weights(request, snapshot, names)]
    except StartupError as error:
        raise StartupError(f"{here}: {error.cause}", fix) from None
    missing = [name for name in wanted if name not in names]
    if missing:
        raise StartupError(f"{here}: {missing[0]} is missing.", fix)
    return str(snapshot.directory)


def _checked(request: HubModel, directory: str, report: Report) -> str:
    """Check that no file in `directory` is damaged, and return it. Raises `StartupError`."""
    found = damaged(Path(directory), report) if request.check_digests else []
    if found:
        raise StartupError(
            f"{found[0].name} of {request.model} is damaged: its digest differs.",
            "Pull it with the network (without --offline and HF_HUB_OFFLINE), which fetches it again.",
        )
    return directory


def _from_hub(request: HubModel, cache: Path, report: Report, check_small_files: CheckFiles) -> str:
    report(f"fetching {request.model}", 0.0, "looking it up")
    commit, files = look_up(request.model, request.revision)
    by_name = {file.name: file for file in files}
    if request.tokenizer_only:
        return _small_files(request, Snapshot(cache, request.model, commit), files, check_small_files)
    if request.adapter_only:
        return _adapter(request, Snapshot(cache, request.model, commit), files, report)
    if "config.json" not in by_name:
        raise _no_config(request.model, files)
    snapshot = Snapshot(cache, request.model, commit)
    if request.check_digests and snapshot.directory.is_dir():
        remove(damaged(snapshot.directory, report))
    small = Download(request.model, snapshot, lambda phase, fraction, detail: report(phase, 0.0, "its description"))
    worker = request.engine.worker.with_(model_path=str(snapshot.directory))
    small.fetch([by_name[name] for name in DESCRIPTIONS if name in by_name])
    if worker.trust_remote_code:
        small.fetch([file for file in files if is_code(file)])
    check_without_weights(worker)
    small.fetch([file for file in files if is_small(file)])
    check_small_files(snapshot.directory)
    weights = _weights(request, snapshot, by_name.keys())
    missing = [name for name in weights if name not in by_name]
    if missing:
        raise StartupError(
            f"{request.model} lacks {missing[0]}, which its index lists.",
            "Choose a complete checkpoint, or another revision.",
        )
    chosen = [by_name[name] for name in weights] + [file for file in files if is_of_module(file) and not is_small(file)]
    check_room(request.model, snapshot, chosen)
    Download(request.model, snapshot, report).fetch(chosen)
    snapshot.remember(request.revision)
    return str(snapshot.directory)


def _small_files(request: HubModel, snapshot: Snapshot, files: list[HubFile], check_small_files: CheckFiles) -> str:
    Download(request.model, snapshot, lambda *progress: None).fetch([file for file in files if is_small(file)])
    check_small_files(snapshot.directory)
    snapshot.remember(request.revision)
    return str(snapshot.directory)


def _adapter(request: HubModel, snapshot: Snapshot, files: list[HubFile], report: Report) -> str:
    """Fetch a LoRA adapter: its settings, and its weights unless the settings are refused."""
    by_name = {file.name: file for file in files}
    missing = [name for name in ADAPTER_FILES if name not in by_name]
    if missing:
        raise StartupError(
            f"{request.model} has no {missing[0]}, so it is no adapter that can be served.",
            "Choose an adapter that PEFT has saved as safetensors; GGUF adapters are served only from local files.",
        )
    settings, weights = (by_name[name] for name in ADAPTER_FILES)
    Download(request.model, snapshot, lambda phase, fraction, detail: report(phase, 0.0, "its settings")).fetch(
        [settings]
    )
    check_adapter_settings(snapshot.directory, request.engine.worker)
    check_room(request.model, snapshot, [weights])
    Download(request.model, snapshot, report).fetch([weights])
    snapshot.remember(request.revision)
    return str(snapshot.directory)


def _weights(request: HubModel, snapshot: Snapshot, names: Collection[str]) -> list[str]:
    """Return the names of the weight files to load: only one copy, if the repository has several."""
    if request.engine.worker.load_format == "dummy":
        return []
    return weight_files(snapshot.directory, names, request.model)


def _no_config(model: str, files: list[HubFile]) -> StartupError:
    if any(file.name.endswith(".gguf") for file in files):
        return StartupError(
            f"{model} has GGUF files and no config.json; GGUF models are served only from local files.",
            f"Download one of them (hf download {model} NAME.gguf --local-dir .), and serve that file.",
        )
    return StartupError(f"{model} has no config.json.", "Choose a model in the transformers format.")
