"""`oarlock pull MODEL`: fetch a model from the hub and check it, to serve it later."""

from __future__ import annotations

import argparse
import sys

from oarlock.server.cli.arguments import UsageError, add_settings, loaded_settings
from oarlock.server.config.settings import OPTIONS

HELP = "fetch a model from the hub, and check what is here of it"
EXAMPLE = "oarlock pull Qwen/Qwen2.5-0.5B-Instruct"
_SETTINGS = {"model", "revision", "download_dir", "offline", "load_format", "runner"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fetch a model from the hub into its cache. What arrived before is kept, also of a file that was interrupted. "
        "The digest of every file is checked, and what is damaged is fetched again. A model that cannot be served is "
        "refused before its weights are fetched."
    )
    add_settings(parser, positional=True, without=OPTIONS.keys() - _SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from oarlock.server.config.options import format_size
    from oarlock.server.hub.model_path import pull
    from oarlock.server.launch.banner import Progress

    settings = loaded_settings(arguments).settings
    if settings.model is None:
        raise UsageError("There is no MODEL.", "Name one of the hub: oarlock pull Qwen/Qwen2.5-0.5B-Instruct")
    progress = Progress()
    try:
        directory = Path(asyncio.run(pull(settings, progress)))
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: what has arrived is kept, and the same command goes on\n")
        raise
    finally:
        progress.finish()
    files = [path for path in directory.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{settings.model}: {format_size(size)} in {len(files)} files, digests checked\n{directory}")
    return 0
