"""The server works with the lowest version of each dependency that pyproject.toml allows."""

import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.e2e.running import ROOT, RunningServer


def lowest() -> list[str]:
    """Return a pin of each dependency at its lower bound, apart from torch, whose builds have gigabytes."""
    declared = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    bounds = {one.name: [part.version for part in one.specifier if part.operator == ">="] for one in declared}
    assert all(len(bound) == 1 for bound in bounds.values()), "each dependency has one lower bound"
    return [f"{name}=={bound}" for name, (bound,) in bounds.items() if name != "torch"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_server_works_with_the_lowest_versions(tmp_path):
    folder = tmp_path / "lowest"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", *lowest()]
    done = subprocess.run([sys.executable, *install], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    # Torch comes from this interpreter. Its other packages come after the ones that were installed here.
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}}
    with RunningServer(python=python) as running:
        assert running.text("Once", max_tokens=4)
        assert list(running.stream("Once", max_tokens=4))
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "response_format": schema}
        response = running.client.post("/v1/chat/completions", json=chat)
        assert response.json()["choices"][0]["message"]["content"] == '"yes"', response.text
