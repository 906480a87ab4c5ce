"""Starts each system, and knows which are installed. A new peer is one function and one entry of `STARTS`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.environments import LLAMACPP_ARCHIVE, ROOT, VLLM_WHEEL, folder, installed, pinned_commit, python
from benchmarks.systems import models
from benchmarks.systems.system import SERVED_NAME, HttpSystem, JobSystem, Plan, System, clean_environment
from oarlock.workers.platform import processor


class Oarlock(HttpSystem):
    """Ours, which also says how much of the time its steps took."""

    def measure(self, work: list[list[int]], concurrency: int, output_tokens: int) -> dict[str, Any]:
        before = self._step_seconds()
        found = super().measure(work, concurrency, output_tokens)
        return found | {"step_seconds": self._step_seconds() - before}

    def _step_seconds(self) -> float:
        """Seconds from deciding each step to having its tokens, summed."""
        import httpx

        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        lines = (line for line in text.splitlines() if line.startswith("oarlock:step_seconds_sum"))
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def start_oarlock(
    plan: Plan, name: str = "oarlock", checkout: Path = ROOT, ranks: int = 1, model_impl: str | None = None
) -> System:
    """This checkout's server, or another one's, in the environment of its `.venv` if it has one.

    The ranks share the threads. `model_impl`: the code that computes the model; None: the server chooses.
    """
    own = checkout / ".venv" / "bin" / "python"
    interpreter = str(own) if checkout != ROOT and own.exists() else sys.executable
    command = [interpreter, "-P", "-m", "oarlock", "serve", str(plan.model), "--port", "{port}"]
    command += ["--served-model-name", SERVED_NAME, "--dtype", plan.dtype, "--device", "cpu"]
    command += ["--tensor-parallel-size", str(ranks), "--num-threads", str(max(1, plan.threads // ranks))]
    command += ["--max-model-len", str(plan.max_tokens), "--max-num-seqs", str(plan.max_concurrency)]
    if plan.quantization != "none":
        command += ["--quantization", plan.quantization]
    if model_impl is not None:
        command += ["--model-impl", model_impl]
    env = clean_environment(plan.threads, PYTHONPATH=str(checkout))
    del env["OMP_NUM_THREADS"]
    if plan.level is not None:
        env["OARLOCK_CPU_LEVEL"] = plan.level
    about = {"version": _commit(checkout), "dtype": _form(plan), "interface": "HTTP", "ranks": ranks}
    title = "Oarlock" if model_impl is None else f"Oarlock, {model_impl}' code"
    return Oarlock(name, title, about, [*command, "--no-enable-prefix-caching"], env, checkout)


def start_engine(plan: Plan) -> System:
    """This checkout's engine with the same settings, and no server before it."""
    settings = {
        "model": str(plan.model),
        "dtype": plan.dtype,
        "device": "cpu",
        "quantization": plan.quantization,
        "num_threads": plan.threads,
        "max_model_len": plan.max_tokens,
        "max_num_seqs": plan.max_concurrency,
        "enable_prefix_caching": False,
        "log_level": "warning",
    }
    command = [sys.executable, "-P", "-m", "benchmarks.systems.engine_jobs", "--settings", json.dumps(settings)]
    env = clean_environment(plan.threads, PYTHONPATH=str(ROOT))
    del env["OMP_NUM_THREADS"]
    if plan.level is not None:
        env["OARLOCK_CPU_LEVEL"] = plan.level
    about = {"version": _commit(ROOT), "dtype": _form(plan), "interface": "the engine's own"}
    return JobSystem("engine", "Oarlock's engine alone", about, command, env, ROOT)


def start_transformers(plan: Plan) -> System:
    """Start transformers, in float32 where the processor does not multiply the type asked for: emulation is slower."""
    dtype = plan.dtype if processor.here().multiplies(plan.dtype) else "float32"
    command = [sys.executable, "-m", "benchmarks.systems.transformers_jobs", "--model", str(plan.model)]
    command += ["--dtype", dtype, "--threads", str(plan.threads)]
    env = clean_environment(plan.threads, PYTHONPATH=str(ROOT))
    about = {"dtype": dtype, "interface": "offline, static batch"}
    return JobSystem("transformers", "transformers `generate`", about, command, env, ROOT)


def start_openvino(plan: Plan) -> System:
    """Start OpenVINO with weights in float16, its usual export, int8 or int4; it chooses its computing type."""
    model = models.openvino(plan)
    script = ROOT / "benchmarks" / "systems" / "openvino_jobs.py"
    command = [str(python("openvino")), str(script), "--model", str(model), "--threads", str(plan.threads)]
    command += ["--max-concurrency", str(plan.max_concurrency)]
    about = {"dtype": models.openvino_weights(plan), "interface": "offline, continuous batching"}
    return JobSystem("openvino", "OpenVINO GenAI", about, command, clean_environment(plan.threads), ROOT)


