"""`oarlock doctor`: runs the checks and prints their findings. Exit code 0 if a server can start, 1 if not."""

import argparse
import json
import platform
import signal
import sys
from importlib.metadata import version

import torch

from oarlock.base.errors import StartupError
from oarlock.base.paths import hub_cache
from oarlock.base.python_child import die_with_parent, run_while_read
from oarlock.workers.config import NodesConfig, WorkerConfig
from oarlock.workers.distributed.topology import Topology
from oarlock.workers.doctor import cuda, machine, model
from oarlock.workers.doctor.finding import NOTE, WARNING, Finding, as_json, as_text, is_fine
from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.build import KernelsUnavailable


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.parent is not None:
        die_with_parent(arguments.parent, signal.SIGTERM)
    config = WorkerConfig.from_json(arguments.config)
    found = checks(config, arguments.host, arguments.port)
    if arguments.nodes is not None:
        found.append(machine.reachable(NodesConfig(**json.loads(arguments.nodes))))
    if arguments.nodes_wrong is not None:
        found.append(machine.wrong_nodes(*json.loads(arguments.nodes_wrong)))
    if arguments.description is not None:
        found.append(model.described(**json.loads(arguments.description)))
    if arguments.model_wrong is not None:
        found.append(model.wrong(*json.loads(arguments.model_wrong)))
    else:
        found += model.findings(config) if config.model_path else [model.missing(arguments.missing)]
    if arguments.memory:
        found.append(machine.memory_speed())
    if arguments.all_reduce:
        found.append(_all_reduce(config))
    if arguments.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        print(as_text(found))
    return 0 if is_fine(found) else 1


def _run_explained(argv: list[str]) -> int:
    try:
        return main(argv)
    except StartupError as error:
        sys.stderr.write(f"error: {error.cause}\nfix: {error.fix}\n")
        return error.exit_code


def checks(config: WorkerConfig, host: str, port: int) -> list[Finding]:
    """Return the findings of all checks of the machine that take no time."""
    ranks = Topology.of(config).ranks_per_node
    of_cuda = cuda.findings(config.device, ranks)
    device = "cuda" if any(finding.check == "device 0" for finding in of_cuda) else "cpu"
    return [
        _versions(),
        machine.cores(),
        machine.level(),
        machine.number_types(),
        machine.compiler(),
        machine.memory(),
        machine.huge_pages(),
        machine.locked_memory(device=device),
        machine.shared_memory(ranks=ranks, device=device),
        machine.open_files(),
        *[machine.disk("kernel cache", folder) for folder in [machine.cache()] if folder is not None],
        _model_cache(),
        machine.port(host, port),
        *of_cuda,
    ]


def _versions() -> Finding:
    names = ("torch", "transformers", "safetensors", "numpy")
    found = {name: version(name) for name in names}
    text = ", ".join([f"Python {platform.python_version()}", *(f"{name} {found[name]}" for name in names)])
    return Finding("versions", text, facts=found)


def _model_cache() -> Finding:
    try:
        return machine.disk("model cache", hub_cache())
    except StartupError as error:
        return Finding("model cache", error.cause, WARNING, error.fix)


def _all_reduce(config: WorkerConfig) -> Finding:
    if config.tensor_parallel_size == 1:
        return Finding("all-reduce", "one rank needs no all-reduce: give --tensor-parallel-size", NOTE)
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        return cuda.all_reduce_choice(config.with_(device="cuda"))
    try:
        library.library()
    except KernelsUnavailable as reason:
        fix = "See the line about kernels."
        return Finding("all-reduce", f"not measured: {reason}; gloo is used, which is slower", WARNING, fix)
    return machine.all_reduce_time(config.tensor_parallel_size)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="oarlock doctor", allow_abbrev=False)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--config", required=True, help="the WorkerConfig, as JSON")
    parser.add_argument("--missing", default="", help="why there is no model")
    parser.add_argument("--model-wrong", help="cause and fix, as JSON, if the model that is here cannot be served")
    parser.add_argument("--description", help="text and fix, as JSON, of the model's description")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--nodes", help="the NodesConfig, as JSON, of several hosts")
    parser.add_argument("--nodes-wrong", help="cause and fix, as JSON, if the settings of several hosts are wrong")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--all-reduce", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    raise SystemExit(run_while_read(lambda: _run_explained(sys.argv[1:])))
