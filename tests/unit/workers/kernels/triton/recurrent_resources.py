"""Compiles the recurrent kernels for kinds of CUDA device, without one, and prints the resources that each takes.

    python -m tests.unit.workers.kernels.triton.recurrent_resources largest|all 80 90

One line of JSON, as of `triton_resources`: of the shapes that take the most, or of all.
"""

import json
import sys

from oarlock.workers.kernels.triton.recurrent.convolution import convolution_constants, convolve
from oarlock.workers.kernels.triton.recurrent.delta_rule import apply_delta_rule, delta_constants
from oarlock.workers.kernels.triton.recurrent.gates import (
    BLOCK,
    compute_delta_gates,
    compute_kimi_gates,
    compute_mamba_steps,
)
from oarlock.workers.kernels.triton.recurrent.mamba import apply_mamba, mamba_constants
from oarlock.workers.kernels.triton.recurrent.norm import norm_constants, norm_group
from tests.unit.workers.kernels.triton.triton_resources import resources

_ROWS = dict.fromkeys(("f", "q", "k", "v", "x", "b", "c", "gate", "out"), "*bf16")
_FLOATS = dict.fromkeys(
    ("log_decay", "beta", "dt", "a", "d", "states", "weight", "bias", "a_log", "dt_bias", "steps"), "*fp32"
)
_STRIDES = ("q_stride", "k_stride", "v_stride", "decay_stride", "beta_stride", "x_stride", "dt_stride", "b_stride")
_STRIDES += ("f_stride", "c_stride", "gate_stride", "a_stride", "sequences", "count")
_NUMBERS = dict.fromkeys(("eps", "beta_scale", "least", "most", "lower_bound"), "fp32")
_TYPES = _ROWS | _FLOATS | _NUMBERS | dict.fromkeys(_STRIDES, "i32")
_DIVISIBLE = _STRIDES[:-2]  # not what depends on the step

DELTA = {"keys of 128": (32, 16, 128, 128), "keys of 96": (30, 30, 96, 192), "keys of 256": (16, 16, 256, 256)}
MAMBA = {"state of 128": (128, 8, 64, 128), "state of 256": (24, 1, 128, 256), "state of 16": (128, 1, 64, 16)}
TAPS = {"4 taps": (8192, 4), "3 taps": (2048, 3)}
GATES = {
    "delta gates": (compute_delta_gates, {}),
    "Kimi gates": (compute_kimi_gates, {"WIDTH": 128, "BOUNDED": False}),
    "Kimi gates, bounded": (compute_kimi_gates, {"WIDTH": 128, "BOUNDED": True}),
    "Mamba steps": (compute_mamba_steps, {"BIAS": True}),
}
GROUPS = {"groups of 128": (32, 128), "group of 8192": (1, 8192)}
LARGEST = ("keys of 256", "decays of channels", "state of 256", "4 taps", "group of 8192", "delta gates")
LARGEST += ("Kimi gates", "norm with a sigmoid")


def recurrent(kind: str, names: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Return the resources of the shapes called `names` on one kind of device."""
    launches = {name: (apply_delta_rule, delta_constants(*shape), {}) for name, shape in DELTA.items()}
    of_channels = delta_constants(32, 32, 128, 128, decays_channels=True)
    launches["decays of channels"] = (apply_delta_rule, of_channels, {})
    launches |= {name: (apply_mamba, mamba_constants(*shape) | {"SKIP": True}, {}) for name, shape in MAMBA.items()}
    launches |= {
        name: (convolve, convolution_constants(*shape) | {"BIAS": True, "SILU": True}, {"states": "*bf16"})
        for name, shape in TAPS.items()
    }
    launches |= {
        name: (norm_group, norm_constants(*shape) | {"GATES_FIRST": True, "SIGMOID": False}, {})
        for name, shape in GROUPS.items()
    }
    of_kimi = norm_constants(32, 128) | {"GATES_FIRST": False, "SIGMOID": True}
    launches["norm with a sigmoid"] = (norm_group, of_kimi, {})
    launches |= {
        name: (
            kernel,
            {"HEADS": 32, "BLOCK": BLOCK, "num_warps": 4} | options,
            {"a": "*bf16", "b": "*bf16", "dt": "*bf16"},
        )
        for name, (kernel, options) in GATES.items()
    }
    found = {}
    for name in names or tuple(launches):
        kernel, constants, types = launches[name]
        options = {"num_warps": constants.pop("num_warps")}
        found[f"{kind} {name}"] = resources(kernel, kind, constants, _TYPES | types, options, _DIVISIBLE)
    return found


def main() -> None:
    found = {}
    for kind in sys.argv[2:]:
        found |= recurrent(kind, LARGEST if sys.argv[1] == "largest" else ())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