def start_llamacpp(plan: Plan) -> System:
    """Start llama.cpp's server with one slot per client, each with room for the longest sequence."""
    about = {"version": LLAMACPP_ARCHIVE.replace("==", " "), "dtype": models.llamacpp_type(plan), "interface": "HTTP"}
    command = [*_llamacpp_command(plan, "llamacpp"), "--no-cache-prompt"]
    env = clean_environment(plan.threads)
    if plan.level is not None:  # the kernels alone are compiled for it, in a library of their own
        env["LD_LIBRARY_PATH"] = str(folder("llamacpp") / f"build-{plan.level}" / "bin")
    return HttpSystem("llamacpp", "llama.cpp server", about, command, env, ROOT)


def start_ik_llamacpp(plan: Plan) -> System:
    """Start the server of llama.cpp's fork on the same file, whose weights it lays out for its fastest kernels."""
    about = {"version": pinned_commit("ik_llamacpp")[1][:8], "dtype": models.llamacpp_type(plan), "interface": "HTTP"}
    command = [*_llamacpp_command(plan, "ik_llamacpp"), "--run-time-repack", "--cache-ram", "0"]
    place = folder("ik_llamacpp")  # it writes a log to where it runs
    return HttpSystem("ik_llamacpp", "ik_llama.cpp server", about, command, clean_environment(plan.threads), place)


def _llamacpp_command(plan: Plan, peer: str) -> list[str]:
    """The command that starts the server of llama.cpp, or of its fork."""
    threads, slots = str(plan.threads), plan.max_concurrency
    command = [str(folder(peer) / "build" / "bin" / "llama-server"), "-m", str(models.llamacpp(plan))]
    command += ["--alias", SERVED_NAME, "-t", threads, "-tb", threads]
    command += ["-np", str(slots), "-c", str(slots * plan.max_tokens)]
    return [*command, "--host", "127.0.0.1", "--port", "{port}"]


def start_vllm(plan: Plan) -> System:
    """Start vLLM, bound to the first cores; its memory for keys and values is set by the environment."""
    command = [str(python("vllm").with_name("vllm")), "serve", str(plan.model), "--dtype", plan.dtype]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--served-model-name", SERVED_NAME]
    command += ["--max-model-len", str(plan.max_tokens), "--max-num-seqs", str(plan.max_concurrency)]
    command += ["--no-enable-prefix-caching"]
    cores = f"0-{plan.threads - 1}" if plan.threads > 1 else "0"
    env = clean_environment(plan.threads, VLLM_CPU_OMP_THREADS_BIND=cores, VLLM_CPU_KVCACHE_SPACE="2")
    del env["OMP_NUM_THREADS"]
    env["PATH"] = f"{python('vllm').parent}:{env['PATH']}"
    about = {"version": VLLM_WHEEL.replace("==", " "), "dtype": plan.dtype, "interface": "HTTP"}
    return HttpSystem("vllm", "vLLM, CPU build", about, command, env, folder("vllm"))


def start_transformers_code(plan: Plan) -> System:
    """This checkout's server, with the model computed by transformers' code."""
    return start_oarlock(plan, "oarlock-transformers", model_impl="transformers")


STARTS: dict[str, Callable[[Plan], System]] = {
    "oarlock": start_oarlock,
    "oarlock-transformers": start_transformers_code,
    "engine": start_engine,
    "openvino": start_openvino,
    "llamacpp": start_llamacpp,
    "ik_llamacpp": start_ik_llamacpp,
    "vllm": start_vllm,
    "transformers": start_transformers,
}


OURS = ("oarlock", "oarlock-transformers", "engine")
# Systems that round weights here: `vllm` and `transformers` need other checkpoints or libraries for it.
ROUNDING = {
    "none": tuple(STARTS),
    "int8": ("oarlock", "oarlock-transformers", "engine", "openvino", "llamacpp", "ik_llamacpp"),
    "int4": ("oarlock", "oarlock-transformers", "engine", "openvino", "llamacpp", "ik_llamacpp"),
}
# Systems that can be held to the instructions of a level: OpenVINO chooses kernels by the processor whatever its
# oneDNN may use, and with ONEDNN_MAX_CPU_ISA=AVX2 finds none for weights of 8 bits.
LEVELS = {"avx2": ("oarlock", "oarlock-transformers", "engine", "llamacpp")}


def available() -> list[str]:
    """Ours, transformers, and every peer that is installed as pinned."""
    return [name for name in STARTS if name in (*OURS, "transformers") or installed(name)]


def _form(plan: Plan) -> str:
    """Form of the weights: the quantization, else the number type."""
    return plan.dtype if plan.quantization == "none" else plan.quantization


def _commit(checkout: Path) -> str:
    """The commit that a checkout stands at, with a plus sign if files differ from it."""
    git = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
