"""`oarlock completion`: the scripts, and the replies of a real shell with them."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest

from oarlock.server.cli import completion
from oarlock.server.cli.main import COMMANDS, main
from oarlock.server.config.settings import OPTIONS


@functools.cache
def script(shell: str) -> str:
    return completion.script(shell)


def replies(folder, *words: str) -> set[str]:
    """Replies that bash offers when the tab key is pressed after these words."""
    typed = " ".join(f"'{word}'" for word in words)
    press = f'COMP_WORDS=(oarlock {typed})\nCOMP_CWORD={len(words)}\n_shtab_oarlock\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    code = f"{script('bash')}\n{press}"
    found = subprocess.run(
        ["bash", "--norc", "-u", "-c", code], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stderr == ""
    return set(found.stdout.split())


def test_bash_offers_commands_flags_values_and_files(tmp_path):
    (tmp_path / "keys.txt").touch()
    assert set(COMMANDS) <= replies(tmp_path, "")
    assert replies(tmp_path, "ser") == {"serve"}
    assert replies(tmp_path, "serve", "--tensor") == {"--tensor-parallel-size"}
    flags = {described.flag for described in OPTIONS.values() if not described.positional}
    assert flags <= replies(tmp_path, "serve", "--")
    assert replies(tmp_path, "serve", "--dtype", "b") == {"bfloat16"}
    assert replies(tmp_path, "serve", "m", "--port", "1", "--device", "") == {"auto", "cpu", "cuda"}
    assert replies(tmp_path, "serve", "--api-key-file", "k") == {"keys.txt"}
    assert replies(tmp_path, "serve", "--port", "") == set()
    assert replies(tmp_path, "serve", "key") == {"keys.txt"}
    assert "serve" in replies(tmp_path, "bench", "")
    assert "--request-rate" in replies(tmp_path, "bench", "serve", "--re")
    assert replies(tmp_path, "completion", "z") == {"zsh"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_reads_its_script_and_it_has_every_flag(shell, tmp_path):
    assert "tensor-parallel-size" in script(shell) and "request-rate" in script(shell)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script(shell))  # longer than one argument may be
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=60)


def test_the_command_prints_it(capsys):
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == script("bash")
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err
