"""A made-up /sys/devices, as Linux describes the processors of other machines."""

from pathlib import Path


def pairs(cores: int) -> dict[int, str]:
    """Two hardware threads per core, neighbours: 0-1, 2-3 and so on."""
    return {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(2 * cores)}


def make_system(
    folder: Path,
    siblings: dict[int, str],
    *,
    nodes: dict[int, str] | None = None,
    online: str = "",
    atoms: str = "",
    speeds: dict[int, int] | None = None,
    speed_file: str = "cpu_capacity",
) -> Path:
    """`siblings`: for each CPU, the list of the threads of its core, or empty where it has no topology folder.

    `nodes`: the CPUs of each NUMA node; None: no folder of nodes. `speeds`: what `speed_file` says of each CPU.
    """
    for cpu, text in siblings.items():
        own = folder / f"system/cpu/cpu{cpu}"
        own.mkdir(parents=True)
        if text:
            write(own / "topology/thread_siblings_list", text)
        if speeds:
            write(own / speed_file, str(speeds[cpu]))
    if online:
        write(folder / "system/cpu/online", online)
    if atoms:
        write(folder / "cpu_atom/cpus", atoms)
    for node, text in (nodes or {}).items():
        write(folder / f"system/node/node{node}/cpulist", text)
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
