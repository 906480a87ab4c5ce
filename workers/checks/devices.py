"""The device that ranks run on, and whether its kernels serve what is asked for."""

import logging

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.topology import Topology
from oarlock.workers.errors import StartupError
from oarlock.workers.kernels.cpu import levels
from oarlock.workers.platform import cuda_driver, triton_needs
from oarlock.workers.platform.cores import available_cores

logger = logging.getLogger("oarlock.preflight")


def ranks_here(config: WorkerConfig) -> int:
    """The ranks of one host, of all replicas, each with a device of its own where there are as many."""
    return Topology.of(config).ranks_per_node * config.data_parallel_size


def resolve_device(config: WorkerConfig) -> str:
    """Resolves the device, `cpu` or `cuda`, and checks that it can serve. Raises `StartupError`."""
    device = _find_device(config)
    if device == "cuda":
        check_products_on_cuda(config)
    else:
        _check_cores(config)
        levels.chosen()  # raises where the environment names a level of the kernels that this processor has not
    return device


def _check_cores(config: WorkerConfig) -> None:
    """Replicas that take turns on a core are slower than one alone."""
    replicas, cores = config.data_parallel_size, available_cores()
    if replicas == 1 or config.ranks_on_host <= cores:
        return
    most = cores // config.ranks_per_node
    raise StartupError(
        f"--data-parallel-size {replicas} x {config.ranks_per_node} rank(s) of a replica makes {config.ranks_on_host} "
        f"ranks for {cores} CPU core(s): replicas would take turns.",
        f"Use --data-parallel-size {most}." if most > 1 else "Leave --data-parallel-size out: one replica is faster.",
    )


def check_products_on_cuda(config: WorkerConfig) -> None:
    """Checks that Triton kernels run if quantised weights or `--batch-invariant` need them. Raises `StartupError`."""
    if config.batch_invariant:
        _check_batch_invariance(config)
    if config.quantization == "none":
        return
    wrong = triton_needs.why_not(ranks_here(config))
    if wrong is not None:
        raise StartupError(f"quantization {config.quantization} on CUDA takes kernels in Triton: {wrong[0]}.", wrong[1])


def _check_batch_invariance(config: WorkerConfig) -> None:
    """Checks that the CUDA kernels which promise batch invariance serve this configuration."""
    wrong = triton_needs.why_not(ranks_here(config))
    if wrong is not None:
        reason = f"takes kernels in Triton: {wrong[0]}"
    elif config.quantization != "none":
        reason = f"has no products with weights of quantization {config.quantization}: many rows are computed otherwise"
    elif config.dtype == "float16" and config.kv_cache_dtype == "int8":
        reason = "has no attention over pages of int8 in float16, where small weights lose digits: use fp8 or bfloat16"
    elif config.attention_backend not in ("auto", "triton"):
        reason = f"takes attention by Triton, not by {config.attention_backend}"
    else:
        return
    raise StartupError(f"--batch-invariant on CUDA {reason}.", "Leave --batch-invariant out, or use --device cpu.")


def _find_device(config: WorkerConfig) -> str:
    if config.device == "cpu":
        return "cpu"
    count = cuda_driver.device_count()
    driver, built = cuda_driver.driver_version(), cuda_driver.built_for()
    too_old = cuda_driver.why_too_old(driver, built) if driver is not None and built is not None else None
    if too_old is not None and config.device == "auto":
        logger.warning("event=device_chosen device=cpu reason=%r fix=%r", *too_old)
        return "cpu"
    if too_old is not None:
        raise StartupError(f"--device cuda: {too_old[0]}.", too_old[1])
    if config.device == "auto" and count == 0:
        return "cpu"
    if count == 0:
        raise StartupError(
            "--device cuda: no CUDA device answers, or torch was built without CUDA.", "Use --device cpu."
        )
    needed = ranks_here(config)
    if count < needed and not config.share_device:
        raise _too_few_devices(config, needed, count)
    return "cuda"


def _too_few_devices(config: WorkerConfig, needed: int, count: int) -> StartupError:
    of_replica = needed // config.data_parallel_size
    if config.data_parallel_size > 1:
        fewer = f"--data-parallel-size {count // of_replica}" if count >= of_replica else "smaller sizes"
        return StartupError(
            f"data_parallel_size {config.data_parallel_size} x {of_replica} rank(s) of a replica needs {needed} CUDA "
            f"devices; {count} found.",
            f"Use {fewer}, or --device cpu.",
        )
    if config.nnodes == 1 and config.pipeline_parallel_size == 1:
        return StartupError(
            f"tensor_parallel_size {needed} needs as many CUDA devices; {count} found.",
            f"Use --tensor-parallel-size {count}, or --device cpu.",
        )
    sizes = f"tensor_parallel_size {config.tensor_parallel_size} x pipeline_parallel_size "
    sizes += f"{config.pipeline_parallel_size} on {config.nnodes} host(s)"
    return StartupError(
        f"{sizes} needs {needed} CUDA devices on each host; this one has {count}.",
        "Use smaller sizes, more hosts, or --device cpu.",
    )
