"""Mamba 2: layers with nothing but its recurrence, and no attention. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import declared_dtype
from oarlock.workers.models.hf_fields import Describe, Fields
from oarlock.workers.models.hf_mamba import MOST_TAPS, checked, gguf_mixer, step_limits

# A recurrence has no longest context: these are tokens that a server accepts.
_DEFAULT_LENGTH, _LONGEST_LENGTH = 32768, 2**20
_NAMES = TensorNames(
    prefixes={"backbone.": "model."},
    modules={
        "model.embedding": "model.embed_tokens",
        "model.embeddings": "model.embed_tokens",
        "model.norm_f": "model.norm",
        "model.layers.*.mixer": "model.layers.*.mamba",
    },
)


def describe_mamba2(fields: Fields) -> DecoderSpec:
    fields.refuse_the_rest()
    fields.check_value("hidden_act", "silu", "swish")
    hidden, bias = fields.count("hidden_size"), fields.flag("use_bias", False)
    eps = fields.number("layer_norm_epsilon", 1e-5)
    least, most = step_limits(fields)
    mamba = Mamba2Spec(
        fields.count("num_heads", 128),
        fields.count("head_dim", 64),
        fields.count("n_groups", 8),
        fields.count("state_size", 128),
        fields.count("conv_kernel", 4, least=2, most=MOST_TAPS),
        eps,
        conv_bias=fields.flag("use_conv_bias", True),
        projection_bias=bias,
        output_bias=bias,
        least_step=least,
        most_step=most,
    )
    checked(mamba, fields.count("expand", 2) * hidden, ("num_heads", "head_dim", "n_groups", "expand or hidden_size"))
    layer = LayerSpec((BranchSpec(mamba, "norm"),))
    return DecoderSpec(
        architecture=fields.raw["architectures"][0],
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        layers=(layer,) * fields.layers(),
        norm=NormSpec(eps=eps),
        default_length=_DEFAULT_LENGTH,
        longest_length=_LONGEST_LENGTH,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=declared_dtype(fields.raw),
        names=_NAMES,
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    mixer = gguf_mixer(settings)
    return {
        "num_heads": mixer.heads, "head_dim": mixer.head_dim, "n_groups": mixer.groups, "state_size":
        mixer.state_width, "conv_kernel": mixer.taps, "use_conv_bias": mixer.conv_bias, "use_bias":
        mixer.projection_bias, "expand": max(1, mixer.width // config["hidden_size"]), "layer_norm_epsilon":
        config["rms_norm_eps"],
    }  # fmt: skip


GGUF_MAMBA2 = GGUFFamily("mamba2", "Mamba2ForCausalLM", _own, has_attention=False)


FAMILIES: dict[str, Describe] = {
    "Mamba2ForCausalLM": describe_mamba2,
}
GGUF_FAMILIES = (GGUF_MAMBA2,)
