"""Checks that refuse a hopeless start before any process is started and before anything heavy is imported."""

import os
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.base.paths import expand
from oarlock.server.config.settings import OPTIONS, Settings
from oarlock.server.http.listeners import bind
from oarlock.server.hub.local_model import check_names

# Options that name a file. The code that uses it reads it later, and reports errors in its content.
_FILES = ("chat_template", "api_key_file", "ssl_certfile", "ssl_keyfile")


def check_usage(settings: Settings) -> None:
    """Refuse models, files and addresses that do not exist. Raises `StartupError`."""
    check_names(settings)
    for name in _FILES:
        path = getattr(settings, name)
        if path is not None:
            _check_readable(OPTIONS[name].flag, expand(path))
    if settings.uds is None and not os.environ.get("LISTEN_FDS"):  # otherwise a service manager has opened the socket
        bind(settings.host, settings.port).close()


def _check_readable(flag: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise StartupError(f"{flag} {path} cannot be read: {error.strerror}.", f"Give {flag} a file.") from None
