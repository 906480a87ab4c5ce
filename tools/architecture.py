"""Pictures of docs/architecture.md: the imports between the folders and public files of a package."""

from functools import cache
from graphlib import TopologicalSorter

import grimp

from tests.house.rules import ROOT


def picture(package: str) -> str:
    """Return the imports inside a package as a Mermaid graph, without arrows that a longer path implies."""
    found = imports_inside(package)
    lines = ["```mermaid", "flowchart TD"]
    for name in found:
        is_folder = (ROOT / package / name).is_dir()
        lines.append(f'  n_{name}["{name}/"]' if is_folder else f'  n_{name}(["{name}.py"])')
    for name, imported in found.items():
        implied = set().union(*(reached(found, other) - {other} for other in imported))
        if imported:
            lines.append(f"  n_{name} --> {' & '.join(f'n_{other}' for other in found if other in imported - implied)}")
    return "\n".join([*lines, "```"])


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("oarlock", cache_dir=None)


def imports_inside(package: str) -> dict[str, set[str]]:
    """Return the folders and files at the root of a package, from the top down, each with its imports."""
    graph, root = _graph(), f"oarlock.{package}"
    names = sorted(graph.find_children(root))
    for name in names:
        graph.squash_module(name)
    found = {name: graph.find_modules_directly_imported_by(name) & {*names} for name in names}
    order = TopologicalSorter({name: sorted(imported) for name, imported in found.items()}).static_order()
    return {_last(name): {_last(other) for other in found[name]} for name in reversed([*order])}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def reached(graph: dict[str, set[str]], name: str) -> set[str]:
    """Return every node that can be reached from a node of a graph without circles, and the node."""
    return {name}.union(*(reached(graph, other) for other in graph[name]))
