"""Commands of a user whom the password database does not know, with HOME unset: containers often run so."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.e2e.running import DEMO, QUICK_COMPILER, command, environment
from tests.golden.gguf_writer import q4_k_m, write_gguf

CACHES = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME", "HF_HUB_CACHE", "TMPDIR", "TRITON_HOME")
UNKNOWN = max(entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid < 60_000) + 1_000
HUB = "There is no directory for models of the hub"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="takes root and setpriv"),
]


@pytest.fixture
def folder():
    """The current directory of this user, whose temporary directory is `tmp` in it."""
    with tempfile.TemporaryDirectory() as name:
        for path in (Path(name), Path(name) / "tmp"):
            path.mkdir(exist_ok=True)
            os.chown(path, UNKNOWN, UNKNOWN)
        yield Path(name)


def run(folder, *words, module="oarlock", **changes):
    # This interpreter may be in a folder of root's: the user may read everything, and write only what it owns.
    rights = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    user = ["setpriv", f"--reuid={UNKNOWN}", f"--regid={UNKNOWN}", "--clear-groups", *rights]
    variables = environment(TMPDIR=str(folder / "tmp"), CXX=str(QUICK_COMPILER), **changes)
    for name in set(CACHES) - {"TMPDIR"} - changes.keys():
        variables.pop(name, None)
    done = subprocess.run(
        [*user, *command(*words, module=module)],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert os.listdir(folder) == ["tmp"]  # no folder named ~
    return done


def fault(done):
    """(cause, fix) of a command that failed."""
    assert done.returncode in (2, 3), done.stdout + done.stderr
    *_, cause, fix = done.stderr.splitlines()
    return cause.removeprefix("error: "), fix.removeprefix("fix: ")


@pytest.mark.parametrize("command", ["models", "pull no-such/model", "plan no-such/model --gpus 2x24GB"])
def test_models_of_the_hub_need_a_directory_that_somebody_names(folder, command):
    cause, fix = fault(run(folder, *command.split()))
    assert cause.startswith(HUB) and "HF_HOME" in fix and "--download-dir" in fix


def test_a_directory_that_is_named_will_do(folder):
    done = run(folder, "models", HF_HOME=str(folder / "tmp"))
    assert done.returncode == 0 and f"in {folder}/tmp/hub" in done.stdout, done.stderr


@pytest.mark.soak
def test_a_server_names_the_directory_that_it_needs(folder):
    cause, fix = fault(run(folder, "serve", "no-such/model", "--port", "0"))
    assert cause.startswith(HUB) and "HF_HOME" in fix


@pytest.mark.parametrize("command", ["doctor", "plan", "verify", "pull", "serve"])
def test_a_tilde_without_a_home_is_named(folder, command):
    cause, fix = fault(run(folder, command, "~nosuchuser/x"))
    assert "~nosuchuser/x cannot be found: there is no user nosuchuser" in cause and "full path" in fix
    if command == "plan":
        assert f"~/x cannot be found: user {UNKNOWN} has no home directory" in fault(run(folder, command, "~/x"))[0]


@pytest.mark.soak
def test_doctor_shows_where_caches_are(folder):
    done = run(folder, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{folder}/tmp/oarlock-{UNKNOWN}/oarlock/kernels" in done.stdout and HUB in done.stdout


def test_kernels_are_compiled_into_a_directory_that_works(folder):
    """The process that a server starts for it."""
    done = run(folder, "float32", module="oarlock.workers.compile_ahead")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = folder / "tmp" / f"oarlock-{UNKNOWN}"
    assert kept.stat().st_mode & 0o777 == 0o700 and list(kept.glob("oarlock/kernels/*.so"))


def test_a_gguf_file_is_described_in_a_directory_that_works(folder):
    with tempfile.TemporaryDirectory() as other:
        Path(other).chmod(0o755)
        write_gguf(DEMO, Path(other) / "demo.gguf", q4_k_m, tokenizer__ggml__pre="qwen2")
        done = run(folder, "plan", f"{other}/demo.gguf", "--gpus", "1x24GB")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((folder / "tmp" / f"oarlock-{UNKNOWN}").glob("oarlock/gguf/*/tokenizer.json"))
