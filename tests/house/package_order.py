"""Order of imports: what each of the four packages may import of the packages below it, and which folder may import
which inside a package.

An entry is a folder directly under a package, or a Python file at its root.
"""

from collections.abc import Iterable, Mapping

from tests.house.rules import imports

Order = Mapping[str, frozenset[str]]


def entries(names: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(names.split())


# Package -> entry -> the entries of the same package that it may import. An entry with a dot is a file at the root.
ORDER: dict[str, Order] = {
    "server": {
        "cli": entries("offline launch bench endpoints llm hub config version.py"),
        "offline": entries("launch endpoints http chat llm hub config schemas observability json_text.py"),
        "launch": entries("endpoints http chat llm hub config observability errors.py"),
        "bench": entries(""),
        "endpoints": entries("http chat llm hub config schemas observability errors.py json_text.py version.py"),
        "http": entries("llm config schemas observability errors.py version.py"),
        "chat": entries("llm schemas observability"),
        "llm": entries("hub config schemas observability errors.py json_text.py"),
        "hub": entries("config"),
        "config": entries(""),
        "schemas": entries(""),
        "observability": entries(""),
        "errors.py": entries("json_text.py"),
        "json_text.py": entries(""),
        "version.py": entries(""),
    },
    "engine": {
        "simulated_ranks.py": entries(""),
        "core": entries(
            "input_batch scheduler structured_output kv_cache replay ipc config.py stats.py types.py errors.py"
        ),
        "input_batch": entries("scheduler kv_cache types.py"),
        "scheduler": entries("kv_cache spec_decode config.py stats.py types.py errors.py"),
        "structured_output": entries("types.py errors.py panics.py"),
        "kv_cache": entries("config.py stats.py types.py"),
        "spec_decode": entries("config.py"),
        "replay": entries(""),
        "client.py": entries("kv_cache replay ipc engine_process.py config.py stats.py types.py errors.py"),
        "replicas.py": entries("kv_cache ipc client.py engine_process.py config.py stats.py types.py errors.py"),
        "engine_process.py": entries(""),
        "ipc": entries("kv_cache config.py stats.py types.py errors.py"),
        "config.py": entries(""),
        "stats.py": entries("types.py"),
        "types.py": entries(""),
        "errors.py": entries(""),
        "panics.py": entries(""),
    },
    "workers": {
        "executor.py": entries(
            "ranks preflight.py rank_processes.py fingerprint.py protocol.py config.py kv_offload.py"
        ),
        "capacity.py": entries(
            "checks runner ranks layers quantization distributed model_files platform preflight.py config.py"
        ),
        "doctor": entries(
            "runner ranks models quantization attention distributed kernels platform node.py preflight.py"
            " gguf_config.py config.py"
        ),
        "node.py": entries("ranks platform preflight.py rank_processes.py fingerprint.py config.py"),
        "verify": entries(
            "runner ranks models layers quantization attention distributed weights model_files preflight.py"
            " gguf_config.py protocol.py config.py"
        ),
        "preflight.py": entries(
            "checks runner ranks models layers quantization model_files platform gguf_config.py config.py"
        ),
        "checks": entries(
            "runner kv_tiers ranks models layers quantization distributed model_files kernels platform config.py"
            " kv_offload.py"
        ),
        "runner": entries(
            "kv_tiers ranks models sampling layers quantization attention distributed weights kernels platform"
            " gguf_config.py protocol.py sampling_parameters.py config.py kv_offload.py"
        ),
        "kv_tiers": entries("attention platform fingerprint.py protocol.py config.py kv_offload.py"),
        "ranks": entries("distributed platform rank_processes.py protocol.py config.py kv_offload.py errors.py"),
        "rank_processes.py": entries("distributed"),
        "gguf_config.py": entries("models layers model_files"),
        "models": entries("layers quantization attention distributed weights model_files kernels platform"),
        "sampling": entries("distributed kernels protocol.py sampling_parameters.py"),
        "layers": entries("quantization attention distributed weights kernels platform"),
        "quantization": entries("distributed weights model_files kernels platform"),
        "attention": entries("kernels platform protocol.py"),
        "distributed": entries("platform config.py"),
        "fingerprint.py": entries("protocol.py config.py"),
        "compile_ahead.py": entries("kernels platform"),
        "weights": entries("model_files"),
        "model_files": entries(""),
        "kernels": entries("platform protocol.py sampling_parameters.py"),
        "platform": entries(""),
        "protocol.py": entries("sampling_parameters.py config.py kv_offload.py"),
        "sampling_parameters.py": entries(""),
        "config.py": entries("kv_offload.py"),
        "kv_offload.py": entries(""),
        "errors.py": entries(""),
    },
    "base": {
        "python_child.py": entries("paths.py"),
        "paths.py": entries("errors.py"),
        "json_files.py": entries("errors.py"),
        "host_memory.py": entries("process_memory.py"),
        "process_memory.py": entries(""),
        "log_format.py": entries(""),
        "errors.py": entries(""),
    },
}


# Package -> package below it -> the entries that it may import. `base/` is public as a whole.
_BASE = frozenset(ORDER["base"])
PUBLIC: dict[str, Order] = {
    "server": {
        "engine": entries(
            "client.py config.py engine_process.py errors.py panics.py replicas.py simulated_ranks.py stats.py types.py"
        ),
        # Checks, plans and files of a model, before any rank starts: all of them are torch-free.
        "workers": entries("capacity.py compile_ahead.py config.py gguf_config.py model_files node.py preflight.py"),
        "base": _BASE,
    },
    "engine": {
        "workers": entries(
            "capacity.py compile_ahead.py config.py errors.py executor.py fingerprint.py kv_offload.py"
            " protocol.py rank_processes.py sampling_parameters.py"
        ),
        "base": _BASE,
    },
    "workers": {"base": _BASE},
    "base": {},
}


def entry_of(file: str) -> str:
    """`engine/ipc/frames.py` -> `ipc`, `engine/client.py` -> `client.py`."""
    return file.split("/")[1]


def file_of(module: str, files: Iterable[str]) -> str | None:
    """The file of a module, if it is one of `files`."""
    path = module.replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in files), None)


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """File -> the files among `sources` that it imports, at any depth and for type checkers too."""
    graph: dict[str, set[str]] = {}
    for file, source in sources.items():
        found = {file_of(item.module, sources) for item in imports(source, file)}
        graph[file] = {name for name in found if name and name not in (file, f"{file.split('/')[0]}/__init__.py")}
    return graph


