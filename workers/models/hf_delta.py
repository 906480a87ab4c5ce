"""Settings of gated delta nets that families share, and which layers have one. Torch-free."""

from oarlock.base.errors import StartupError
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.models.hf_config import layer_kinds
from oarlock.workers.models.hf_fields import Fields, unsupported

LINEAR, FULL = "linear_attention", "full_attention"
LONGEST_CONVOLUTION = 64  # tokens; known models have 4


def delta_layers(fields: Fields, every: int) -> list[bool]:
    """Return whether each layer has a gated delta net: from `layer_types` if given, otherwise all but each `every`-th.

    Raise `StartupError` if no layer has attention.
    """
    given = layer_kinds(fields, LINEAR)
    kinds = given or [FULL if (index + 1) % every == 0 else LINEAR for index in range(fields.layers())]
    if FULL not in kinds:
        key, value = ("layer_types", given) if given else ("full_attention_interval", every)
        raise unsupported(key, value, f"At least one of layer_types must be {FULL}.")
    return [kind == LINEAR for kind in kinds]


def gated_delta(
    fields: Fields, heads: tuple[int, int], widths: tuple[int, int], eps: float, *, doubles_beta: bool = False
) -> GatedDeltaSpec:
    """Return the gated delta net of a family. `heads`, `widths`: its defaults, of keys and of values."""
    fields.check_value("hidden_act", "silu", "swish")  # the activation of the convolution
    keys = fields.count("linear_num_key_heads", heads[0])
    values = fields.count("linear_num_value_heads", heads[1])
    if values % keys:
        raise StartupError(
            f"config.json: {values} value heads cannot share {keys} key heads evenly.",
            "Repair linear_num_value_heads or linear_num_key_heads.",
        )
    return GatedDeltaSpec(
        keys,
        values,
        fields.count("linear_key_head_dim", widths[0]),
        fields.count("linear_value_head_dim", widths[1]),
        fields.count("linear_conv_kernel_dim", 4, least=2, most=LONGEST_CONVOLUTION),
        eps,
        doubles_beta,
    )
