"""Errors of fetching a model from the hub: one line of cause, one of fix."""

from __future__ import annotations

import errno
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from oarlock.engine.errors import StartupError

_TOKEN = "set HF_TOKEN to a token of an account that may read it"


def is_outage(error: Exception) -> bool:
    """Whether the hub cannot be reached or fails: what was fetched earlier may be served instead."""
    return isinstance(error, HTTPError) and (not isinstance(error, HfHubHTTPError) or error.response.status_code >= 500)


def explain(error: HTTPError | OSError, model: str, revision: str, cache: Path) -> StartupError:
    """The error as cause and fix."""
    page = f"{constants.ENDPOINT}/{model}"
    if isinstance(error, GatedRepoError):
        return StartupError(
            f"{model} is gated: the hub gives it only to accounts that have accepted its terms.",
            f"Accept them at {page}, and set HF_TOKEN to a token of that account.",
        )
    if isinstance(error, DisabledRepoError):
        return StartupError(f"The hub has disabled {model}.", "Name another model, or a directory.")
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
        f"{model} is neither a directory here nor a model on the hub ({constants.ENDPOINT}).",
        f"Check the spelling; if it is private, {_TOKEN}.",
    )


def _refusal(error: HfHubHTTPError, model: str) -> StartupError:
    status = error.response.status_code
    if status == 401 and "Invalid credentials" not in error.response.headers.get("X-Error-Message", ""):
        return _unknown(model)  # also the answer for a model that does not exist
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
        f"The hub ({constants.ENDPOINT}) answers {status} when asked for {model}.",
        "Try again later, or give a local directory. What has arrived is kept.",
    )


def _disk(error: OSError, cache: Path) -> StartupError:
    if error.errno == errno.ENOSPC:
        return StartupError(
            f"The disk of {cache} is full.",
            "Free some space and start again, which goes on where this stopped, or name another folder with "
            "--download-dir.",
        )
    return StartupError(
        f"The files of the model cannot be kept in {cache}: {error.strerror or error}.",
        "Name a folder that this user may write to with --download-dir.",
    )


def _network(error: HTTPError, model: str) -> StartupError:
    """No response at all. A proxy that is set is named, without its password."""
    proxies, endpoint = urllib.request.getproxies(), urlsplit(constants.ENDPOINT)
    proxy = None
    if not urllib.request.proxy_bypass(endpoint.hostname or ""):
        proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    detail = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    if proxy:
        shown = urlsplit(proxy if "//" in proxy else f"//{proxy}").netloc.rpartition("@")[2]
        return StartupError(
            f"The hub ({constants.ENDPOINT}) cannot be reached through the proxy {shown} to fetch {model} ({detail}).",
            f"Correct {endpoint.scheme.upper()}_PROXY, or name the hub in NO_PROXY. What has arrived is kept.",
        )
    return StartupError(
        f"{model} is no directory here, and the hub ({constants.ENDPOINT}) cannot be reached to fetch it ({detail}).",
        "Check the network, or set HTTPS_PROXY behind a proxy; or give a local directory. What has arrived is kept.",
    )
