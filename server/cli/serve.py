"""`oarlock serve [MODEL]`: serve a model over HTTP.

Without MODEL it serves the demo model. A person at a terminal is first offered the models on this machine; the demo
model starts if there is no choice within some seconds. A script, `make` or a container without a terminal is not asked.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oarlock.server.cli.arguments import UsageError, add_settings, loaded_settings
from oarlock.server.config.nodes import first_on_host, nodes_config
from oarlock.server.config.option_groups import RAY
from oarlock.server.config.settings import OPTIONS, Settings
from oarlock.server.launch.child_process import announce_compiling, engine_processes
from oarlock.server.launch.usage import check_usage
from oarlock.workers.config import NodesConfig

if TYPE_CHECKING:
    from oarlock.server.launch.ray_group import RayGroup

HELP = "serve a model over HTTP"
EXAMPLE = "oarlock serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 2048"
_MOST_OFFERED = 9  # number of digits
_ANSWER_S = 15.0
_EXIT_CODES = """exit codes:
  0  stopped in order                     5  a worker process died
  2  wrong command line                   6  a worker hung (--step-timeout)
  3  wrong configuration or model         7  --drain-timeout ran out, requests were lost
  4  out of memory at start               130, 143  stopped at once by a second Ctrl-C or SIGTERM"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a model. A flag overrides the environment, the environment the file, and the file the default."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXIT_CODES
    add_settings(parser, positional=True)


def run(arguments: argparse.Namespace) -> int:
    loaded = loaded_settings(arguments)
    settings = loaded.settings
    _check_model_is_not_a_value(arguments, settings)
    for note in arguments.notes:
        sys.stderr.write(f"note: {note}\n")
    on_ray = settings.distributed_executor_backend == RAY
    if not on_ray and not first_on_host(os.environ, settings.tensor_parallel_size * settings.pipeline_parallel_size):
        from oarlock.server.launch.node import wait_for_first

        return wait_for_first()
    nodes = nodes_config(settings, os.environ)
    if nodes is not None and nodes.node_rank:
        from oarlock.server.launch.node import serve_node

        return serve_node(settings, nodes)
    check_usage(settings)
    if not on_ray:
        return _serve(settings if nodes is not None or settings.model is not None else _offered(settings), nodes)
    from oarlock.server.launch.ray_group import RayGroup

    group = RayGroup(loaded)
    status = None
    try:
        status = _serve(settings, group.nodes, group)
        return status
    finally:
        group.close(in_order=status == 0)


def _serve(settings: Settings, nodes: NodesConfig | None, ray: RayGroup | None = None) -> int:
    engines = engine_processes(settings)
    announce_compiling(settings, engines)
    gc.disable()  # enabled when the server is ready: imports create only objects that stay
    try:
        # Takes a second, while the other processes import as well.
        from oarlock.server.launch.supervisor import serve

        return serve(settings, engines, nodes, ray)
    finally:
        gc.enable()
        for engine in engines:
            engine.discard()


def _offered(settings: Settings) -> Settings:
    """Return the settings with the model that the user chooses among those on this machine, if there is a choice."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
        return settings  # nobody can respond: a pipe, or a job in the background
    from oarlock.base.errors import StartupError
    from oarlock.base.paths import hub_cache
    from oarlock.server.cli.remote import single_keys
    from oarlock.server.config.options import format_size
    from oarlock.server.hub.cached import cached_models, gguf_models

    try:
        found = [*cached_models(hub_cache(settings.download_dir), settings.engine_config(""))]
    except StartupError:  # there is no such cache, so nothing of it can be offered
        found = []
    found = [model for model in [*found, *gguf_models()] if model.is_served][:_MOST_OFFERED]
    if not found:
        return settings
    width = max(len(model.name) for model in found)
    rows = [
        f"  {number}  {model.name:<{width}}  {format_size(model.size):>10}  {model.source}"
        for number, model in enumerate(found, 1)
    ]
    question = (
        f"Press a digit to serve a model. Any other key, or {_ANSWER_S:.0f} seconds without one, serves the demo model."
    )
    with single_keys(sys.stdin):  # earlier keys are not a choice
        sys.stderr.write("\n".join(["MODEL is missing. On this machine are:", *rows, question, ""]))
        sys.stderr.flush()
        key = os.read(sys.stdin.fileno(), 1) if select.select([sys.stdin], [], [], _ANSWER_S)[0] else b""
    if not (key.isdigit() and 1 <= int(key) <= len(found)):
        return settings
    chosen = found[int(key) - 1]
    named = () if chosen.argument == chosen.name or chosen.argument.endswith(".gguf") else (chosen.name,)
    words = ["oarlock", "serve", chosen.argument, *(["--served-model-name", *named] if named else [])]
    sys.stderr.write(f"The same without a question: {shlex.join(words)}\n")
    return replace(settings, model=chosen.argument, served_model_name=settings.served_model_name or named)


def _check_model_is_not_a_value(arguments: argparse.Namespace, settings: Settings) -> None:
    """Refuse a start if a flag may have taken MODEL: `--api-key KEY MODEL` reads both words as keys."""
    if settings.model is not None:
        return
    for described in OPTIONS.values():
        times = getattr(arguments, described.name) if described.many else None  # the values of each time it is given
        if times and (len(times[-1]) > 1 or Path(times[-1][-1]).exists()):
            raise UsageError(
                f"MODEL is missing. {described.flag} took {len(times[-1])} value(s); the last may be meant as MODEL.",
                f"Write MODEL first: oarlock serve MODEL {described.flag} …; for the demo model, set "
                f"{described.env} to the values, separated by commas.",
            )
