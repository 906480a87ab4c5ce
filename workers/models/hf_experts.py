"""Settings of experts that MoE families share: layers with experts, routers with groups, layers that predict ahead.

The number of experts is read in `hf_config.py`. Torch-free.
"""

from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.experts_spec import RouterSpec
from oarlock.workers.model_files.gguf_model import GGUFSettings
from oarlock.workers.models.hf_fields import Fields, unsupported

_MOST_AHEAD = 16  # multi-token prediction layers; known models have one


def sparse_layers(fields: Fields, dense: int) -> list[bool]:
    """Return whether each layer has experts: from `mlp_layer_types` if given, otherwise all but the first
    `first_k_dense_replace` layers, `dense` by default."""
    layers, kinds = fields.layers(), fields.raw.get("mlp_layer_types")
    dense = fields.count("first_k_dense_replace", dense, least=0)
    if kinds is None:
        return _checked([index >= dense for index in range(layers)], "first_k_dense_replace")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise unsupported("mlp_layer_types", kinds, f"One of dense or sparse for each of the {layers} layers.")
    return _checked([kind == "sparse" for kind in kinds], "mlp_layer_types")


def sparse_by_step(fields: Fields, dense: tuple[int, ...] = ()) -> list[bool]:
    """Return whether each layer has experts: every `decoder_sparse_step`-th, except the layers of `mlp_only_layers`,
    `dense` by default."""
    layers, step = fields.layers(), fields.count("decoder_sparse_step", 1)
    without = fields.raw.get("mlp_only_layers")
    if without is None:
        without = [index for index in dense if index < layers]
    if not isinstance(without, list) or not all(type(index) is int and 0 <= index < layers for index in without):
        raise unsupported("mlp_only_layers", without, f"A list of numbers of its {layers} layers.")
    found = [index not in without and (index + 1) % step == 0 for index in range(layers)]
    return _checked(found, "mlp_only_layers or decoder_sparse_step")


def _checked(is_sparse: list[bool], keys: str) -> list[bool]:
    if not any(is_sparse):
        raise StartupError(f"config.json: of num_hidden_layers = {len(is_sparse)} none has experts.", f"Repair {keys}.")
    return is_sparse


def grouped_router(
    fields: Fields,
    experts: int,
    top_k: int,
    *,
    normalised: bool = True,
    scale: float = 1.0,
    groups: tuple[int, int] = (1, 1),
) -> RouterSpec:
    """Return DeepSeek's router: corrected sigmoid scores choose groups of experts, then experts of these groups.

    `normalised`, `scale` and `groups` (number of groups, and number of chosen groups) are the family's defaults.
    """
    count, chosen = group_counts(fields, experts, top_k, groups)
    return RouterSpec(
        top_k,
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", normalised),
        scale=fields.number("routed_scaling_factor", scale),
        groups=count,
        top_groups=chosen,
        correction="gate.e_score_correction_bias",
    )


def group_counts(fields: Fields, experts: int, top_k: int, defaults: tuple[int, int]) -> tuple[int, int]:
    """Return the number of groups of experts, and the number of chosen groups, whose defaults are `defaults`."""
    groups, top_groups = fields.count("n_group", defaults[0]), fields.count("topk_group", defaults[1])
    if experts % groups or top_groups > groups or top_k > experts // groups * top_groups or experts // groups < 2:
        raise StartupError(
            f"config.json: {top_k} of {experts} experts cannot be chosen from {top_groups} of {groups} groups.",
            "Repair n_routed_experts, num_experts, num_local_experts, moe_num_experts, n_group, topk_group or "
            "num_experts_per_tok.",
        )
    return groups, top_groups


def layers_ahead(fields: Fields, default: int = 0) -> tuple[str, ...]:
    """Return the stored names of layers that predict tokens further ahead, which come last and are not served.

    `default`: the family's default of their number.
    """
    layers = fields.layers()
    key = "num_nextn_predict_layers" if fields.raw.get("num_nextn_predict_layers") is not None else "num_mtp_layers"
    ahead = fields.count(key, default, least=0, most=_MOST_AHEAD)
    return tuple(f"{of}.{layers + n}" for n in range(ahead) for of in ("model.layers", "blk"))


def gguf_grouped(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `grouped_router` and of the layers around it."""
    settings.check_sigmoid_router()
    return gguf_layers_ahead(settings, config) | {
        "moe_intermediate_size": settings.count(".expert_feed_forward_length"),
        "first_k_dense_replace": settings.count(".leading_dense_block_count", 0),
        "n_group": settings.count(".expert_group_count", 1),
        "topk_group": settings.count(".expert_group_used_count", 1),
        "routed_scaling_factor": settings.number(".expert_weights_scale", 1.0),
        "norm_topk_prob": settings.flag(".expert_weights_norm", True),
    }


def gguf_layers_ahead(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of layers. The file counts those that predict further ahead among the others."""
    ahead = settings.count(".nextn_predict_layers", 0)
    return {"num_hidden_layers": config["num_hidden_layers"] - ahead, "num_nextn_predict_layers": ahead}