def entry_graph(sources: Mapping[str, str], package: str) -> dict[str, set[str]]:
    """Entry -> the other entries of the same package that its files import."""
    own = {file: source for file, source in sources.items() if file.startswith(f"{package}/")}
    graph: dict[str, set[str]] = {entry_of(file): set() for file in own if entry_of(file) != "__init__.py"}
    for file, imported in import_graph(own).items():
        if entry_of(file) in graph:
            graph[entry_of(file)] |= {entry_of(name) for name in imported} - {entry_of(file)}
    return graph


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Every group of nodes that reach each other, sorted (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            at = stack.index(node)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in number:
            visit(node)
    return sorted(found)


def transitive_reduction(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The fewest edges of a graph without circles from which the same nodes can be reached."""

    def reached(node: str) -> set[str]:
        return {node}.union(*(reached(other) for other in graph.get(node, ())))

    return {
        node: {to for to in direct if not any(to in reached(other) for other in direct if other != to)}
        for node, direct in graph.items()
    }


def order_faults(order: Order) -> list[str]:
    """Faults of a table itself."""
    unknown = sorted({name for allowed in order.values() for name in allowed} - order.keys())
    faults = [f"the table names {name}, which has no line" for name in unknown]
    faults += [f"the table has a circle: {' -> '.join(group)}" for group in circles(order)]
    return faults


def import_faults(sources: Mapping[str, str], package: str, order: Order) -> list[str]:
    """Imports inside a package that its table does not allow, and circles of files."""
    own = {file: source for file, source in sources.items() if file.startswith(f"{package}/")}
    graph = import_graph(own)
    faults = [
        f"{file} imports {name}: {package}/{entry_of(file)} must not import {package}/{entry_of(name)}"
        for file, imported in sorted(graph.items())
        for name in sorted(imported)
        if entry_of(name) != entry_of(file) and entry_of(name) not in order.get(entry_of(file), ())
    ]
    faults += [f"circle of files: {' -> '.join(group)}" for group in circles(graph)]
    return faults


def table_faults(sources: Mapping[str, str], package: str, order: Order) -> list[str]:
    """Where a table and the folders, root files and imports differ."""
    graph = entry_graph(sources, package)
    there = graph.keys()
    faults = [f"{package}/{name} has no line in the table" for name in sorted(there - order.keys())]
    faults += [f"the table has {package}/{name}, which is not there" for name in sorted(order.keys() - there)]
    faults += [
        f"{package}/{name} does not import {package}/{other} any more: the table allows too much"
        for name in sorted(there & order.keys())
        for other in sorted(order[name] - graph[name])
    ]
    return faults


def imported_below(sources: Mapping[str, str], package: str) -> dict[tuple[str, str], list[str]]:
    """(another package, entry of it) -> the places in `package` that import it. Entry "": the package itself."""
    found: dict[tuple[str, str], list[str]] = {}
    for file, source in sorted(sources.items()):
        own = list(imports(source, file)) if file.startswith(f"{package}/") else []
        for item in own:
            other, _, inside = item.module.partition(".")
            if other not in ORDER or other == package:
                continue
            # `from oarlock.engine import types` reads as `engine` and `engine.types`: the second decides.
            if not inside and any(two.line == item.line and two.module.startswith(f"{other}.") for two in own):
                continue
            name = inside.split(".")[0]
            entry = f"{name}.py" if f"{name}.py" in ORDER[other] else name
            found.setdefault((other, entry), []).append(f"{file}:{item.line}")
    return found


def package_faults(sources: Mapping[str, str], package: str) -> list[str]:
    """Imports of other packages that the table does not allow."""
    return [
        f"{place}: {package} must not import {other}/{entry}"
        for (other, entry), places in imported_below(sources, package).items()
        if entry not in PUBLIC[package].get(other, ())
        for place in places
    ]


def public_faults(sources: Mapping[str, str], package: str) -> list[str]:
    """Entries that `package` may import and does not. `base/` is public as a whole."""
    found = imported_below(sources, package)
    return [
        f"{package} does not import {other}/{entry} any more: the table allows too much"
        for other, allowed in PUBLIC[package].items()
        for entry in sorted(allowed)
        if other != "base" and (other, entry) not in found
    ]
