"""Settings of gated delta nets that families share, and layers that have one in place of attention. Torch-free."""

from collections.abc import Sequence
from dataclasses import replace

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.models.hf_config import layer_kinds
from oarlock.workers.models.hf_fields import Fields, unsupported

LINEAR, FULL = "linear_attention", "full_attention"
_LONGEST_CONVOLUTION = 64  # tokens; known models have 4


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
        fields.count("linear_conv_kernel_dim", 4, least=2, most=_LONGEST_CONVOLUTION),
        eps,
        doubles_beta,
    )


def with_delta(
    spec: DecoderSpec,
    delta: GatedDeltaSpec,
    is_delta: Sequence[bool],
    norms: tuple[str, str] | None = None,
) -> DecoderSpec:
    """Return the model with a gated delta net in place of attention in some layers.

    `norms`: norms before the sublayers of these layers, which then have none after; None: the norms of other layers.
    """
    layers = []
    for layer, replaced in zip(spec.layers, is_delta, strict=True):
        first, *others = layer.branches
        branches = [replace(first, sublayer=delta), *others]
        if norms is not None:
            pairs = zip(branches, norms, strict=True)
            branches = [replace(branch, norm=norm, post_norm=None) for branch, norm in pairs]
        layers.append(replace(layer, branches=tuple(branches)) if replaced else layer)
    return replace(spec, layers=tuple(layers))
