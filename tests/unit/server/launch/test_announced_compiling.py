"""A first start says before anything slow that it compiles kernels, in the format of the log."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from oarlock.server.config.settings import make_settings
from oarlock.server.launch.child_process import announce_compiling


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_names_the_compiled_kernels_and_how_long_that_takes(capfd, log_format):
    settings = make_settings({"log_format": log_format})
    announce_compiling(settings, [SimpleNamespace(is_compiling=False)])
    assert capfd.readouterr().err == ""
    announce_compiling(settings, [SimpleNamespace(is_compiling=True), SimpleNamespace(is_compiling=False)])
    (line,) = capfd.readouterr().err.splitlines()
    if log_format == "json":
        assert json.loads(line)["event"] == "compiling_kernels" and "10 to 60 s" in line
    else:
        assert line.startswith("compiling kernels for this processor") and "10 to 60 s" in line
