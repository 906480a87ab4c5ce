"""The ranks, and the devices and kernels that they compute with."""

from __future__ import annotations

from dataclasses import dataclass

from oarlock.server.config.options import option

_GROUP = "Devices"


@dataclass(frozen=True)
class DeviceSettings:
    """Options of the group `Devices`."""

    tensor_parallel_size: int = option(
        1,
        group=_GROUP,
        example="2",
        short="-tp",
        minimum=1,
        maximum=64,
        help="number of ranks that share every layer",
    )
    pipeline_parallel_size: int = option(
        1,
        group=_GROUP,
        example="2",
        short="-pp",
        minimum=1,
        maximum=64,
        help="number of stages, each with its part of the layers and --tensor-parallel-size ranks",
    )
    data_parallel_size: int = option(
        1,
        group=_GROUP,
        example="2",
        short="-dp",
        minimum=1,
        maximum=64,
        help="number of replicas on this host, each with an engine, ranks, weights and KV memory (docs/replicas.md)",
    )
    device: str = option(
        "auto", group=_GROUP, example="cpu", choices=("auto", "cpu", "cuda"), help="where the ranks run"
    )
    num_threads: int | None = option(
        None,
        group=_GROUP,
        example="4",
        minimum=1,
        maximum=1024,
        help="CPU threads of one rank (default: one for each core that --cpu-affinity gives it)",
    )
    cpu_affinity: str = option(
        "auto",
        group=_GROUP,
        example="0-7|8-15",
        help="CPUs that a rank's threads stay on; auto: physical cores of one NUMA node, without hyper-threads and "
        "efficiency cores; none; or a list for each rank",
    )
    attention_backend: str = option(
        "auto",
        group=_GROUP,
        example="reference",
        choices=("auto", "cpp", "torch", "triton", "reference"),
        help="how attention is computed; triton: on CUDA devices; reference: plain torch, slow, for comparison",
    )
    enforce_eager: bool = option(
        False,
        group=_GROUP,
        example="",
        help="launch every operation of every step, where a CUDA device would run decode steps as graphs: slower, and "
        "takes less of its memory",
    )
    batch_invariant: bool = option(
        False,
        group=_GROUP,
        example="",
        help="serve only if answers do not depend on other requests, which the start tests; on CUDA by other "
        "kernels (docs/determinism.md)",
    )
    step_timeout: float | None = option(
        None,
        group=_GROUP,
        example="30",
        minimum=1,
        maximum=3600,
        help="seconds after which a step counts as a hung rank and the server exits; without it 120, or four times the "
        "largest step where that is measured to take longer",
    )
