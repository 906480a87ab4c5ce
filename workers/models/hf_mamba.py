"""Settings of Mamba 2 that families share, and the kinds of their layers. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.model_files.gguf_model import GGUFSettings
from oarlock.workers.models.hf_fields import Fields, unsupported, wrong

MAMBA, ATTENTION = "linear_attention", "full_attention"
_OLDER = {"mamba": MAMBA, "attention": ATTENTION}  # names of kinds in older configs
MOST_TAPS = 8  # tokens of a convolution that the kernels support; known models have 4
_SILU = ("silu", "swish")
_INFINITY = {"__float__": "Infinity"}  # as transformers writes it


def kinds_of_layers(fields: Fields, key: str, default: list[str], others: Sequence[str] = ()) -> list[str]:
    """Return the kind of each layer at `key` or at its other name, with the names of transformers 5.

    `default`: the kinds if there is no list. `others`: further kinds that the family has.
    """
    names = dict.fromkeys((key, "layer_types", "layers_block_type"))
    given = next((name for name in names if fields.raw.get(name) is not None), None)
    if given is None:
        return default
    found, known = fields.raw[given], (MAMBA, ATTENTION, *others)
    if not isinstance(found, list) or not found:
        raise unsupported(given, found, "It must be a list with the kind of each layer.")
    kinds = [_OLDER.get(kind, kind) if isinstance(kind, str) else kind for kind in found]
    if any(kind not in known for kind in kinds):
        raise unsupported(given, found, f"Each layer must be one of {', '.join(known)}.")
    return kinds


def bamba_mixer(
    fields: Fields, eps: float, *, width: int | None = None, output_bias: bool | None = None, state: int = 256
) -> Mamba2Spec:
    """Return the Mamba 2 of Bamba's kind, from the keys that begin with `mamba_`.

    `width`: values of all heads; None: `mamba_expand` times the hidden size. `output_bias`: None for that of the input
    projection. `state`: default of the state's width.
    """
    fields.check_value("hidden_act", *_SILU)  # the activation of the convolution
    heads = fields.count("mamba_n_heads", 128)
    width = width or fields.count("mamba_expand", 2) * fields.count("hidden_size")
    automatic = fields.raw.get("mamba_d_head") in (None, "auto")
    head_dim = max(1, width // heads) if automatic else fields.count("mamba_d_head")
    bias = fields.flag("mamba_proj_bias", False)
    least, most = step_limits(fields)
    return checked(
        Mamba2Spec(
            heads,
            head_dim,
            fields.count("mamba_n_groups", 1),
            fields.count("mamba_d_state", state),
            fields.count("mamba_d_conv", 4, least=2, most=MOST_TAPS),
            eps,
            conv_bias=fields.flag("mamba_conv_bias", True),
            projection_bias=bias,
            output_bias=bias if output_bias is None else output_bias,
            least_step=least,
            most_step=most,
        ),
        width,
        ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_expand, mamba_d_ssm or hidden_size"),
    )


def checked(mamba: Mamba2Spec, width: int, keys: tuple[str, str, str, str]) -> Mamba2Spec:
    """Return `mamba` if its heads fill `width` and its groups have equally many heads. `keys`: of heads, their width,
    groups and `width`, for errors."""
    heads, head_dim, groups, whole = keys
    if mamba.width != width:
        raise StartupError(
            f"config.json: {mamba.num_heads} heads of {mamba.head_dim} do not fill the {width} values of Mamba.",
            f"Repair {heads}, {head_dim}, {whole}.",
        )
    if mamba.num_heads % mamba.groups:
        raise StartupError(
            f"config.json: {mamba.groups} groups cannot share {mamba.num_heads} heads of Mamba evenly.",
            f"Repair {groups} or {heads}.",
        )
    return mamba


def step_limits(fields: Fields) -> tuple[float, float]:
    """Return the limits of time steps at `time_step_limit`; by default there are none."""
    found: Any = fields.raw.get("time_step_limit")
    if found is None:
        return 0.0, math.inf
    if not isinstance(found, list) or len(found) != 2:
        raise wrong("time_step_limit", "a list of two numbers", found)
    least, most = (math.inf if one == _INFINITY else one for one in found)
    if not all(type(one) in (int, float) for one in (least, most)) or not 0 <= least <= most or least == math.inf:
        raise wrong("time_step_limit", "two numbers in ascending order, not below 0", found)
    return float(least), float(most)


@dataclass(frozen=True, slots=True)
class GGUFMixer:
    """Sizes and biases of Mamba 2 in a GGUF file."""

    heads: int
    head_dim: int
    groups: int
    state_width: int
    taps: int
    conv_bias: bool
    projection_bias: bool
    output_bias: bool

    @property
    def width(self) -> int:
        """Values of all heads."""
        return self.heads * self.head_dim


def gguf_mixer(settings: GGUFSettings) -> GGUFMixer:
    """Return the Mamba 2 of a file. Biases are those of its first layer with Mamba."""
    tensors, heads = settings.model.tensors, max(1, settings.count(".ssm.time_step_rank"))
    first = next((name.rpartition(".")[0] for name in tensors if name.endswith(".ssm_in.weight")), "blk.0.ssm_in")
    before = first.removesuffix("ssm_in")
    return GGUFMixer(
        heads,
        settings.count(".ssm.inner_size") // heads,
        settings.count(".ssm.group_count"),
        settings.count(".ssm.state_size"),
        settings.count(".ssm.conv_kernel"),
        f"{before}ssm_conv1d.bias" in tensors,
        f"{before}ssm_in.bias" in tensors,
        f"{before}ssm_out.bias" in tensors,
    )


def gguf_bamba_mixer(settings: GGUFSettings) -> dict[str, Any]:
    """Return the settings that `bamba_mixer` reads."""
    mixer = gguf_mixer(settings)
    return {
        "mamba_n_heads": mixer.heads, "mamba_d_head": mixer.head_dim, "mamba_n_groups": mixer.groups,
        "mamba_d_state": mixer.state_width, "mamba_d_conv": mixer.taps, "mamba_conv_bias": mixer.conv_bias,
        "mamba_proj_bias": mixer.projection_bias,
        "mamba_expand": max(1, mixer.width // settings.count(".embedding_length")),
    }  # fmt: skip


def gguf_rows(settings: GGUFSettings, module: str) -> int:
    """Return the width of the first of the file's matrices `module`, or of its experts; 0 if there is none."""
    ends = f".{module}.weight"
    shapes = (found.entry.shape for name, found in settings.model.tensors.items() if name.endswith(ends))
    return next((shape[-2] for shape in shapes if len(shape) > 1), 0)
